"""The reduce phase: one all-reduce per step, then the update."""
