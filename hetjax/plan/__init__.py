"""Planning: how many samples each worker gets, and which. Pure NumPy; never imports jax."""
