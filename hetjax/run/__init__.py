"""The JAX side: workers and mesh, the engines, reduce and update, norm layers, clocks, simulated speeds."""
