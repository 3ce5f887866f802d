"""Writes of an NNX model that are lost: every example starts from the variables of the given model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.extend.core import Literal

from hetjax.adapters.nnx_versions import set_value, value_of

log = logging.getLogger("hetjax")
Values = dict[tuple[Any, ...], Any]  # of variables, by path


class LostWrites:
    """Warns once of variables that a model writes in training although their new values are not kept.

    Args:
        kept: a filter of the variables whose new values are used.
    """

    def __init__(self, kept: Any):
        self._lost = nnx.filterlib.to_predicate(nnx.Not(kept))
        self._checked = False

    def call(self, make: Callable[[], nnx.Module], run: Callable[[nnx.Module], Any]) -> tuple[Any, nnx.Module]:
        """Run a new model while it is traced, and return the result and the model."""
        live = make()
        before = self._values(live)
        returned = run(live)
        if not self._checked and any(value is not before[path] for path, value in self._values(live, before).items()):
            self._checked = True
            if written := self._written(make, run, before):
                log.warning(
                    "The model writes to %s when it is called for training, and the new values are lost: every example "
                    "starts from those of the given model. From step to step only parameters and nnx.BatchStat "
                    "variables are kept; return what you need from the loss, as a metric of hetjax.Example.",
                    ", ".join(written),
                )
        return returned, live

    def _variables(self, model: nnx.Module) -> dict[tuple[Any, ...], nnx.Variable]:
        found = ((path, node) for path, node in nnx.iter_graph(model) if isinstance(node, nnx.Variable))
        return {path: variable for path, variable in found if self._lost(path, variable)}

    def _values(self, model: nnx.Module, like: Values | None = None) -> Values:
        """The values of the variables; those of `like` only, without those that a call has added (`sow`)."""
        values = {path: value_of(variable) for path, variable in self._variables(model).items()}
        return values if like is None else {path: values[path] for path in like if path in values}

    def _written(self, make: Callable[[], nnx.Module], run: Callable[[nnx.Module], Any], before: Values) -> list[str]:
        """Names of the variables written. `nnx.remat` and `nnx.jit` replace all values, most by what they were."""

        def after(before: Values) -> Values:
            model = make()
            for path, variable in self._variables(model).items():
                set_value(variable, before[path])
            run(model)
            return before | self._values(model, before)

        traced = jax.make_jaxpr(after)(before).jaxpr
        names = [".".join(map(str, path)) for path, value in before.items() for _ in jax.tree.leaves(value)]
        ends = zip(names, traced.invars, traced.outvars, strict=True)
        return list(dict.fromkeys(name for name, given, end in ends if _origin(traced, end) is not given))


def _origin(jaxpr: Any, variable: Any) -> Any:
    """The argument that a result is passed on from, also through jit and remat; None if it is computed."""
    while not isinstance(variable, Literal) and variable not in jaxpr.invars:
        equation = next((each for each in jaxpr.eqns if variable in each.outvars), None)
        if equation is None or "jaxpr" not in equation.params:
            return None
        inner = equation.params["jaxpr"]
        inner = getattr(inner, "jaxpr", inner)  # that of jit is closed
        if len(inner.invars) != len(equation.invars):
            return None
        origin = _origin(inner, inner.outvars[equation.outvars.index(variable)])
        if origin is None:
            return None
        variable = equation.invars[inner.invars.index(origin)]
    return None if isinstance(variable, Literal) else variable
