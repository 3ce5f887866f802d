"""DASO: hierarchical, asynchronous, selective (see daso.py)."""

from hetjax.sync.daso.daso import Daso

__all__ = ["Daso"]
