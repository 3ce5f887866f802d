"""Where sums meet and slices are updated: chosen by measurement, within the memory of the processes."""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np
import optax

from hetjax import processes
from hetjax.devices import memory
from hetjax.devices.compile import compile_for, expected
from hetjax.devices.workers import Workers, device_kind
from hetjax.reduce.granularity import granularity
from hetjax.reduce.layout import Layout, Parts
from hetjax.reduce.slices import Granularity
from hetjax.reduce.trainable import trainable

Tree = Any

_ROUNDS = 3  # after one warm-up round


def agreed_granularity(optimizer: optax.GradientTransformation, params: Tree) -> Granularity:
    """How finely the optimizer can be sliced; process 0 finds out, on its host, for all processes."""
    found: Granularity | None = None
    if processes.first() or processes.elastic():  # a member that joins later finds the same
        with jax.default_device(host_device()):
            found = granularity(optimizer, trainable(params))
    return processes.gather(found)[0] if found is None or not processes.elastic() else found


def host_device() -> jax.Device:
    """The CPU as a device of JAX."""
    return jax.local_devices(backend="cpu")[0]


def update_device(options: Any, workers: Workers) -> jax.Device:
    """Where this process updates its slice: the host, where the sums arrive, or the device if that is quicker.

    On the host an accelerator holds parameters and gradients only. Moving a slice to the device and back costs more
    than the update itself, unless the host is slow; so 'auto' measures both on a slice of a million parameters.
    """
    device, host = workers.own[0], host_device()
    if options.update_on == "host" or device.platform == "cpu":
        return device if device.platform == "cpu" else host
    if options.update_on == "device":
        return device
    return min((host, device), key=_seconds_of_an_update)


def _seconds_of_an_update(device: jax.Device) -> float:
    """Seconds to move a million gradients to a device, apply Adam and move the parameters back."""
    optimizer, zeros = optax.adam(1e-3), np.zeros(2**20, np.float32)

    def update(params: jax.Array, state: Any, grads: jax.Array) -> Any:
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state

    with expected():
        state = jax.eval_shape(optimizer.init, zeros)
        (run,) = compile_for(update, (zeros, state, zeros), [device])
        state = jax.device_put(jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state), device)
    return _median_seconds(lambda: np.asarray(run(zeros, state, zeros)[0]))


def meeting_place(workers: Workers, layout: Layout) -> jax.Device:
    """The device on which the sums of unlike workers of one process meet: that of one of them, or the host's.

    Each candidate receives the parts of all workers, adds them, and sends back as many numbers; the quickest is taken.
    """
    zeros = tuple(np.zeros((1, size), layout.dtype) for size in layout.sizes)
    parts_w = [jax.device_put(zeros, device) for device in workers.own]
    kinds = {device_kind(device): device for device in reversed([*workers.own, host_device()])}
    seconds = {}
    for place in reversed(kinds.values()):
        with expected():
            (add,) = compile_for(lambda a, b: jax.tree.map(jax.lax.add, a, b), (zeros, zeros), [place])

        def meet(place: jax.Device = place, add: Any = add) -> None:
            total: Parts | None = None
            for parts in parts_w:
                here = jax.device_put(parts, place)
                total = here if total is None else add(total, here)
            jax.block_until_ready([jax.device_put(total, device) for device in workers.own if device != place])

        seconds[place] = _median_seconds(meet)
    return min(seconds, key=seconds.__getitem__)


def room_for_state(workers: Workers, core: Any) -> np.ndarray:
    """The share of the optimizer state that each process has memory for, besides parameters and gradients.

    During an update the old and the new state of a slice exist at the same time.
    """
    params, _, opt_state, ema = core
    taken, state = 2 * memory.size(params) + memory.size(trainable(params)), 2 * memory.size((opt_state, ema))
    room_P = np.zeros(int(workers.process_W.max()) + 1)
    for worker in workers.members:
        room = np.inf if worker.memory is None else worker.memory - taken
        room_P[worker.process] = max(room_P[worker.process], room)  # one device holds the slice of its process
    return np.clip(room_P / max(state, 1), 0.0, 1.0)


def _median_seconds(run: Any) -> float:
    run()
    times = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return float(np.median(times))
