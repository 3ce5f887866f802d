"""hetjax: data-parallel JAX training on devices of unequal and changing speed, with all of them kept busy."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetjax.adapters.batch_norm import BatchNorm, LinenBatchNorm
    from hetjax.adapters.batch_norm_layers import convert_batch_norm
    from hetjax.adapters.contract import Example, Metric
    from hetjax.adapters.flax_models import FlaxModel, from_linen, from_nnx
    from hetjax.adapters.frozen import frozen
    from hetjax.data.bucketed import Bucketed
    from hetjax.data.source_blocks import make_blocks
    from hetjax.devices.chosen import chosen_devices as devices
    from hetjax.engines import Auto, Chunked, Looped, Masked
    from hetjax.history import History, Record
    from hetjax.nonfinite import NonFiniteError
    from hetjax.planning.allocation import solve
    from hetjax.profiling import Profile
    from hetjax.reduce.trainable import unfrozen
    from hetjax.reduce.update import running_average
    from hetjax.report.hooks import Progress
    from hetjax.simulation.speeds import Simulation
    from hetjax.state import LiveState, State
    from hetjax.step import Step
    from hetjax.trainer import Trainer

# Loaded on first use, so that planning and the launcher start without JAX.
_HOME = {
    "Auto": "hetjax.engines",
    "BatchNorm": "hetjax.adapters.batch_norm",
    "Bucketed": "hetjax.data.bucketed",
    "Chunked": "hetjax.engines",
    "Example": "hetjax.adapters.contract",
    "FlaxModel": "hetjax.adapters.flax_models",
    "History": "hetjax.history",
    "LinenBatchNorm": "hetjax.adapters.batch_norm",
    "LiveState": "hetjax.state",
    "Looped": "hetjax.engines",
    "Masked": "hetjax.engines",
    "Metric": "hetjax.adapters.contract",
    "NonFiniteError": "hetjax.nonfinite",
    "Profile": "hetjax.profiling",
    "Progress": "hetjax.report.hooks",
    "Record": "hetjax.history",
    "Simulation": "hetjax.simulation.speeds",
    "State": "hetjax.state",
    "Step": "hetjax.step",
    "Trainer": "hetjax.trainer",
    "convert_batch_norm": "hetjax.adapters.batch_norm_layers",
    "from_linen": "hetjax.adapters.flax_models",
    "from_nnx": "hetjax.adapters.flax_models",
    "frozen": "hetjax.adapters.frozen",
    "make_blocks": "hetjax.data.source_blocks",
    "running_average": "hetjax.reduce.update",
    "solve": "hetjax.planning.allocation",
    "unfrozen": "hetjax.reduce.trainable",
}

__version__ = "0.1.0"
__all__ = [
    "Auto",
    "BatchNorm",
    "Bucketed",
    "Chunked",
    "Example",
    "FlaxModel",
    "History",
    "LinenBatchNorm",
    "LiveState",
    "Looped",
    "Masked",
    "Metric",
    "NonFiniteError",
    "Profile",
    "Progress",
    "Record",
    "Simulation",
    "State",
    "Step",
    "Trainer",
    "convert_batch_norm",
    "devices",
    "from_linen",
    "from_nnx",
    "frozen",
    "make_blocks",
    "running_average",
    "solve",
    "unfrozen",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name == "devices":  # a package that can be called
        return import_module("hetjax.devices")
    raise AttributeError(f"module 'hetjax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
