"""DASO over two processes, with two workers and one: the run of one process, with overlapping exchanges."""

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

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("across")]  # one run of the program serves all tests

PROGRAM = Path(__file__).with_name("node_process.py")
ROOT = Path(__file__).parents[3]
EPOCH = -(-SAMPLES // BATCH)


def results_of(folder, transport, *jobs):
    """The results of both nodes in these jobs of node_process.py, or in all: {job: [node 0, node 1]}."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HETJAX_", "XLA_FLAGS", "JAX_"))}
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    processes = []
    for node, workers in enumerate((2, 1)):
        variables = {
            "HETJAX_COORDINATOR": address, "HETJAX_PROCESSES": "2", "HETJAX_PROCESS": str(node),
            "HETJAX_TRANSPORT": transport, "JAX_NUM_CPU_DEVICES": str(workers), "XLA_FLAGS": quick_compiles.FLAGS,
            "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        command = [sys.executable, str(PROGRAM), str(folder), *jobs]
        log = (folder / f"log-{node}").open("w")
        processes.append(subprocess.Popen(command, env=kept | variables, cwd=ROOT, stdout=log, stderr=log))
        log.close()
    try:
        codes = [process.wait(280) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0, 0], [(folder / f"log-{node}").read_text()[-3000:] for node in range(2)]
    jobs = {path.name.rpartition("-")[0] for path in folder.glob("*.json")}
    return {job: [json.loads((folder / f"{job}-{node}.json").read_text()) for node in range(2)] for job in jobs}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return results_of(tmp_path_factory.mktemp("nodes"), "host")


def test_equals_the_run_of_one_process(seen):
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


def test_nodes_of_unlike_kinds(seen):
    """One program cannot span the devices of two clients; the run is that of two nodes of one kind."""
    for unlike, whole in zip(seen["unlike"], seen["whole"], strict=True):
        np.testing.assert_allclose(unlike["answer"], whole["answer"], rtol=1e-5)
        np.testing.assert_allclose(
            [r["loss"] for r in unlike["records"]], [r["loss"] for r in whole["records"]], rtol=1e-5
        )
    assert seen["unlike"][0]["answer"] == seen["unlike"][1]["answer"]


def test_processes_with_one_backend(seen, tmp_path):
    """Where one JAX backend spans all processes, nodes still plan and exchange on their own."""
    meshed = results_of(tmp_path, "mesh", "whole", "stopped")
    for own, whole in zip(meshed["whole"], seen["whole"], strict=True):
        np.testing.assert_allclose(own["answer"], whole["answer"], rtol=1e-5)
    check_stopped(meshed)


def records_of(job):
    """The records of both nodes, step by step."""
    return list(zip(*(node["records"] for node in job), strict=True))


def samples_by_step(job, cycling):
    """The samples that both nodes computed in each step of the epochs in which nodes report their own sums."""
    steps = []
    for pair in records_of(job):
        if pair[0]["epoch"] in cycling:
            parts = [(record["metrics"], sum(record["counts"])) for record in pair]
            steps.append([sample for metrics, count in parts if count for sample in samples_of(metrics, count)])
    return steps


def test_every_sample_is_computed_once_per_epoch(seen):
    assert check_samples(samples_by_step(seen["whole"], range(1, 5)), SAMPLES) == 4
    assert check_samples(samples_by_step(seen["paced"], range(1, 3)), SAMPLES) == 2


def test_no_step_waits_for_a_pending_exchange(seen):
    """Exchanges are held until they are received, so all local phases in between end while one is pending.

    An epoch of six steps sends at 0, 4 and 5. The duration of an exchange is unknown at first: received after a step,
    as at the end of an epoch; once it is known, as late as possible, with the next send.
    """
    for node in seen["overlapping"]:
        stale = [record for record in node["journal"] if record["received"] > record["sent"]]
        assert [record["received"] - record["sent"] for record in stale] == [1, 1, 4, 1]
        assert [record["overlapped"] for record in stale] == [1, 1, 4, 1]


def test_nodes_of_unequal_speed(seen):
    """Node 0 has four times the speed. In the blocking epoch it takes more samples, afterwards more steps."""
    counts = np.array([[sum(r["counts"]) for r in node["records"]] for node in seen["paced"]])
    same_steps, own_steps = counts[:, 2 : EPOCH - 1], counts[:, EPOCH:]
    assert (same_steps > 0).all()
    assert same_steps[0].mean() > 2 * same_steps[1].mean()
    taken = (own_steps > 0).sum(axis=1)
    assert taken[0] == own_steps.shape[1]
    assert taken[0] > 2 * taken[1] > 0
    assert abs(own_steps[0].max() - own_steps[1].max()) <= 1


def test_counts_inside_a_node_follow_its_workers(seen):
    """With speeds 1, 1/4 and 1/4 a step of 8 is 16/3, 4/3 and 4/3 samples; the first plan is equal."""
    assert check_samples(samples_by_step(seen["inside"], range(4)), SAMPLES) == 4
    counts = np.array([np.concatenate([record["counts"] for record in pair]) for pair in records_of(seen["inside"])])
    assert counts.shape == (4 * EPOCH, 3)
    assert counts[0].tolist() == [2, 2, 4]
    full = counts[2 * EPOCH :][counts[2 * EPOCH :].sum(axis=1) == BATCH]
    np.testing.assert_allclose(full.mean(axis=0), [16 / 3, 4 / 3, 4 / 3], atol=0.7)


def test_a_stop_request_of_one_node_ends_both_and_they_resume(seen):
    check_stopped(seen)


def check_stopped(seen):
    for stopped, whole in zip(seen["stopped"], seen["whole"], strict=True):
        assert stopped["pending"]
        assert stopped["after"] == EPOCH + 1
        np.testing.assert_allclose(stopped["answer"], whole["answer"], rtol=1e-5)
        np.testing.assert_allclose(stopped["losses"], [r["loss"] for r in whole["records"]], rtol=1e-4)


def test_a_run_stopped_between_exchanges_does_not_stop_again(seen):
    for stopped, whole in zip(seen["stopped_between"], seen["whole"], strict=True):
        assert not stopped["pending"]
        assert stopped["after"] == EPOCH + 3
        np.testing.assert_allclose(stopped["answer"], whole["answer"], rtol=1e-5)
        np.testing.assert_allclose(stopped["losses"], [r["loss"] for r in whole["records"]], rtol=1e-4)


def test_invalid_configurations_are_rejected_on_both(seen):
    for seed, nodes, transport, capacity, unequal in seen["rejected"]:
        assert "Process 1 differs from process 0 in its seed: 1 instead of 0" in seed
        assert "nodes=2 groups the workers of one process, but there are 2 processes" in nodes
        assert "needs devices of one kind and transport 'mesh' or 'auto'" in transport
        assert "The nodes can take 3 samples a step in all (capacities [2, 1]), but batch_size is 8" in capacity
        assert "The nodes have [2, 1] workers, but the published method assumes equal nodes" in unequal


def test_counts_of_a_node_stay_within_its_capacity(seen):
    first, second = ([sum(record["counts"]) for record in node["records"]] for node in seen["narrow"])
    assert second == [2] * EPOCH
    assert first == [6] * (EPOCH - 1) + [2]
    assert seen["narrow"][0]["tested"] == pytest.approx(seen["narrow"][1]["tested"])


def test_the_answer_within_an_epoch_is_weighted_by_batch(seen):
    own = [np.array(node["own"]) for node in seen["apart"]]
    assert np.abs(own[0] - own[1]).max() > 1e-3
    for node in seen["apart"]:
        np.testing.assert_allclose(node["answer"], (6 * own[0] + 2 * own[1]) / 8, rtol=1e-5, atol=1e-7)


def test_disagreeing_nodes_are_detected(seen):
    """On schedule, rates, or counts."""
    for messages in seen["altered"]:
        assert len(messages) == 3
        assert all("Nodes [1] differ from node 0" in message for message in messages)


def test_a_node_with_a_nonfinite_loss_is_named(seen):
    (warning,) = (warning for warnings in seen["poisoned"] for warning in warnings)
    node = next(j for j, warnings in enumerate(seen["poisoned"]) if warnings)
    assert re.search(rf"loss or gradient of worker \d of node {node} was NaN or infinite", warning)


def test_nodes_wait_for_a_straggler(seen):
    """Node 0 enters an exchange long before node 1, and the run is unchanged."""
    assert [node["entered"] for node in seen["straggler"]] == [[], [True, False]]
    for straggler, whole in zip(seen["straggler"], seen["whole"], strict=True):
        np.testing.assert_allclose(straggler["answer"], whole["answer"], rtol=1e-5)


def test_a_missing_node_is_named(seen):
    first, second = seen["timed_out"]
    assert "Process 1 did not send its part of an exchange within 1 s" in first
    assert "Process 0 did not send its part of an exchange within 1 s" in second
