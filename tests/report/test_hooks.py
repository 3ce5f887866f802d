"""Hooks: finished steps become rows for trackers and progress on the screen."""

import io

import jax
import numpy as np
import optax
from rich.console import Console

import hetjax
from hetjax.report import Follow, Progress


class RowList:
    def __init__(self):
        self.rows = []

    def log(self, step, row):
        self.rows.append((step, row))


def trained(*hooks, steps=3):
    data = {"x": np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)}
    loss = lambda params, batch, keys: (batch["x"] @ params["w"] - 1) ** 2
    with hetjax.Trainer(loss, optax.sgd(0.1), batch_size=8, speeds=[1.0] * 8) as trainer:
        return trainer.fit(trainer.init({"w": np.zeros(4, np.float32)}), data, steps=steps, hooks=hooks)


def test_rows_continue_the_totals_of_a_resumed_run():
    tracker = RowList()
    _, history = trained(Follow(tracker, seconds=100.0, plan_changes=5))
    assert [step for step, _ in tracker.rows] == [1, 2, 3]
    assert [row["samples"] for _, row in tracker.rows] == [8, 16, 20]
    assert [row["seconds"] for _, row in tracker.rows] == [100.0 + record.seconds for record in history.records]
    changes = 5 + np.cumsum([record.changed for record in history.records])
    assert [row["plan_changes"] for _, row in tracker.rows] == changes.tolist()


def test_progress_shows_steps_efficiency_and_a_summary():
    screen = io.StringIO()
    trained(Progress("try", console=Console(file=screen, width=80)))
    printed = screen.getvalue()
    assert printed.startswith(f"try: JAX {jax.__version__}, backend cpu, compiling for 8 workers\n")
    assert "try  step 1/3  epoch 0  loss" in printed
    assert "efficiency" in printed
    assert "try: 3 steps" in printed
