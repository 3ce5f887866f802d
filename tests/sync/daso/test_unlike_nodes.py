"""DASO in one process, with nodes of two PJRT clients: as a CPU beside a GPU, no program spans both."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import second_client

import hetjax

pytestmark = pytest.mark.slow

PROGRAM = """
import json
from second_client import second_client

second = second_client()
import jax
import optax
from daso_setups import Fixed, flat, tanh_net
from hetjax import Chunked, Trainer
from hetjax.devices.workers import device_kind
from hetjax.sync.daso import Daso

jax.config.update("jax_enable_x64", True)
loss_fn, data, params, _ = tanh_net()
first = jax.devices("cpu")
results = []


def made(devices, nodes):
    sync = Daso(nodes=nodes, warm_up=1, cool_down=1, stability=0.9, max_skip=4)
    return Trainer(
        loss_fn, optax.adam(0.1), batch_size=8, controller=Fixed([3, 2, 3]), engine=Chunked(rungs=[1, 8]), sync=sync,
        devices=devices,
    )


for devices in (first[:3], [*first[:2], second[0]]):
    with made(devices, [2, 1]) as trainer:
        state, history = trainer.fit(trainer.init(params), data, epochs=4)
        state, more = trainer.fit(state, data, steps=3)
        kinds = len({device_kind(device) for device in devices})
        answer = flat(trainer.answer(state).params).tolist()
        results.append({"kinds": kinds, "losses": history.losses + more.losses, "answer": answer})
with made(devices, [1, 2]) as trainer:
    try:
        trainer.fit(trainer.init(params), data, epochs=1)
    except ValueError as error:
        print(json.dumps([*results, str(error)]))
"""


def test_nodes_of_two_clients_equal_nodes_of_one():
    folders = Path(__file__).parent, Path(second_client.__file__).parent, Path(hetjax.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    one, two, refusal = json.loads(done.stdout.splitlines()[-1])
    assert (one["kinds"], two["kinds"]) == (1, 2)
    np.testing.assert_allclose(two["losses"], one["losses"], rtol=1e-9)
    np.testing.assert_allclose(two["answer"], one["answer"], rtol=1e-9)
    assert "the devices of node 1 are cpu:cpu, cpu:cpu@2" in refusal
