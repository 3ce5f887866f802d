"""What a Flax user's loss is called with: optional arguments are passed if its signature names them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

Tree = Any
Loss = Callable[..., Any]
_POSITIONAL = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD


@dataclass(frozen=True)
class AskedLoss:
    """A user's loss of an example or of a block of rows, and the optional arguments that it asks for by name."""

    fn: Loss
    block: bool
    names: frozenset[str]
    with_random: bool  # takes rngs or keys as its third argument

    def __call__(self, model: Any, rows: Tree, random: Any, mask: jax.Array | None, *, train: bool) -> Any:
        optional = {"train": train, "mask": mask}
        third = (random,) if self.with_random else ()
        try:
            return self.fn(model, rows, *third, **{name: optional[name] for name in self.names})
        except (AttributeError, TypeError) as error:
            if self.with_random and random is None and "None" in str(error):
                error.add_note("In evaluation the third argument of the loss (rngs or keys) is None.")
            raise


def chosen_loss(example_loss: Loss | None, batch_loss: Loss | None, *, with_rngs: bool) -> AskedLoss:
    """The given one of two losses; `with_rngs`: an example_loss may take rngs."""
    if (example_loss is None) == (batch_loss is None):
        raise TypeError("Give exactly one of example_loss (of one example) and batch_loss (of a group of rows).")
    fn = example_loss if batch_loss is None else batch_loss
    if not callable(fn):
        raise TypeError(f"The loss must be a function, got {type(fn).__name__}.")
    block = batch_loss is not None
    try:
        parameters = inspect.signature(fn).parameters
    except ValueError:  # of a function without a signature
        return AskedLoss(fn, block, frozenset(), block or with_rngs)
    names = frozenset({"train", "mask"} if block else {"train"}) & frozenset(parameters)
    if block or not with_rngs:
        return AskedLoss(fn, block, names, block)
    positional = [p for p in parameters.values() if p.name not in names and p.kind in _POSITIONAL]
    several = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters.values())
    return AskedLoss(fn, block, names, several or len(positional) > 2)
