"""Several processes as one run: how they connect, which are members, and what they agree on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetjax.fleet.distributed import initialize, leave

__all__ = ["initialize", "leave"]


def __getattr__(name: str) -> Any:
    """Import `distributed` on first use: the launcher imports this package without JAX."""
    if name in __all__:
        from hetjax.fleet import distributed

        return getattr(distributed, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
