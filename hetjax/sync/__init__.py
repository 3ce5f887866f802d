"""Synchronization methods: when and how the workers' models agree (`Sync`, in base.py), and a registry by name."""

from __future__ import annotations

from typing import Any

from hetjax.arguments import current_name
from hetjax.sync.allreduce import AllReduce
from hetjax.sync.base import Sync
from hetjax.sync.daso import Daso
from hetjax.sync.decentralized import Decentralized
from hetjax.sync.hogbatch import AdaptiveHogbatch, AdaptiveSgd, Asynchronous, Hogbatch

REGISTRY: dict[str, type[Sync]] = {
    "allreduce": AllReduce,
    "decentralized": Decentralized,
    "daso": Daso,
    "hogbatch": Hogbatch,
    "adaptive-hogbatch": AdaptiveHogbatch,
    "adaptive-sgd": AdaptiveSgd,
}

FORMER_NAMES = {"decentralised": "decentralized"}  # in flags, options and checkpoints of earlier versions


def make(name: str, **options: Any) -> Sync:
    """Make the sync of this name.

    Args:
        name: a key of `REGISTRY`, or one of its former spellings.
        **options: arguments of the sync's constructor.

    Returns:
        The sync.

    Raises:
        ValueError: If there is no sync of this name.
    """
    name = current_name("sync", name, FORMER_NAMES)
    if not isinstance(name, str) or name not in REGISTRY:
        raise ValueError(f"There is no sync {name!r}: use one of {', '.join(REGISTRY)}.")
    return REGISTRY[name](**options)


__all__ = [
    "FORMER_NAMES",
    "REGISTRY",
    "AdaptiveHogbatch",
    "AdaptiveSgd",
    "AllReduce",
    "Asynchronous",
    "Daso",
    "Decentralized",
    "Hogbatch",
    "Sync",
    "make",
]
