"""Planning: how many samples each worker gets. Pure NumPy; never imports jax."""

from hetjax.planning.allocation import Allocation, solve, within_reach
from hetjax.planning.controllers import Controller, Observation, Plan, make
from hetjax.planning.cost_model import CostModel
from hetjax.planning.limits import Limits
from hetjax.planning.rounding import largest_remainder

__all__ = [
    "Allocation",
    "Controller",
    "CostModel",
    "Limits",
    "Observation",
    "Plan",
    "largest_remainder",
    "make",
    "solve",
    "within_reach",
]
