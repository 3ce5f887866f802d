"""DASO over two real processes, one with two workers and one with one: the same run as in one process, overlapping."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
import quick_compiles
from daso_setups import BATCH, SAMPLES, Fixed, flat, tanh_net
from sample_log import check_samples, samples_of

from hetjax import Chunked, Trainer
from hetjax.fleet.rendezvous import free_port
from hetjax.sync.daso import Daso

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("across")]  # one set of runs serves all

PROGRAM = Path(__file__).with_name("node_process.py")
ROOT = Path(__file__).parents[3]
EPOCH = -(-SAMPLES // BATCH)


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What both nodes saw in every job: {job: [node 0, node 1]}."""
    folder = tmp_path_factory.mktemp("nodes")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HETJAX_", "XLA_FLAGS"))}
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    processes = []
    for node, workers in enumerate((2, 1)):
        told = {
            "HETJAX_COORDINATOR": address, "HETJAX_PROCESSES": "2", "HETJAX_PROCESS": str(node), "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(workers + 1), "XLA_FLAGS": quick_compiles.FLAGS,
            "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        command = [sys.executable, str(PROGRAM), str(folder)]
        log = (folder / f"log-{node}").open("w")
        processes.append(subprocess.Popen(command, env=kept | told, cwd=ROOT, stdout=log, stderr=log))
        log.close()
    try:
        codes = [process.wait(240) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0, 0], [(folder / f"log-{node}").read_text()[-3000:] for node in range(2)]
    jobs = {path.name.rpartition("-")[0] for path in folder.glob("*.json")}
    return {job: [json.loads((folder / f"{job}-{node}.json").read_text()) for node in range(2)] for job in jobs}


def test_it_is_the_run_of_one_process(seen):
    loss_fn, data, params, _ = tanh_net()
    data, params = jax.tree.map(lambda x: x.astype(np.float32), (data, params))
    options = {"warm_up": 1, "cool_down": 1, "stability": 0.9, "max_skip": 4, "wire": "full"}
    with Trainer(
        loss_fn, optax.sgd(0.1, momentum=0.5), batch_size=BATCH, controller=Fixed([2, 2, 4]),
        engine=Chunked(rungs=[1, 8]), sync=Daso(nodes=[2, 1], **options), devices=jax.devices()[:3],
    ) as trainer:  # fmt: skip
        state, history = trainer.fit(trainer.init(params), data, epochs=6)
        expected = flat(trainer.answer(state).params)
    for node in seen["whole"]:
        np.testing.assert_allclose(node["answer"], expected, rtol=1e-4)
        assert (node["step"], node["cursor"]) == (state.step, state.cursor)
    ours, theirs = (np.array([record["loss"] for record in node["records"]]) for node in seen["whole"])
    blocking = np.r_[0:EPOCH, 5 * EPOCH : 6 * EPOCH]
    np.testing.assert_allclose(ours[blocking], np.array(history.losses)[blocking], rtol=1e-4)
    np.testing.assert_array_equal(ours[blocking], theirs[blocking])


def records_of(job):
    """The records of both nodes, step by step."""
    return list(zip(*(node["records"] for node in job), strict=True))


def samples_by_step(job, cycling):
    """The samples that both nodes computed in each step of the epochs in which they have sums of their own."""
    steps = []
    for pair in records_of(job):
        if pair[0]["epoch"] in cycling:
            parts = [(record["metrics"], sum(record["counts"])) for record in pair]
            steps.append([sample for metrics, count in parts if count for sample in samples_of(metrics, count)])
    return steps


def test_every_sample_comes_once_an_epoch(seen):
    assert check_samples(samples_by_step(seen["whole"], range(1, 5)), SAMPLES) == 4
    assert check_samples(samples_by_step(seen["paced"], range(1, 3)), SAMPLES) == 2


def test_no_step_waits_for_an_exchange_under_way(seen):
    """Exchanges last 0.3 s and steps 0.04: the local phases of all steps until they are due end while they are under
    way. They are due a step later at first and at the end of an epoch, and as late as can be once that is known."""
    for node in seen["overlapping"]:
        due_later = [entry for entry in node["journal"] if entry["received"] > entry["sent"]]
        assert all(entry["seconds"] >= 0.3 for entry in due_later)
        assert [entry["received"] - entry["sent"] for entry in due_later] == [1, 1, 4, 1]
        # A phase that waited would end after the exchange. On a busy machine the last of several may do so anyway.
        assert all(entry["beside"] >= 1 for entry in due_later)
        assert due_later[2]["beside"] >= 2


def test_nodes_of_unequal_speed(seen):
    """Node 0 has four times the speed. In the blocking epoch it takes more samples, then it makes more steps."""
    counts = np.array([[sum(r["counts"]) for r in node["records"]] for node in seen["paced"]])
    same_steps, own_steps = counts[:, 2 : EPOCH - 1], counts[:, EPOCH:]
    assert (same_steps > 0).all()
    assert same_steps[0].mean() > 2 * same_steps[1].mean()
    made = (own_steps > 0).sum(axis=1)
    assert made[0] == own_steps.shape[1]
    assert made[0] > 2 * made[1] > 0
    assert abs(own_steps[0].max() - own_steps[1].max()) <= 1


def test_counts_inside_a_node_follow_its_workers(seen):
    """With all speeds 1, 1/4 and 1/4 even steps of 8 are 16/3, 4/3 and 4/3 samples; at first all are equal."""
    assert check_samples(samples_by_step(seen["inside"], range(4)), SAMPLES) == 4
    counts = np.array([np.concatenate([record["counts"] for record in pair]) for pair in records_of(seen["inside"])])
    assert counts.shape == (4 * EPOCH, 3)
    assert counts[0].tolist() == [2, 2, 4]
    full = counts[2 * EPOCH :][counts[2 * EPOCH :].sum(axis=1) == BATCH]
    np.testing.assert_allclose(full.mean(axis=0), [16 / 3, 4 / 3, 4 / 3], atol=0.7)


def test_a_wish_of_one_node_ends_both_and_they_go_on(seen):
    for stopped, whole in zip(seen["stopped"], seen["whole"], strict=True):
        assert stopped["pending"]
        assert stopped["after"] == EPOCH + 1
        np.testing.assert_allclose(stopped["answer"], whole["answer"], rtol=1e-5)
        np.testing.assert_allclose(stopped["losses"], [r["loss"] for r in whole["records"]], rtol=1e-4)


def test_a_run_that_was_stopped_between_exchanges_does_not_stop_again(seen):
    for stopped, whole in zip(seen["stopped_between"], seen["whole"], strict=True):
        assert not stopped["pending"]
        assert stopped["after"] == EPOCH + 3
        np.testing.assert_allclose(stopped["answer"], whole["answer"], rtol=1e-5)
        np.testing.assert_allclose(stopped["losses"], [r["loss"] for r in whole["records"]], rtol=1e-4)


def test_what_cannot_go_well_is_refused_on_both(seen):
    for told in seen["refused"]:
        seed, nodes, carrier, capacity = told
        assert "Process 1 differs from process 0 in its seed: 1 instead of 0" in seed
        assert "nodes=2 divides the workers of one process, and here are 2 processes" in nodes
        assert "in process 0, 1 it is a worker too" in carrier
        assert "The nodes can take 3 samples a step in all (capacities [2, 1]), but batch_size is 8" in capacity


def test_no_node_gets_more_than_it_can_take(seen):
    first, second = ([sum(record["counts"]) for record in node["records"]] for node in seen["narrow"])
    assert second == [2] * EPOCH
    assert first == [6] * (EPOCH - 1) + [2]
    assert seen["narrow"][0]["tested"] == pytest.approx(seen["narrow"][1]["tested"])


def test_the_answer_inside_an_epoch_is_weighted_by_batch(seen):
    own = [np.array(node["own"]) for node in seen["apart"]]
    assert np.abs(own[0] - own[1]).max() > 1e-3
    for node in seen["apart"]:
        np.testing.assert_allclose(node["answer"], (6 * own[0] + 2 * own[1]) / 8, rtol=1e-5, atol=1e-7)


def test_nodes_that_no_longer_agree_are_found(seen):
    """On schedule, rates, or who takes how much."""
    for told in seen["altered"]:
        assert len(told) == 3
        assert all("Nodes [1] are at another place" in text for text in told)


def test_a_node_that_is_not_finite_is_named(seen):
    (said,) = (text for told in seen["poisoned"] for text in told)
    node = next(j for j, told in enumerate(seen["poisoned"]) if told)
    assert re.search(rf"loss or gradient of worker \d of node {node} was NaN or infinite", said)


def test_a_late_node_is_waited_for(seen):
    waited, _ = (max(entry["waited"] for entry in node["journal"]) for node in seen["late"])
    assert waited > 1
    for late, whole in zip(seen["late"], seen["whole"], strict=True):
        np.testing.assert_allclose(late["answer"], whole["answer"], rtol=1e-5)


def test_a_node_that_does_not_come_is_named(seen):
    first, second = seen["lost"]
    assert "node 1 did not come" in first
    assert "node 0 did not come" in second
