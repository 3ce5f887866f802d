"""Planning: how many samples each worker gets. Pure NumPy; never imports jax."""

from hetjax.planning.allocation import solve
from hetjax.planning.limits import Limits

__all__ = ["Limits", "solve"]
