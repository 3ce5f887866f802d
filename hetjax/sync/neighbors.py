"""How decentralized workers exchange: parameters between neighbors, and a few numbers of all workers.

Inside a process parameters are copied from device to device. Between processes they travel by way of the hosts, once to
every process that has a neighbor, as do the sums of loss, metrics and timings, which all processes add in worker order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetjax import processes
from hetjax.devices.workers import Workers
from hetjax.fleet.slice_exchange import SliceExchange
from hetjax.sync.replicas import narrowed, wide_sum

Arrays = list[Any]  # of one worker, as `Bundles` lays them out
Sources = list[tuple[int, float]]  # a worker's neighbors of this step, and the weights of their parameters

_LARGE = 2**14  # elements: smaller arrays are sent together
_FRAME = 2**24  # bytes
ROWS, FLAGS, PARAMETERS = range(3)  # pieces of a round; the parameters of worker i are at PARAMETERS + i


class Bundles:
    """A few arrays to send instead of many leaves: large leaves as they are, small ones of a dtype concatenated.

    Args:
        shapes: those of the leaves.
    """

    def __init__(self, shapes: Sequence[Any]):
        self.shapes = list(shapes)
        self.large = [k for k, x in enumerate(shapes) if x.size >= _LARGE]
        small: dict[Any, list[int]] = {}
        for k, x in enumerate(shapes):
            if x.size < _LARGE:
                small.setdefault(x.dtype, []).append(k)
        self.small = list(small.values())
        self.sent = [self.shapes[k] for k in self.large] + [
            jax.ShapeDtypeStruct((sum(self.shapes[k].size for k in group),), self.shapes[group[0]].dtype)
            for group in self.small
        ]  # shapes of the arrays sent

    def concatenated(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """The small leaves; on a device."""
        return [jnp.concatenate([jnp.ravel(leaves[k]) for k in group]) for group in self.small]

    def of(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """All that is sent; on a device."""
        return [leaves[k] for k in self.large] + self.concatenated(leaves)

    def leaves(self, sent: Sequence[jax.Array]) -> list[jax.Array]:
        """The inverse of `of`."""
        found: list[Any] = [None] * len(self.shapes)
        for k, x in zip(self.large, sent, strict=False):
            found[k] = x
        for group, x in zip(self.small, sent[len(self.large) :], strict=True):
            cuts = np.cumsum([self.shapes[k].size for k in group])[:-1]
            for k, part in zip(group, jnp.split(x, cuts), strict=True):
                found[k] = part.reshape(self.shapes[k].shape)
        return found


class NeighborMessages:
    """Messages between the workers of all processes in a step. Collective: every process calls the same methods.

    Args:
        workers: all workers.
        sent: shapes of the arrays that a worker sends (`Bundles.sent`).
    """

    def __init__(self, workers: Workers, sent: Sequence[Any]):
        self.workers, self.sent, self.round = workers, list(sent), 0
        self._process_W = workers.process_W.tolist()
        self.others = [process for process in dict.fromkeys(self._process_W) if process != workers.process]
        link = processes.link() if self.others else None
        self._channel = None if link is None else link.channel()
        self._slices = None if link is None else SliceExchange(link)

    def begin(self) -> int:
        """Start a step; the number of its round."""
        self.round += 1
        return self.round

    def send_vectors(self, own_wxK: np.ndarray, piece: int, round_: int) -> None:
        """Send the rows of own workers to all processes."""
        for process in self.others:
            self._channel_at(round_).send(process, piece, [own_wxK.view(np.uint8).reshape(-1)])

    def receive_vectors(self, own_wxK: np.ndarray, piece: int, round_: int) -> np.ndarray:
        """The rows of all workers, in their order."""
        rows = {process: self._channel_at(round_).receive(process, piece)[0] for process in self.others}
        of = lambda process: np.frombuffer(rows[process], own_wxK.dtype).reshape(-1, own_wxK.shape[1])
        me = self.workers.process
        return np.concatenate([own_wxK if process == me else of(process) for process in dict.fromkeys(self._process_W)])

    def copy(self, own: Mapping[int, Arrays], sources_w: Sequence[Sources]) -> list[dict[int, Arrays]]:
        """The parameters of own workers for their neighbors in this process, by neighbor: copied to its device.

        Those of a CPU device are read where they are. The update cannot reuse their memory meanwhile, but half of the
        time of a mixing step was spent on copies (ring of 4 CPU devices, 5 million parameters: 30 ms instead of 60).
        """
        on_cpu = [device.platform == "cpu" for device in self.workers.own]
        given = {i: list(map(np.asarray, own[i])) if cpu else own[i]
                 for i, cpu in zip(self.workers.local, on_cpu, strict=True)}  # fmt: skip
        return [
            {sender: jax.device_put(given[sender], device) for sender, _ in sources if sender in own}
            for device, sources in zip(self.workers.own, sources_w, strict=True)
        ]

    def send(self, own: Mapping[int, Arrays], pairs: Iterable[tuple[int, int]], round_: int) -> None:
        """Send the parameters of own workers to the processes of their neighbors; `pairs`: (sender, receiver)."""
        for sender, process in sorted({(a, self._process_W[b]) for a, b in pairs}):
            if sender in own and process != self.workers.process:
                frames = [frame for x in own[sender] for frame in _frames(np.asarray(x).reshape(-1))]
                self._channel_at(round_).send(process, PARAMETERS + sender, frames)

    def receive(self, senders: Iterable[int], round_: int) -> dict[int, Arrays]:
        """The parameters of workers of other processes, on the host."""
        return {sender: self._parameters(sender, round_) for sender in senders}

    def mean(self, own: Sequence[Arrays], share_W: np.ndarray) -> list[np.ndarray]:
        """The mean over all workers by their shares, added in the order of workers and of processes; on the host."""
        share_w = share_W[list(self.workers.local)].tolist()
        sums = [wide_sum([np.asarray(x) for x in part], share_w) for part in zip(*own, strict=True)]
        if self._slices is not None:
            flat, _ = self._slices([x.reshape(-1) for x in sums], lambda _, part_P, messages: wide_sum(part_P))
            sums = [total.reshape(x.shape) for total, x in zip(flat, sums, strict=True)]
        return [narrowed(total, x.dtype) for total, x in zip(sums, self.sent, strict=True)]

    def _parameters(self, sender: int, round_: int) -> Arrays:
        frames = iter(self._channel_at(round_).receive(self._process_W[sender], PARAMETERS + sender))
        found = []
        for x in self.sent:
            parts = [next(frames) for _ in range(max(1, -(-x.size * x.dtype.itemsize // _FRAME)))]
            whole = parts[0] if len(parts) == 1 else b"".join(parts)
            found.append(np.frombuffer(whole, x.dtype).reshape(x.shape))
        return found

    def _channel_at(self, round_: int) -> Any:
        assert self._channel is not None
        self._channel.round = round_
        return self._channel


def _frames(flat: np.ndarray) -> list[np.ndarray]:
    content = flat.view(np.uint8)
    return [content[start : start + _FRAME] for start in range(0, max(1, len(content)), _FRAME)]
