"""What processes have to agree on before the first step; later values travel in the sum of each step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from hetjax import processes
from hetjax.state import State


class Disagreement(RuntimeError):
    """Processes that must make the same decision made different ones."""


def same(**values: Any) -> None:
    """Raise ValueError if processes differ in any of these JSON values, naming the value and the processes."""
    gathered = processes.gather(values)
    for name in values:
        odd = [process for process, theirs in enumerate(gathered) if not _equal(theirs[name], gathered[0][name])]
        if odd:
            raise ValueError(
                f"Process {', '.join(map(str, odd))} differs from process 0 in its {name.replace('_', ' ')}: "
                f"{_short(gathered[odd[0]][name])} instead of {_short(gathered[0][name])}. Start all processes with "
                "the same code, flags and data."
            )


@contextmanager
def problems_shared() -> Iterator[None]:
    """Raise a ValueError of the body in all processes, with the same sentence. Collective."""
    problem = None
    try:
        yield
    except ValueError as error:
        problem = str(error)
    found = processes.gather(problem)
    if not any(found):
        return
    if len(set(found)) == 1:
        raise ValueError(found[0])
    raise ValueError(" ".join(f"Process {process}: {text}" for process, text in enumerate(found) if text))


def same_start(state: State, **options: Any) -> None:
    """Raise ValueError unless all processes start from the same state with the same options."""
    one_set = state.replicas == 0  # otherwise every process has its own
    of = lambda tree: digest(tree) if one_set else None
    same(
        **options,
        position=[state.step, state.cursor],
        parameters=digest(state.params) if one_set else state.replicas,
        model_state=of(state.model_state),
        state_of_the_optimizer=of(state.opt_state),
        moving_average=of(state.ema),
    )


def _equal(a: Any, b: Any) -> bool:
    """Equality of JSON values in which NaN equals NaN."""
    return a == b or json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def digest(tree: Any) -> str:
    """Hash of a tree of arrays, to compare between processes."""
    result = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        key = isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        result.update(np.asarray(jax.random.key_data(leaf) if key else leaf).tobytes())
    return result.hexdigest()


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
