"""Three engines for the local phase behind one interface."""

from hetjax.engines.base import Engine, Program
from hetjax.engines.chunked import ChunkedEngine
from hetjax.engines.specs import ENGINES, Auto, Chunked, EngineSpec, Looped, Masked, Site, as_spec
from hetjax.engines.spmd import LoopedEngine, MaskedEngine

__all__ = [
    "ENGINES",
    "Auto",
    "Chunked",
    "ChunkedEngine",
    "Engine",
    "EngineSpec",
    "Looped",
    "LoopedEngine",
    "Masked",
    "MaskedEngine",
    "Program",
    "Site",
    "as_spec",
]
