"""The reduce phase: one sum over all workers, then the update."""
