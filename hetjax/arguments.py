"""Checks of single arguments: a wrong one is refused with a sentence that names it, before anything is dispatched."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

import numpy as np

MOST_SAMPLES = 2**31 - 1  # of a step: counts and positions are 32-bit integers on the devices
MOST_SEED = 2**32 - 1  # a key is made from 32 bits of a seed; seeds beyond would repeat others


def whole(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Check that an argument is a whole number.

    Args:
      name: What the argument is called where it was given, for the error.
      value: A Python or NumPy integer. A bool is none, although Python counts with it.
      least: The smallest value allowed.
      most: The largest value allowed, if there is one.

    Returns:
      The value as a Python int.

    Raises:
      TypeError: If it is not an integer.
      ValueError: If it is out of range.
    """
    expected = f"expected a whole number of at least {least:,}" + ("" if most is None else f" and at most {most:,}")
    try:
        found = None if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        found = None
    if found is None:
        raise TypeError(f"{name} is {value!r}: {expected}.")
    if found < least or (most is not None and found > most):
        raise ValueError(f"{name} is {found}: {expected}.")
    return found


def number(name: str, value: Any, *, least: float | None = None, above: float | None = None) -> float:
    """Check that an argument is a finite number, of at least `least` or above `above`.

    Args:
      name: What the argument is called where it was given, for the error.
      value: A Python or NumPy number.
      least: The smallest value allowed, if there is one.
      above: What the value must exceed, if anything.

    Returns:
      The value as a Python float.

    Raises:
      TypeError: If it is not a number.
      ValueError: If it is out of range, NaN or infinite.
    """
    expected = "expected a finite number"
    expected += "" if least is None else f" of at least {least:g}"
    expected += "" if above is None else f" above {above:g}"
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"{name} is {value!r}: {expected}.")
    if not math.isfinite(value) or (least is not None and value < least) or (above is not None and value <= above):
        raise ValueError(f"{name} is {value}: {expected}.")
    return float(value)


def check_hooks(hooks: Any) -> None:
    """Refuse hooks that cannot be called, before the first step is made."""
    if not isinstance(hooks, Iterable):
        raise TypeError(f"hooks is {hooks!r}: expected a list of functions of (record, state).")
    for hook in hooks:
        if not callable(hook):
            raise TypeError(f"hooks holds {hook!r}: expected functions of (record, state).")


def check_batch_size(batch_size: int, samples: int) -> None:
    """Refuse a step that would be more than an epoch: it would be cut to the samples there are without a word."""
    if batch_size > samples > 0:
        raise ValueError(
            f"batch_size is {batch_size:,}, but the source has {samples:,} samples, each of which comes once in an "
            f"epoch. Give at most {samples:,}."
        )
