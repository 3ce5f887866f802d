"""Controllers: from timings to counts."""
