"""The state serializer: round trips through JSON, inline fields, and states of older versions."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import numpy as np
import pytest

from hetjax.plain_state import INLINE, from_plain, to_plain


@dataclass
class Inner:
    total_W: np.ndarray
    steps: int = 0


@dataclass
class Outer:
    inline: Inner = field(metadata=INLINE)
    nested: Inner
    share_W: np.ndarray | None = None
    path: tuple[int, ...] = ()
    names: list[str] = field(default_factory=list)
    by_name: dict[str, float] = field(default_factory=dict)
    best: float | None = None


def fresh() -> Outer:
    return Outer(Inner(np.zeros(2)), Inner(np.zeros(2, np.int64)))


def test_round_trip_through_json_is_exact():
    state = Outer(
        Inner(np.array([0.1, 1 / 3]), 4), Inner(np.array([1, 2]), 5), np.array([2.0, 1e-300]), (1, 2), ["a"], {"b": 0.7}
    )
    state.cached = "not a field"  # type: ignore[attr-defined]
    saved = json.loads(json.dumps(to_plain(state), allow_nan=False))
    assert list(saved) == ["total_W", "steps", "nested", "share_W", "path", "names", "by_name", "best"]
    assert saved["nested"] == {"total_W": [1, 2], "steps": 5}
    restored = from_plain(fresh(), saved)
    assert to_plain(restored) == to_plain(state)
    assert (restored.path, restored.names) == ((1, 2), ["a"])
    assert restored.inline.total_W.dtype == restored.share_W.dtype == np.float64
    assert restored.nested.total_W.dtype == np.int64
    np.testing.assert_array_equal(restored.share_W, state.share_W)


def test_a_state_of_an_older_version_keeps_defaults_and_the_template_is_untouched():
    template = fresh()
    restored = from_plain(template, {"steps": 3, "removed_since": 1, "nested": {"steps": 2}})
    assert (restored.inline.steps, restored.nested.steps, restored.best) == (3, 2, None)
    assert to_plain(template) == to_plain(fresh())


@pytest.mark.parametrize("value", [np.float64(0.5), np.int64(3), np.bool_(True), None, "text"])
def test_scalars_are_json_values(value):
    plain = to_plain(Inner(np.zeros(1), value))["steps"]
    assert json.loads(json.dumps(plain)) == value


def test_frozen_dataclasses_are_restored_too():
    @dataclass(frozen=True)
    class Frozen:
        x: int = 1

    assert from_plain(Frozen(), to_plain(Frozen(7))) == Frozen(7)
