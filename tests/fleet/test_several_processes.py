"""The core over several processes: the training of one process, each reading its own rows; disagreement is told."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
import quick_compiles
from several_program import STEPS, runs
from tiny_problem import BATCH, SAMPLES, loss_fn, source

from hetjax import Step
from hetjax.environment import PROGRAMS

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


COUNTS_COMPILES = """
import os, sys
from pathlib import Path
from tiny_problem import trainer_for
from hetjax.fleet.distributed import initialize, leave
from hetjax.devices.program_store import ProgramStore

stored, write = [], ProgramStore.write
ProgramStore.write = lambda self, key, content: stored.append(key) or write(self, key, content)
place, again = initialize(wait_limit=60), "HETJAX_RESTART" in os.environ
trainer, source, state = trainer_for(None)
with trainer:
    state, _ = trainer.fit(state, source, steps=3)
    trainer.evaluate(state, source)
Path(sys.argv[1], f"{place.process}-{again}").write_text(str(len(stored)))
leave(0 if again else 1, together=True)
"""


OWN_LOOP = """
import json, logging, sys
from pathlib import Path
import numpy as np, optax
from tiny_problem import BATCH, loss_fn, source
import hetjax
from hetjax.fleet.distributed import initialize, leave

class Lazy:
    def __init__(self, tree):
        self.tree, self.read = tree, []
    def __len__(self):
        return len(self.tree["y"])
    def rows(self, start, stop):
        self.read.append([start, stop])
        return {name: x[start:stop] for name, x in self.tree.items()}

place = initialize(wait_limit=60)
rows, messages = source(), []
logging.getLogger("hetjax").addHandler(logging.Handler())
logging.getLogger("hetjax").setLevel("INFO")
logging.getLogger("hetjax").handlers[-1].emit = lambda record: messages.append(record.getMessage())
batches = [{name: x[i : i + BATCH] for name, x in rows.items()} for i in range(0, 7 * BATCH, BATCH)]
batches = list(map(Lazy, batches)) if sys.argv[2] == "lazy" else batches
loader = (batch for batch in batches[: 4 if place.process == 1 else 7])  # that of process 1 ends first
shares = ",".join(str(k + 1) for k in range(place.processes))
step = hetjax.Step(loss_fn, optax.sgd(0.05), batch_size=BATCH, controller=f"fixed:{shares}", wait_limit=60)
state, losses = step.init({"w": np.zeros(5, np.float32), "b": np.zeros((), np.float32)}), []
for batch in step.batches(loader):
    state, report = step(state, batch)
    losses += [] if report is None else [report.loss]
