"""How tests have XLA compile, in their own process and in those that they start: soon ready rather than fast."""

FLAGS = "--xla_backend_optimization_level=0"
