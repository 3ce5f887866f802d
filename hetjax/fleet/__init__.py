"""The JAX side: workers and mesh, the engines, reduce and update, norm layers, clocks, simulated speeds."""

from hetjax.run.distributed import Place, initialise, leave

__all__ = ["Place", "initialise", "leave"]