losses.append(step.flush().loss)
found = {"losses": losses, "step": state.step, "params": np.asarray(state.params["w"]).tolist(), "said": messages}
found["read"] = [batch.read for batch in batches] if sys.argv[2] == "lazy" else None
Path(sys.argv[1], f"{place.process}.json").write_text(json.dumps(found))
step.close()
leave(0, together=True)
"""


@pytest.mark.parametrize("kind", ["whole", "lazy"])
def test_own_loops_of_several_processes_end_together_and_train_like_one(tmp_path, kind):
    (tmp_path / "program.py").write_text(OWN_LOOP)
    told = launch(3, tmp_path, kind, program=tmp_path / "program.py")
    assert told.returncode == 0, told.stderr + told.stdout
    there = [json.loads((tmp_path / f"{k}.json").read_text()) for k in range(3)]
    rows = source()
    batches = [{name: x[i : i + BATCH] for name, x in rows.items()} for i in range(0, 4 * BATCH, BATCH)]
    with Step(loss_fn, optax.sgd(0.05), batch_size=BATCH, devices=jax.devices()[:1]) as step:
        state, losses = step.init({"w": np.zeros(5, np.float32), "b": np.zeros((), np.float32)}), []
        for batch in batches:
            state, report = step(state, batch)
            losses += [] if report is None else [report.loss]
        losses.append(step.flush().loss)
        params = np.asarray(state.params["w"])
    for process, seen in enumerate(there):
        assert seen["step"] == 4
        np.testing.assert_allclose(seen["losses"], losses, rtol=1e-5)
        np.testing.assert_allclose(seen["params"], params, rtol=1e-5)
        (ending,) = [line for line in seen["said"] if "ended after" in line]
        assert "process 1 ended after 4 steps" in ending
        assert ("this one has more" in ending) == (process != 1)
        if kind == "lazy":  # its own rows, and the first one once more for its shape
            bounds = [0, *np.cumsum([1, 2, 3]) * BATCH // 6]
            own = max(b - a for a, b in seen["read"][1])
            assert own <= bounds[process + 1] - bounds[process] + 4
            assert seen["read"][5] == []


def launch(processes, *arguments, flags=(), program="several_program.py"):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE)])}
    environment["XLA_FLAGS"] = quick_compiles.FLAGS  # without the tests' own eight devices
    command = [*flags, "--processes", processes, "--", HERE / program, *arguments]
    return subprocess.run(
        [sys.executable, "-m", "hetjax", "launch", *map(str, command)],
        env=environment, capture_output=True, text=True, timeout=150,
    )  # fmt: skip


def test_after_a_restart_no_process_compiles_anything_again(tmp_path, monkeypatch):
    """Of what `compile_once` compiles: chunks, and the programs over all workers."""
    monkeypatch.delenv(PROGRAMS, raising=False)
    (tmp_path / "program.py").write_text(COUNTS_COMPILES)
    told = launch(2, tmp_path, flags=["--restart", 1, "--resume-flag="], program=tmp_path / "program.py")
    assert told.returncode == 0, told.stderr + told.stdout
    first, again = ([int((tmp_path / f"{k}-{again}").read_text()) for k in range(2)] for again in (False, True))
    assert sum(first) >= 6
    assert again == [0, 0]


@pytest.mark.parametrize(("processes", "per_process"), [(2, 2), (3, 1)])
def test_several_processes_train_like_one(tmp_path, processes, per_process):
    told = launch(processes, per_process, tmp_path)
    assert told.returncode == 0, told.stderr + told.stdout
    there = [json.loads((tmp_path / f"{k}.json").read_text()) for k in range(processes)]
    here = runs(jax.devices()[: processes * per_process])
    for run, alone in here.items():
        for seen in there:
            np.testing.assert_allclose(seen[run]["losses"], alone["losses"], rtol=1e-5)
            np.testing.assert_allclose(seen[run]["tested"], alone["tested"], rtol=1e-5)
            assert seen[run]["recompiles"] == 0
            for name, value in alone["params"].items():
                np.testing.assert_allclose(seen[run]["params"][name], value, rtol=1e-4, atol=1e-6)
        assert sum(sum(seen[run]["own"]) for seen in there) == _samples(STEPS)
    for seen in there:
        own, asked = sum(seen["steady"]["own"]), len(seen["steady"]["read"])
        short = BATCH + 1  # the one short step of an epoch is cut elsewhere; one row is read to see what rows are like
        assert own <= asked <= own + 2 * STEPS + short < _samples(STEPS)  # shares below 16 have a margin of one row


def _samples(steps):
    """Of so many steps, the last one of an epoch being short."""
    per_epoch = -(-SAMPLES // BATCH)
    return steps // per_epoch * SAMPLES + steps % per_epoch * BATCH


@pytest.mark.parametrize(
    ("mistake", "sentence"),
    [
        ("plan", "used another plan than this process in step"),
        ("start", "Process 1 differs from process 0 in its parameters"),
        ("optimizer", "Process 1 differs from process 0 in its state of the optimizer"),
        ("end", "Process 1 differs from process 0 in its end of training: 2250 instead of 2100"),
    ],
)
def test_processes_that_disagree_are_told_and_do_not_hang(tmp_path, mistake, sentence):
    told = launch(2, 1, tmp_path, mistake)
    assert told.returncode == 3
    assert sentence in told.stdout
