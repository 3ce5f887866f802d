"""The schema of `run.json`: format number, required keys, and the types and ranges of their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Schema = Mapping[str, tuple[Callable[[Any], bool], str]]  # key -> (is valid, what is expected)

FORMAT = 1  # incremented with every change that older versions cannot read; 0: before formats were numbered


class NewerFormat(ValueError):
    """A checkpoint was written by a newer version, in a format that this one cannot read."""


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _are_kinds(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(kind, list)
        and len(kind) == 2
        and isinstance(kind[0], str)
        and isinstance(kind[1], list)
        and all(map(_is_count, kind[1]))
        for kind in value
    )


def _is_outline(value: Any) -> bool:
    """The structure of `State.more`; see `hetjax.checkpoint.snapshot`."""
    if value is None or _is_count(value):
        return True
    if not _is_object(value):
        return False
    if value.keys() == {"like", "first"}:
        return value["like"] in ("params", "model_state", "opt_state", "ema") and _is_count(value["first"])
    if value.keys() == {"dict"}:
        return _is_object(value["dict"]) and all(map(_is_outline, value["dict"].values()))
    parts = value.get("list", value.get("tuple"))
    return len(value) == 1 and isinstance(parts, list) and all(map(_is_outline, parts))


def _is_order(value: Any) -> bool:
    return value is None or (
        _is_object(value) and _is_count(value.get("samples")) and isinstance(value.get("partition"), str)
    )


_COUNT = (_is_count, "a non-negative integer")
_RUN: Schema = {
    "step": _COUNT,
    "cursor": _COUNT,
    "replicas": _COUNT,
    "kinds": (_are_kinds, "a list of [dtype, shape]"),
    "arrays": (lambda names: isinstance(names, list) and all(isinstance(n, str) for n in names), "a list of names"),
    "more": (_is_outline, "the outline of a tree"),
    "trainer": (_is_object, "an object"),
    "extra": (_is_object, "an object"),
}
_TRAINER: Schema = {  # of `Trainer.state_dict`; other trainers may differ
    "batch_size": _COUNT,
    "seed": (lambda seed: isinstance(seed, int) and not isinstance(seed, bool), "an integer"),
    "controller": (_is_object, "an object"),
    "sync": (
        lambda sync: _is_object(sync) and isinstance(sync.get("name"), str) and _is_object(sync.get("state")),
        'an object such as {"name": "allreduce", "state": {}}',
    ),
    "order": (_is_order, 'null or an object such as {"partition": "global", "samples": 1000}'),
}


def check_run(run: Any) -> None:
    """Check the contents of `run.json`.

    Raises:
        NewerFormat: its format number is higher than `FORMAT`.
        ValueError: a key is missing, or a value is of the wrong type or out of range.
    """
    if not _is_object(run):
        raise ValueError(f"run.json holds {_short(run)}, expected an object")
    if not _is_count(number := run.get("format", 0)):
        raise ValueError(f"format is {_short(number)}, expected an integer")
    if number > FORMAT:
        raise NewerFormat(
            f"it has format {number} and this version of hetjax reads up to {FORMAT}. Update hetjax, or resume from a "
            "folder written by this version"
        )
    if missing := _RUN.keys() - run.keys():
        raise ValueError(f"run.json lacks {', '.join(sorted(missing))}")
    _check(run, _RUN, "")
    _check(run["trainer"], _TRAINER, "trainer.")
    if len(run["kinds"]) < len(run["arrays"]):
        raise ValueError(f"run.json names {len(run['arrays'])} arrays and describes {len(run['kinds'])}")


def _check(values: Mapping[str, Any], schema: Schema, prefix: str) -> None:
    for name in schema.keys() & values.keys():
        is_valid, expected = schema[name]
        if not is_valid(values[name]):
            raise ValueError(f"{prefix}{name} is {_short(values[name])}, expected {expected}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
