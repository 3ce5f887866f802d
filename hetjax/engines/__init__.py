"""The engines of the local phase: masked, looped and chunked, behind one interface."""

from hetjax.engines.base import Engine, Program
from hetjax.engines.chunked import ChunkedEngine
from hetjax.engines.specs import ENGINES, Auto, Chunked, EngineContext, EngineSpec, Looped, Masked, as_spec
from hetjax.engines.spmd import LoopedEngine, MaskedEngine

__all__ = [
    "ENGINES",
    "Auto",
    "Chunked",
    "ChunkedEngine",
    "Engine",
    "EngineContext",
    "EngineSpec",
    "Looped",
    "LoopedEngine",
    "Masked",
    "MaskedEngine",
    "Program",
    "as_spec",
]
