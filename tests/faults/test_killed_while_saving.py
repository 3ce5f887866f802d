"""A program that saves all the time is killed at random moments: its last checkpoint is always intact."""

import subprocess
import sys
import time
from pathlib import Path

import fake_trainer
import numpy as np
from fake_trainer import FakeTrainer

from hetjax import checkpoint
from hetjax.state import State

SIZE, NUMBER = 3000, 12
SAVING = f"""
import sys
import numpy as np
sys.path.insert(0, {str(Path(fake_trainer.__file__).parent)!r})
from fake_trainer import FakeTrainer
from hetjax import checkpoint
from hetjax.state import State
step = int(sys.argv[2])
while True:
    step += 1
    params = [np.full({SIZE}, step, np.float32) for _ in range({NUMBER})]
    checkpoint.save(sys.argv[1], State(params, None, None, None, step), FakeTrainer(), keep=2)
    print(step, flush=True)
"""


def test_checkpoints_of_a_killed_program_are_intact(tmp_path, caplog):
    seed = 17
    rng = np.random.default_rng(seed)
    print(f"seed {seed}")
    like, step = State([np.zeros(SIZE, np.float32)] * NUMBER, None, None, None), 0
    for moment in rng.uniform(0, 0.1, 3):
        command = [sys.executable, "-c", SAVING, str(tmp_path), str(step)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
            saved = [int(program.stdout.readline()) for _ in range(3)]
            time.sleep(moment)
            program.kill()
            saved += [int(line) for line in program.stdout]
        found = checkpoint.restore_latest(tmp_path, like, FakeTrainer()).state
        assert found.step in (saved[-1], saved[-1] + 1)  # killed before it was printed
        assert all((part == found.step).all() for part in found.params)
        step = found.step
    assert not caplog.records  # no damage was found
    checkpoint.Saver(tmp_path, FakeTrainer()).close()
    assert {path.name for path in tmp_path.iterdir()} <= {f"step_{n:08d}" for n in range(step - 3, step + 1)}
