"""The sum of all workers' parts, within a program over all of them.

In one process and on accelerators this is XLA's own `psum`, whatever the size. Between CPU processes that would be
gloo's ring: 2 (W - 1) messages one after the other, each of which waits for every process to get its turn on a core.
A small vector is therefore sent by everybody to everybody at once, in one `all_to_all`, and added up in the same order
by all: one turn instead of six for four processes. Under quotas of 0.8, 0.4, 0.2 and 0.2 of a core and with 20 thousand
numbers, the sum came 7 ms after the last arrival instead of 17, for 0.9 ms of CPU time instead of 2.3.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from hetjax.devices.workers import AXIS, Workers
from hetjax.reduce.layout import Parts

# Bytes that a worker may send to all others together. Their time on the wire, 4 ms by Ethernet of 1 Gbit/s, must not
# outweigh the turns that are saved; four workers under quotas gained up to four times as much, lost at ten times.
_AT_ONCE = 2**19


def sum_parts(parts: Parts, workers: Workers) -> Parts:
    """The sum of the workers' parts, of one dtype, on every worker."""
    sizes = [part.size for part in parts]
    if not at_once(sum(part.nbytes for part in parts), workers):
        return jax.lax.psum(parts, AXIS)
    own = jnp.concatenate(parts)
    sent_WxN = jnp.broadcast_to(own, (len(workers), len(own)))
    came_WxN = jax.lax.all_to_all(sent_WxN, AXIS, split_axis=0, concat_axis=0, tiled=True)
    summed = functools.reduce(jnp.add, [came_WxN[i] for i in range(len(workers))])  # in worker order
    return tuple(jnp.split(summed, np.cumsum(sizes)[:-1]))


def at_once(nbytes: int, workers: Workers) -> bool:
    """Whether a vector of so many bytes is sent by everybody to everybody."""
    on_cpu = all(device.platform == "cpu" for device in workers.devices)
    return workers.several_processes and on_cpu and nbytes * (len(workers) - 1) <= _AT_ONCE
