"""Adapters: the contract with the user's model, Flax models, batch normalization, and a probe of the model state."""
