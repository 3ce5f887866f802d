"""DASO (distributed asynchronous and selective optimization): sums inside nodes, rare exchanges between them."""

from hetjax.sync.daso.daso import Daso

__all__ = ["Daso"]
