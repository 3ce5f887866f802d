"""The controllers by name."""

from __future__ import annotations

from typing import Any

from hetjax.planning.controllers.balanced import Balanced
from hetjax.planning.controllers.base import Controller, Observation, Plan
from hetjax.planning.controllers.baselines import Equal, Fixed, Oracle, Proportional, Static
from hetjax.planning.controllers.published import Dbs, Dp, Edp, Lbb, Lbbsp

REGISTRY: dict[str, type] = {
    law.name: law for law in (Balanced, Dbs, Dp, Edp, Equal, Fixed, Lbb, Lbbsp, Oracle, Proportional, Static)
}


def make(name: str, **options: Any) -> Controller:
    """Create a controller by name.

    Args:
        name: A key of `REGISTRY`. The shares of `fixed` may follow a colon: 'fixed:4,2,1,1'.
        **options: Arguments of its constructor.

    Returns:
        The controller.

    Raises:
        ValueError: If there is no controller of this name, or if `fixed` has no shares.
    """
    kind, colon, shares = name.partition(":")
    if kind not in REGISTRY or (colon and kind != Fixed.name):
        raise ValueError(f"There is no controller {name!r}; choose one of {', '.join(sorted(REGISTRY))}.")
    if kind == Fixed.name and "shares" not in options:
        if not colon:
            raise ValueError("The controller 'fixed' needs shares: 'fixed:4,2,1,1', or by kind 'fixed:gpu=4,cpu=1'.")
        options["shares"] = shares
    return REGISTRY[kind](**options)


def resolve(controller: str | Controller) -> Controller:
    """Return the controller itself, or create the one of this name.

    Args:
        controller: A name, as in `make`, or a controller.

    Returns:
        The controller.

    Raises:
        TypeError: If it is neither a name nor an object of the `Controller` protocol.
    """
    if isinstance(controller, str):
        return make(controller)
    methods = all(callable(getattr(controller, method, None)) for method in ("plan", "observe"))
    if isinstance(controller, type) or not methods or not isinstance(getattr(controller, "name", None), str):
        raise TypeError(
            f"controller is {controller!r}: expected a name ({', '.join(sorted(REGISTRY))}) or an object of the "
            "Controller protocol, with a name, plan and observe (and state_dict and load_state_dict to be saved)."
        )
    return controller


__all__ = [
    "REGISTRY",
    "Balanced",
    "Controller",
    "Observation",
    "Plan",
    "make",
    "resolve",
]
