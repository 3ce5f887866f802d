"""bench_daso: figures by hand, links that are slow and leave nothing behind, and a quick run of it."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import bench_daso
import pytest
from daso_links import Links, LinksRefused

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_figures_by_hand():
    epoch = lambda seconds, until, blocking, loss: {
        "seconds": seconds, "until": until, "blocking": blocking, "loss": loss, "accuracy": 1 - loss,
    }  # fmt: skip
    epochs = [epoch(9.0, 9.0, True, 0.9), epoch(2.0, 11.0, False, 0.6), epoch(3.0, 14.0, False, 0.5)]
    journal = [
        {"sent": 1, "received": 1, "beside": 0, "seconds": 5.0, "waited": 5.0},
        {"sent": 2, "received": 4, "beside": 2, "seconds": 0.4, "waited": 0.1},
    ]
    told = bench_daso.measured({"epochs": epochs, "journal": journal}, target=0.6)
    assert (told["epoch_s"], told["run_s"], told["time_to_target_s"]) == (2.5, 14.0, 11.0)
    assert (told["accuracy"], told["exchange_s"], told["waited_s"]) == (0.5, 0.4, 0.1)
    other = bench_daso.measured({"epochs": epochs, "journal": []}, target=0.1)
    both = bench_daso.over_seeds([told, other])
    assert (both["epoch_s"], both["time_to_target_s"], both["seeds"]) == (2.5, None, 2)
    assert "exchange_s" not in both


def namespaces():
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


@pytest.fixture
def links():
    try:
        with Links(2) as links:
            yield links
    except LinksRefused as refused:
        pytest.skip(str(refused))
    assert f"hetjax-{os.getpid()}-" not in namespaces()


SENDS = """
import socket, sys
with socket.create_connection((sys.argv[1], 5555), timeout=20) as to:
    to.sendall(bytes(1_000_000))
"""
RECEIVES = """
import socket, time
with socket.create_server(("0.0.0.0", 5555)) as server:
    print("ready", flush=True)
    came, _ = server.accept()
    began, size = time.perf_counter(), 0
    while part := came.recv(1 << 16):
        size += len(part)
    print(8e-6 * size / (time.perf_counter() - began), flush=True)
"""


def test_a_link_is_as_slow_as_asked(links):
    links.limit(20)
    receiver = subprocess.Popen([*links.inside(1), sys.executable, "-c", RECEIVES], stdout=subprocess.PIPE, text=True)
    try:
        assert receiver.stdout.readline() == "ready\n"
        subprocess.run([*links.inside(0), sys.executable, "-c", SENDS, links.address(1)], check=True, timeout=30)
        assert float(receiver.communicate(timeout=30)[0]) < 25
    finally:
        receiver.kill()
        receiver.wait()


def test_nothing_stays_after_an_exception():
    try:
        with Links(2):
            assert f"hetjax-{os.getpid()}-node0" in namespaces()
            raise KeyError("something")
    except LinksRefused as refused:
        pytest.skip(str(refused))
    except KeyError:
        assert f"hetjax-{os.getpid()}-" not in namespaces()


def test_a_quick_run(tmp_path):
    path = tmp_path / "daso.json"
    command = [sys.executable, "experiments/bench_daso.py", "--quick", "--methods", "allreduce,daso"]
    kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    began = time.time()
    bench = subprocess.Popen(
        [*command, "--json", str(path)], cwd=ROOT, env=kept | {"PYTHONPATH": str(ROOT)}, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        said, _ = bench.communicate(timeout=240)
    finally:
        bench.kill()
        bench.wait()
    assert bench.returncode == 0, said
    ((link, methods),) = json.loads(path.read_text()).items()
    assert link.startswith("100 Mbit/s")
    assert set(methods) == {"allreduce", "daso"}
    for told in methods.values():
        assert 0 < told["epoch_s"] < told["run_s"] < time.time() - began
        assert 0.2 < told["accuracy"] <= 1
        assert "time_to_target_s" in told
    left = subprocess.run(["ps", "-o", "args=", "-s", str(bench.pid)], capture_output=True, text=True).stdout
    assert left == ""
    if shutil.which("ip"):
        assert f"hetjax-{bench.pid}-" not in namespaces()
