"""The launcher's small parts by themselves: when a process is hung, which cores and GPUs it gets, its heartbeat."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launching import until

from hetjax.fleet import rendezvous as meeting_point
from hetjax.fleet.rendezvous import address_to_bind, is_loopback, own_address_towards, split_address
from hetjax.launch.heartbeat import Beat, HangDetector, Listener, from_environment
from hetjax.launch.placement import cores_for, gpus_here, shares_of_gpus


def test_a_pulse_runs_out():
    pulse = HangDetector(silent_limit=10, step_limit=60)
    pulse.hear(Beat(alive=0), now=0)
    assert pulse.complaint(now=1000) is None  # a program without a heartbeat
    pulse.hear(Beat(alive=1), now=1000)
    assert pulse.complaint(now=1010) is None
    assert pulse.complaint(now=1011) == "gave no sign of life for 11 s"
    pulse.hear(Beat(alive=2), now=1011)
    assert pulse.complaint(now=1020) is None


def test_steps_have_to_come_only_while_steps_are_taken():
    pulse = HangDetector(silent_limit=10, step_limit=60)
    for now, begun, ended, step, told in [
        (0, 0, 0, 0, None),
        (500, 0, 0, 0, None),  # compiling
        (501, 1, 0, 0, None),
        (561, 1, 0, 0, None),
        (562, 1, 0, 0, "finished no step for 61 s; its last one was step 0"),
        (570, 1, 0, 1, None),
        (631, 1, 0, 1, "finished no step for 61 s; its last one was step 1"),
        (632, 1, 1, 1, None),  # testing
        (900, 2, 1, 1, None),  # another fit
        (961, 2, 1, 1, "finished no step for 61 s; its last one was step 1"),
    ]:
        pulse.hear(Beat(now, begun, ended, step), now)
        assert pulse.complaint(now) == told, now


def test_a_stopped_process_is_named_as_such_and_forgiven_when_it_goes_on():
    pulse = HangDetector(silent_limit=10, step_limit=60)
    pulse.hear(Beat(), 0, stopped=True)
    pulse.hear(Beat(), 11, stopped=True)
    assert pulse.complaint(11) == "has been stopped (SIGSTOP or a debugger) for 11 s"
    pulse.hear(Beat(), 12, stopped=False)
    assert pulse.complaint(100) is None


def test_a_heartbeat_is_heard(tmp_path):
    listener = Listener(tmp_path, 3)
    assert listener.read() == Beat()
    beat = from_environment({"HETJAX_HEARTBEAT": str(tmp_path), "HETJAX_PROCESS": "3"})
    until(lambda: listener.read().alive >= 2, "two signs of life")
    listener.answer(Beat(begun=1))
    beat.begin(None)
    assert listener.read().stepping
    beat(SimpleNamespace(step=17), None)
    heard = listener.read()
    assert heard.step == 17
    assert heard.step_ns > 0
    beat.end(None)
    assert not listener.read().stepping
    beat.close()
    silent = listener.read().alive
    assert listener.read().alive == silent
    listener.close()
    assert [path.name for path in tmp_path.iterdir()] == ["process-3"]


def test_without_a_launcher_there_is_no_heartbeat():
    assert from_environment({}) is None


@given(st.lists(st.floats(0.1, 4), min_size=1, max_size=8), st.integers(1, 12))
def test_cores_are_shared_out(weights, cores):
    chosen = cores_for(weights, range(cores))
    assert all(chosen)
    used = [core for mine in chosen for core in mine]
    if len(weights) <= cores:
        assert sorted(used) == list(range(cores))  # each core has one process, and all are used
    else:
        assert set(used) == set(range(cores))
        assert all(len(mine) == 1 for mine in chosen)


def test_cores_by_hand():
    assert cores_for([0.8, 0.4, 0.2, 0.2], [0, 1]) == [[0], [1], [1], [1]]
    assert cores_for([1, 1, 1, 1], [4, 6]) == [[4], [6], [4], [6]]  # round robin
    assert cores_for([3, 1], [0, 1, 2, 3]) == [[0, 1, 2], [3]]


def test_gpus(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert gpus_here({}, tmp_path) == 3
    assert gpus_here({"CUDA_VISIBLE_DEVICES": "0,2"}, tmp_path) == 2
    assert gpus_here({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0
    assert gpus_here({"JAX_PLATFORMS": "cpu"}, tmp_path) == 0
    assert gpus_here({"JAX_PLATFORMS": "cuda,cpu"}, tmp_path) == 3
    assert shares_of_gpus(2, 0) == [None, None]
    assert shares_of_gpus(2, 3) == ["0", "1,2"]
    with pytest.raises(ValueError, match="4 processes need a GPU each, and there are 3"):
        shares_of_gpus(4, 3)


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
def known(monkeypatch):
    """The addresses of the host node0, of which 192.0.2.7 is another machine's."""

    def at(*addresses):
        found = [(0, 0, 0, "", (address, 0)) for address in addresses]
        monkeypatch.setattr(meeting_point.socket, "getaddrinfo", lambda *_, **__: found)

    def check_free(address):
        if address.startswith("192.0.2.7:"):
            raise OSError(f"Process 0 cannot listen on {address}.")

    monkeypatch.setattr(meeting_point, "check_free", check_free)
    return at


def test_process_0_listens_on_the_coordinators_address_only(known, caplog):
    known("192.0.2.5")
    assert address_to_bind("node0:80") == "192.0.2.5:80"
    known("127.0.1.1", "192.0.2.7", "2001:db8::5")
    assert address_to_bind("node0:80") == "[2001:db8::5]:80"
    known("127.0.0.1")
    assert address_to_bind("localhost:80") == "localhost:80"
    assert not caplog.records


def test_where_nobody_says_which_address_that_is_process_0_listens_on_all_and_warns(known, caplog):
    known("127.0.1.1")
    assert address_to_bind("node0:80") == "0.0.0.0:80"
    assert "node0 is a loopback address on this machine, so process 0 listens on all addresses" in caplog.text


def test_the_address_of_another_machine_is_refused(known):
    known("192.0.2.7")
    with pytest.raises(OSError, match=r"cannot listen on 192.0.2.7:80\. .*set HETJAX_BIND=HOST:PORT"):
        address_to_bind("node0:80")
