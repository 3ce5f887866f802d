"""A run in one line of words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def headline(summary: Mapping[str, Any]) -> str:
    """The most important values of a summary, in words."""
    formats = {
        "steps": "{:,} steps",
        "wall_s": "{:.1f} s",
        "samples_per_s": "{:,.0f} samples/s",
        "efficiency": "{:.0%} of the ideal",
        "final_loss": "loss {:.4g}",
        "test_accuracy": "test accuracy {:.4f}",
    }
    return ", ".join(
        form.format(summary[name]) for name, form in formats.items() if isinstance(summary.get(name), int | float)
    )
