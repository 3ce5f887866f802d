"""The JAX side: mesh, engines, reduce and update, norm layers, clocks."""
