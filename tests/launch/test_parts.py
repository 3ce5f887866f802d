"""The parts of the launcher: hang detection, heartbeats, placement on cores and GPUs, addresses."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launching import until

from hetjax.fleet import rendezvous
from hetjax.fleet.rendezvous import address_to_bind, is_loopback, own_address_towards, split_address
from hetjax.launch.heartbeat import Beat, HangDetector, Listener, from_environment
from hetjax.launch.placement import share_gpus, split_cores, visible_gpus
from hetjax.launch.restart_costs import RestartCosts


def test_a_process_that_gives_no_sign_of_life_hangs():
    detector = HangDetector(silent_limit=10, step_limit=60)
    detector.update(Beat(alive=0), now=0)
    assert detector.hang(now=1000) is None  # a program without a heartbeat
    detector.update(Beat(alive=1), now=1000)
    assert detector.hang(now=1010) is None
    assert detector.hang(now=1011) == "gave no sign of life for 11 s"
    detector.update(Beat(alive=2), now=1011)
    assert detector.hang(now=1020) is None


def test_steps_are_required_only_inside_the_step_loop():
    detector = HangDetector(silent_limit=10, step_limit=60)
    for now, begun, ended, step, hang in [
        (0, 0, 0, 0, None),
        (500, 0, 0, 0, None),  # compiling
        (501, 1, 0, 0, None),
        (561, 1, 0, 0, None),
        (562, 1, 0, 0, "finished no step for 61 s; its last one was step 0"),
        (570, 1, 0, 1, None),
        (631, 1, 0, 1, "finished no step for 61 s; its last one was step 1"),
        (632, 1, 1, 1, None),  # evaluating
        (900, 2, 1, 1, None),  # another fit
        (961, 2, 1, 1, "finished no step for 61 s; its last one was step 1"),
    ]:
        detector.update(Beat(now, begun, ended, step), now)
        assert detector.hang(now) == hang, now


def test_a_stopped_process_hangs_until_it_continues():
    detector = HangDetector(silent_limit=10, step_limit=60)
    detector.update(Beat(), 0, stopped=True)
    detector.update(Beat(), 11, stopped=True)
    assert detector.hang(11) == "has been stopped (SIGSTOP or a debugger) for 11 s"
    detector.update(Beat(), 12, stopped=False)
    assert detector.hang(100) is None


def test_the_listener_reads_the_heartbeat(tmp_path):
    listener = Listener(tmp_path, 3)
    assert listener.read() == Beat()
    heartbeat = from_environment({"HETJAX_HEARTBEAT": str(tmp_path), "HETJAX_PROCESS": "3"})
    until(lambda: listener.read().alive >= 2, "two signs of life")
    listener.acknowledge(Beat(begun=1))
    heartbeat.begin(None)
    assert listener.read().stepping
    heartbeat(SimpleNamespace(step=17), None)
    assert listener.read().step == 17
    heartbeat.end(None)
    assert not listener.read().stepping
    heartbeat.close()
    assert not heartbeat._thread.is_alive()
    listener.close()
    assert [path.name for path in tmp_path.iterdir()] == ["process-3"]


def test_without_a_launcher_there_is_no_heartbeat():
    assert from_environment({}) is None


@given(st.lists(st.floats(0.1, 4), min_size=1, max_size=8), st.integers(1, 12))
def test_cores_are_disjoint_or_all_in_use(weights, cores):
    chosen = split_cores(weights, range(cores))
    assert all(chosen)
    used = [core for own in chosen for core in own]
    if len(weights) <= cores:
        assert sorted(used) == list(range(cores))  # every core is used, by one process
    else:
        assert set(used) == set(range(cores))
        assert all(len(own) == 1 for own in chosen)


def test_cores_follow_the_weights():
    assert split_cores([0.8, 0.4, 0.2, 0.2], [0, 1]) == [[0], [1], [1], [1]]
    assert split_cores([1, 1, 1, 1], [4, 6]) == [[4], [6], [4], [6]]  # round robin
    assert split_cores([3, 1], [0, 1, 2, 3]) == [[0, 1, 2], [3]]


def test_gpus_are_split_evenly(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == 3
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,2"}, tmp_path) == 2
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0
    assert visible_gpus({"JAX_PLATFORMS": "cpu"}, tmp_path) == 0
    assert visible_gpus({"JAX_PLATFORMS": "cuda,cpu"}, tmp_path) == 3
    assert share_gpus([None, None], 0) == [(None, None), (None, None)]
    assert share_gpus([None, None], 3) == [(None, "0"), (None, "1,2")]
    with pytest.raises(ValueError, match="4 processes need a GPU each, and there are 3"):
        share_gpus([None] * 4, 3)


def test_gpus_named_by_a_process_are_its_own():
    """JAX numbers the GPUs that a process sees, so the choice that it gets names no index."""
    assert share_gpus(["cuda:1,2+cpu", "gpu", "cpu"], 4) == [("cuda+cpu", "1,2"), ("gpu", "0,3"), ("cpu", None)]
    assert share_gpus(["gpu:2+cpu:0,1", "cpu"], 3) == [("gpu+cpu:0,1", "2"), ("cpu", None)]
    assert share_gpus(["1", "all"], 2) == [("1", "0"), ("all", "1")]
    assert share_gpus(["cuda:0", "cuda:0"], 1) == [("cuda", "0"), ("cuda", "0")]  # shared on purpose
    with pytest.raises(ValueError, match="names GPU 2, but there are 2"):
        share_gpus(["cuda:2", "cpu"], 2)
    with pytest.raises(ValueError, match="1 processes need a GPU each, and there are 0"):
        share_gpus(["cuda:0", "gpu"], 1)


def test_addresses():
    assert split_address("node0:29500") == ("node0", 29500)
    assert split_address("[::1]:80") == ("::1", 80)
    for wrong in ("node0", "node0:", ":80", "node0:0", "node0:65536", "node0:x"):
        with pytest.raises(ValueError, match="is not HOST:PORT"):
            split_address(wrong)
    assert is_loopback("127.0.1.1")
    assert is_loopback("::1")
    assert is_loopback("localhost")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("node0")
    assert own_address_towards("127.0.0.1:80") == "127.0.0.1"


@pytest.fixture
def resolve(monkeypatch):
    """Sets the addresses of the host node0; 192.0.2.7 belongs to another machine."""

    def set_addresses(*addresses):
        found = [(0, 0, 0, "", (address, 0)) for address in addresses]
        monkeypatch.setattr(rendezvous.socket, "getaddrinfo", lambda *_, **__: found)

    def check_free(address):
        if address.startswith("192.0.2.7:"):
            raise OSError(f"Process 0 cannot listen on {address}.")

    monkeypatch.setattr(rendezvous, "check_free", check_free)
    return set_addresses


def test_process_0_listens_on_the_address_of_the_coordinator_only(resolve, caplog):
    resolve("192.0.2.5")
    assert address_to_bind("node0:80") == "192.0.2.5:80"
    resolve("127.0.1.1", "192.0.2.7", "2001:db8::5")
    assert address_to_bind("node0:80") == "[2001:db8::5]:80"
    resolve("127.0.0.1")
    assert address_to_bind("localhost:80") == "localhost:80"
    assert not caplog.records


def test_process_0_listens_on_all_addresses_and_warns_where_the_coordinator_is_loopback(resolve, caplog):
    resolve("127.0.1.1")
    assert address_to_bind("node0:80") == "0.0.0.0:80"
    assert "node0 is a loopback address on this machine, so process 0 listens on all addresses" in caplog.text


def test_the_address_of_another_machine_is_refused(resolve):
    resolve("192.0.2.7")
    with pytest.raises(OSError, match=r"cannot listen on 192.0.2.7:80\. .*set HETJAX_BIND=HOST:PORT"):
        address_to_bind("node0:80")


def test_a_restart_tells_where_the_seconds_went():
    costs = RestartCosts(2, seen_at=10.0, noticed_at=10.5, started_at=12.0, step=57)
    going = Beat(alive=9, begun=1, step=58, first=51, reading_us=1_200_000)
    late = Beat(alive=1)
    assert costs.update([Beat(), Beat()], 12.5) is None
    assert costs.update([Beat(alive=1), late], 15.0) is None
    assert costs.update([going, late], 19.0) is None
    assert costs.update([going, Beat(alive=9, begun=1, step=55, first=51)], 20.0) is None
    assert costs.update([going, Beat(alive=9, begun=1, step=58, first=51)], 21.0) == (
        "restart 2 took 11.0 s: 0.5 s until the loss was noticed, 1.5 s until the others had ended, 3.0 s to start "
        "the processes, 1.2 s to read the checkpoint, 3.8 s to set up and compile, 1.0 s for 7 steps done "
        "again and a new one"
    )
    assert costs.update([going, going], 22.0) is None
