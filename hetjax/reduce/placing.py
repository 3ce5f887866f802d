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
from hetjax.reduce.same_host import host_name
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


def room_for_state(workers: Workers, core: Any, device: jax.Device) -> np.ndarray:
    """The share of the optimizer state that each process has memory for, besides parameters and gradients.

    It is the memory of the place of the update: of the process's first device, or of the host, of which the processes
    on it have equal parts. Memory given by the user, that of the first worker, is taken instead of both. During an
    update the old and the new state of a slice exist at the same time. Collective, unless the fleet is elastic: then
    only the room of this process is known until the members meet, and each counts with all of its host.

    Args:
        workers: all workers.
        core: the whole core; only shapes and dtypes are used.
        device: where this process updates its slice.
    """
    params, _, opt_state, ema = core
    taken, state = 2 * memory.size(params) + memory.size(trainable(params)), 2 * memory.size((opt_state, ema))
    of_first, of_host = workers.members[workers.local[0]].memory, memory.host()
    host_P = [host_name()] if workers.elastic else processes.gather(host_name())
    if workers.memory_given or device.platform != "cpu":
        room = np.inf if of_first is None else of_first - taken
    elif of_host is None:
        room = np.inf
    else:
        on_cpu = sum(own.platform == "cpu" for own in workers.own)  # these hold parameters and gradients there, too
        room = of_host * memory.SAFE_SHARE / host_P.count(host_name()) - taken * max(1, on_cpu)
    own = float(np.clip(room / max(state, 1), 0.0, 1.0))
    if workers.elastic:
        return np.where(np.arange(int(workers.process_W.max()) + 1) == workers.process, own, 0.0)
    return np.array(processes.gather(own))


def _median_seconds(run: Any) -> float:
    run()
    times = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return float(np.median(times))
