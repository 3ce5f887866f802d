"""Checks of single arguments, before anything is dispatched; errors name the argument."""

from __future__ import annotations

import inspect
import math
import operator
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

MOST_SAMPLES = 2**31 - 1  # in a step: counts and positions are 32-bit integers on the devices
MOST_SEED = 2**32 - 1  # keys use 32 bits of a seed; larger seeds would repeat smaller ones


def whole(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Check that an argument is a whole number.

    Args:
        name: name of the argument, for the error.
        value: a Python or NumPy integer; a bool is refused.
        least: minimum.
        most: maximum. Default: none.

    Returns:
        The value as a Python int.

    Raises:
        TypeError: if it is not an integer.
        ValueError: if it is out of range.
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
    """Check that an argument is a finite number.

    Args:
        name: name of the argument, for the error.
        value: a Python or NumPy number.
        least: minimum. Default: none.
        above: exclusive lower bound. Default: none.

    Returns:
        The value as a Python float.

    Raises:
        TypeError: if it is not a number.
        ValueError: if it is out of range, NaN or infinite.
    """
    expected = "expected a finite number"
    expected += "" if least is None else f" of at least {least:g}"
    expected += "" if above is None else f" above {above:g}"
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"{name} is {value!r}: {expected}.")
    if not math.isfinite(value) or (least is not None and value < least) or (above is not None and value <= above):
        raise ValueError(f"{name} is {value}: {expected}.")
    return float(value)


def check_function(name: str, value: Any) -> None:
    """Check that an optional argument is a function or None."""
    if value is not None and not callable(value):
        raise TypeError(f"{name} is {value!r}: expected a function, or None for the default.")


def check_hooks(hooks: Any) -> None:
    """Check that hooks are a list of functions."""
    if not isinstance(hooks, Iterable):
        raise TypeError(f"hooks is {hooks!r}: expected a list of functions of (record, state).")
    for hook in hooks:
        if not callable(hook):
            raise TypeError(f"hooks holds {hook!r}: expected functions of (record, state).")


def check_batch_size(batch_size: int, samples: int, otherwise: str = "") -> None:
    """Refuse a batch larger than the epoch, which would silently be cut; `otherwise` is other advice."""
    if batch_size > samples > 0:
        raise ValueError(
            f"batch_size is {batch_size:,}, but the source has {samples:,} samples, and each is used once per "
            f"epoch. Give at most {samples:,}{otherwise}."
        )


def current_name(option: str, value: Any, former: Mapping[str, str]) -> Any:
    """Return the current name of a value that was renamed, with a DeprecationWarning at the user's line.

    Args:
        option: name of the argument, for the warning.
        value: as given; anything but a former name is returned as it is.
        former: current names by former ones.
    """
    if not isinstance(value, str) or value not in former:
        return value
    callers = [frame.frame.f_globals.get("__name__", "") for frame in inspect.stack(0)]
    ours = next((depth for depth, name in enumerate(callers) if name.partition(".")[0] != "hetjax"), 0)
    message = f"{option}={value!r} is a former name that a later version will refuse: use {former[value]!r}."
    warnings.warn(message, DeprecationWarning, stacklevel=ours + 1)
    return former[value]
