"""Several processes train like one, each reads only its own rows, and disagreement is reported."""

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
from several_program import MISTAKES, RUNS, STEPS, run
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
info, again = initialize(wait_limit=60), "HETJAX_RESTART" in os.environ
trainer, source, state = trainer_for(None)
with trainer:
    state, _ = trainer.fit(state, source, steps=3)
    trainer.evaluate(state, source)
Path(sys.argv[1], f"{info.process}-{again}").write_text(str(len(stored)))
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

def train(batches):
    messages.clear()
    loader = (batch for batch in batches[: 4 if info.process == 1 else 7])  # that of process 1 ends first
    shares = ",".join(str(k + 1) for k in range(info.processes))
    options = {"batch_size": BATCH, "controller": f"fixed:{shares}", "wait_limit": 60}
    with hetjax.Step(loss_fn, optax.sgd(0.05), **options) as step:
        state, losses = step.init({"w": np.zeros(5, np.float32), "b": np.zeros((), np.float32)}), []
        for batch in step.batches(loader):
            state, report = step(state, batch)
            losses += [] if report is None else [report.loss]
        losses.append(step.flush().loss)
        params = np.asarray(state.params["w"]).tolist()
    return {"losses": losses, "step": state.step, "params": params, "messages": list(messages)}

info = initialize(wait_limit=60)
rows, messages = source(), []
logging.getLogger("hetjax").addHandler(logging.Handler())
logging.getLogger("hetjax").setLevel("INFO")
logging.getLogger("hetjax").handlers[-1].emit = lambda record: messages.append(record.getMessage())
batches = [{name: x[i : i + BATCH] for name, x in rows.items()} for i in range(0, 7 * BATCH, BATCH)]
lazy = list(map(Lazy, batches))
results = {"whole": train(batches), "lazy": train(lazy), "read": [batch.read for batch in lazy]}
Path(sys.argv[1], f"{info.process}.json").write_text(json.dumps(results))
leave(0, together=True)
"""


def launch(processes, *arguments, flags=(), program=HERE / "several_program.py"):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [HERE.parents[1], HERE.parent / "support"]))}
    environment["XLA_FLAGS"] = quick_compiles.FLAGS  # without the tests' own eight devices
    command = [*flags, "--processes", processes, "--", program, *arguments]
    return subprocess.run(
        [sys.executable, "-m", "hetjax", "launch", *map(str, command)],
        env=environment, capture_output=True, text=True, timeout=280,
    )  # fmt: skip


def results_of(done, folder, processes):
    """What each process wrote."""
    assert done.returncode == 0, done.stderr + done.stdout
    return [json.loads((folder / f"{k}.json").read_text()) for k in range(processes)]


def test_own_loops_of_several_processes_end_together_and_train_like_one(tmp_path):
    """With whole batches, and with lazy ones of which a process reads only its own rows."""
    (tmp_path / "program.py").write_text(OWN_LOOP)
    there = results_of(launch(3, tmp_path, program=tmp_path / "program.py"), tmp_path, 3)
    rows = source()
    batches = [{name: x[i : i + BATCH] for name, x in rows.items()} for i in range(0, 4 * BATCH, BATCH)]
    with Step(loss_fn, optax.sgd(0.05), batch_size=BATCH, devices=jax.devices()[:1]) as step:
        state, losses = step.init({"w": np.zeros(5, np.float32), "b": np.zeros((), np.float32)}), []
        for batch in batches:
            state, report = step(state, batch)
            losses += [] if report is None else [report.loss]
        losses.append(step.flush().loss)
        params = np.asarray(state.params["w"])
    for process, results in enumerate(there):
        for kind in ("whole", "lazy"):
            result = results[kind]
            assert result["step"] == 4
            np.testing.assert_allclose(result["losses"], losses, rtol=1e-5)
            np.testing.assert_allclose(result["params"], params, rtol=1e-5)
            (ending,) = [line for line in result["messages"] if "ended after" in line]
            assert "process 1 ended after 4 steps" in ending
            assert ("this one has more" in ending) == (process != 1)
        bounds = [0, *np.cumsum([1, 2, 3]) * BATCH // 6]
        own = max(b - a for a, b in results["read"][1])
        assert own <= bounds[process + 1] - bounds[process] + 4
        assert results["read"][5] == []


def test_no_process_compiles_again_after_a_restart(tmp_path, monkeypatch):
    """Neither chunks nor programs over all workers."""
    monkeypatch.delenv(PROGRAMS, raising=False)
    (tmp_path / "program.py").write_text(COUNTS_COMPILES)
    done = launch(2, tmp_path, flags=["--restart", 1, "--resume-flag="], program=tmp_path / "program.py")
    assert done.returncode == 0, done.stderr + done.stdout
    first, again = ([int((tmp_path / f"{k}-{again}").read_text()) for k in range(2)] for again in (False, True))
    assert sum(first) >= 6
    assert again == [0, 0]


@pytest.mark.parametrize(("processes", "per_process", "transport"), [(2, 2, "mesh"), (3, 1, "host")])
def test_several_processes_train_like_one(tmp_path, processes, per_process, transport):
    done = launch(processes, per_process, tmp_path, flags=["--transport", transport])
    there = results_of(done, tmp_path, processes)
    for name in RUNS:
        alone = run(name, jax.devices()[: processes * per_process])
        for results in there:
            np.testing.assert_allclose(results[name]["losses"], alone["losses"], rtol=1e-5)
            np.testing.assert_allclose(results[name]["tested"], alone["tested"], rtol=1e-5)
            assert results[name]["predicted"]["number"] == list(range(SAMPLES))  # of all processes, in all of them
            for key in ("sum", "noise"):
                np.testing.assert_allclose(
                    results[name]["predicted"][key], alone["predicted"][key], rtol=1e-4, atol=1e-5
                )
            assert results[name]["recompiles"] == 0
            for key, value in alone["params"].items():
                np.testing.assert_allclose(results[name]["params"][key], value, rtol=1e-4, atol=1e-6)
        assert sum(sum(results[name]["own"]) for results in there) == samples(STEPS)
    for results in there:
        own, read = sum(results["steady"]["own"]), len(results["steady"]["read"])
        short = BATCH + 1  # the short step of an epoch is split differently; one row is read for its shape
        assert own <= read <= own + 2 * STEPS + short < samples(STEPS)  # shares below 16 have a margin of one row


def samples(steps):
    """Samples of this many steps; the last step of an epoch is short."""
    per_epoch = -(-SAMPLES // BATCH)
    return steps // per_epoch * SAMPLES + steps % per_epoch * BATCH


DISAGREEMENTS = {
    "end": "Process 1 differs from process 0 in its end of training: 2250 instead of 2100",
    "start": "Process 1 differs from process 0 in its parameters",
    "optimizer": "Process 1 differs from process 0 in its state of the optimizer",
    "plan": "used another plan than this process in step",
}


@pytest.mark.parametrize("mistakes", [*([mistake] for mistake in MISTAKES), MISTAKES], ids="-".join)
def test_disagreement_between_processes_is_reported(tmp_path, mistakes):
    """Each ends the program with the exit code of its last mistake; all together show that a run can be tried again."""
    done = launch(2, 1, tmp_path, *mistakes)
    assert done.returncode == 3, done.stderr + done.stdout
    for mistake in mistakes:
        lines = [line for line in done.stdout.splitlines() if f"{mistake}: " in line]
        assert any(DISAGREEMENTS[mistake] in line for line in lines), done.stdout
