"""Three engines for the local phase behind one interface."""

from hetjax.run.engines.choose import ENGINES, choose, make_engine
from hetjax.run.engines.chunked import Chunked
from hetjax.run.engines.protocol import Engine, Program, Replicas, Rows
from hetjax.run.engines.spmd import Looped, Masked

__all__ = ["ENGINES", "Chunked", "Engine", "Looped", "Masked", "Program", "Replicas", "Rows", "choose", "make_engine"]
