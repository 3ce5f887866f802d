"""Planning: how many samples each worker gets, and which. Pure NumPy; never imports jax."""

from hetjax.plan.allocation import Allocation, solve, solve_affine, solve_tables, within_reach
from hetjax.plan.controllers import Controller, Observation, Plan, make
from hetjax.plan.cost_model import CostModel
from hetjax.plan.limits import Limits
from hetjax.plan.rounding import largest_remainder

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
    "solve_affine",
    "solve_tables",
    "within_reach",
]
