"""The engines of the local phase: masked, looped and chunked, behind one interface."""

from hetjax.engines.base import Engine, Program
from hetjax.engines.chunked import ChunkedEngine
from hetjax.engines.specs import Auto, Chunked, EngineContext, EngineSpec, Looped, Masked, as_spec

__all__ = [
    "Auto",
    "Chunked",
    "ChunkedEngine",
    "Engine",
    "EngineContext",
    "EngineSpec",
    "Looped",
    "Masked",
    "Program",
    "as_spec",
]
