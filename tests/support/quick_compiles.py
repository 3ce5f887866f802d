"""XLA flags of tests and the processes they start: fast compiles rather than fast programs."""

FLAGS = "--xla_backend_optimization_level=0"
