"""hetjax: data-parallel JAX training on devices of unequal and changing speed, all of them kept busy."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetjax.devices import fake_devices
    from hetjax.history import History, Record
    from hetjax.nonfinite import NonFiniteError
    from hetjax.pipeline import LiveState
    from hetjax.plan.allocation import solve
    from hetjax.run.contract import Example
    from hetjax.run.engines import Auto, Chunked, Looped, Masked
    from hetjax.run.from_flax import FlaxModel, from_linen, from_nnx
    from hetjax.run.norm import BatchNorm, LinenBatchNorm
    from hetjax.run.simulate import Simulation
    from hetjax.run.update import State, running_average
    from hetjax.source_blocks import make_blocks
    from hetjax.step import Step
    from hetjax.trainer import Trainer
    from hetjax.watch.hooks import Progress

# Loaded when first used, so that planning (hetjax.plan) never pulls JAX in.
_HOME = {
    "Auto": "hetjax.run.engines",
    "BatchNorm": "hetjax.run.norm",
    "Chunked": "hetjax.run.engines",
    "Example": "hetjax.run.contract",
    "FlaxModel": "hetjax.run.from_flax",
    "History": "hetjax.history",
    "LinenBatchNorm": "hetjax.run.norm",
    "LiveState": "hetjax.pipeline",
    "Looped": "hetjax.run.engines",
    "Masked": "hetjax.run.engines",
    "NonFiniteError": "hetjax.nonfinite",
    "Progress": "hetjax.watch.hooks",
    "Record": "hetjax.history",
    "Simulation": "hetjax.run.simulate",
    "State": "hetjax.run.update",
    "Step": "hetjax.step",
    "Trainer": "hetjax.trainer",
    "fake_devices": "hetjax.devices",
    "from_linen": "hetjax.run.from_flax",
    "from_nnx": "hetjax.run.from_flax",
    "make_blocks": "hetjax.source_blocks",
    "running_average": "hetjax.run.update",
    "solve": "hetjax.plan.allocation",
}

__version__ = "0.1.0"
__all__ = [
    "Auto",
    "BatchNorm",
    "Chunked",
    "Example",
    "FlaxModel",
    "History",
    "LinenBatchNorm",
    "LiveState",
    "Looped",
    "Masked",
    "NonFiniteError",
    "Progress",
    "Record",
    "Simulation",
    "State",
    "Step",
    "Trainer",
    "fake_devices",
    "from_linen",
    "from_nnx",
    "make_blocks",
    "running_average",
    "solve",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'hetjax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
