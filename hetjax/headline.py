"""A run in one line of words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    parts = [form.format(summary[name]) for name, form in formats.items() if isinstance(summary.get(name), int | float)]
    return ", ".join([*parts, *filter(None, [changes(summary.get("members", ())[1:])])])


def changes(events: Sequence[Mapping[str, Any]]) -> str:
    """How often the members of an elastic fleet have changed and what it took, in words; "" if they have not."""
    if not events:
        return ""
    seconds = sum(event["seconds"] for event in events)
    return f"{len(events)} change{'s' * (len(events) > 1)} of the members in {seconds:.1f} s"
