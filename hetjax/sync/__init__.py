"""When and how the workers agree. The trainer asks a `Sync` (see protocol.py) for what moves its state on."""

from __future__ import annotations

from typing import Any

from hetjax.sync.allreduce import AllReduce
from hetjax.sync.base import Sync, SyncContext, UpdateRule
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

_FORMER_NAMES = {"decentralised": "decentralized"}


def current_name(name: str) -> str:
    """The name of a sync today: earlier versions spelled some of them otherwise, in flags and in checkpoints."""
    return _FORMER_NAMES.get(name, name)


def make(name: str, **options: Any) -> Sync:
    """The sync of this name, with its own options."""
    name = current_name(name) if isinstance(name, str) else name
    if not isinstance(name, str) or name not in REGISTRY:
        raise ValueError(f"There is no sync {name!r}: use one of {', '.join(REGISTRY)}.")
    return REGISTRY[name](**options)


__all__ = [
    "REGISTRY",
    "AdaptiveHogbatch",
    "AdaptiveSgd",
    "AllReduce",
    "Asynchronous",
    "Daso",
    "Decentralized",
    "Hogbatch",
    "UpdateRule",
    "SyncContext",
    "Sync",
    "current_name",
    "make",
]
