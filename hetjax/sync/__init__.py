"""When and how the workers agree. The trainer asks a `Sync` (see protocol.py) for what moves its state on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hetjax.sync.allreduce import AllReduce
from hetjax.sync.decentralised import Decentralised
from hetjax.sync.protocol import Rule, Setting, Sync

REGISTRY: dict[str, Callable[..., Sync]] = {"allreduce": AllReduce, "decentralised": Decentralised}


def make(name: str, **options: Any) -> Sync:
    if name not in REGISTRY:
        raise ValueError(f"There is no sync {name!r}: use one of {', '.join(REGISTRY)}.")
    return REGISTRY[name](**options)


__all__ = ["REGISTRY", "AllReduce", "Decentralised", "Rule", "Setting", "Sync", "make"]
