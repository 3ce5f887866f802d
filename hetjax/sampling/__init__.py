"""Which samples form a step, and which worker gets them. Pure NumPy, never imports JAX."""
