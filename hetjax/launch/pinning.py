"""Which cores each process keeps to: a share of them in proportion to its quota, or one that it shares."""

from __future__ import annotations

from collections.abc import Sequence


def cores_for(weights: Sequence[float], cores: Sequence[int]) -> list[list[int]]:
    """Cores for each process by its weight (all alike: round robin).

    With enough cores each process has its own, at least one, the others going where weight per core is highest. With
    more processes than cores each has one, the heaviest first onto the core with the least weight.
    """
    heaviest = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    if len(weights) <= len(cores):
        shares = [1] * len(weights)
        for _ in range(len(cores) - len(weights)):
            shares[max(range(len(weights)), key=lambda i: (weights[i] / shares[i], -i))] += 1
        starts = [sum(shares[:i]) for i in range(len(weights))]
        return [list(cores[start : start + share]) for start, share in zip(starts, shares, strict=True)]
    load = dict.fromkeys(cores, 0.0)
    chosen: dict[int, int] = {}
    for i in heaviest:
        core = min(cores, key=lambda c: (load[c], cores.index(c)))
        chosen[i], load[core] = core, load[core] + weights[i]
    return [[chosen[i]] for i in range(len(weights))]
