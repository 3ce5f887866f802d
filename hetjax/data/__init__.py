"""Sources of samples, and the feeding of rows to workers."""
