"""Joining processes: identified by arguments, launcher, Slurm or Open MPI; real processes; mistakes."""

import os
import shutil
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from hetjax.fleet.distributed import initialize
from hetjax.fleet.identity import ProcessInfo, detected_cluster, find_process
from hetjax.fleet.keys import make_key, read_key
from hetjax.fleet.rendezvous import free_port, is_loopback, own_address_towards

ROOT = Path(__file__).parents[2]
SLURM = {"SLURM_JOB_ID": "4242", "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
LAUNCHER = {"HETJAX_COORDINATOR": "127.0.0.1:5000", "HETJAX_PROCESSES": "2", "HETJAX_PROCESS": "1"}
# Joins, sums the process indices (from 1) as sums travel, prints the addresses it listens on, and leaves.
PROGRAM = """
import os, sys
from hetjax import processes
from hetjax.fleet import initialize, leave
try:
    info = initialize(start_limit=float(os.environ.get("LIMIT", 60)))
except (ValueError, OSError) as error:
    print("error:", error, flush=True)
    leave(2, together=False)
import jax
from jax.experimental.multihost_utils import process_allgather
def gather(value):
    mesh = info.transport == "mesh"
    return process_allgather(jax.numpy.asarray(value)).tolist() if mesh else processes.gather(value)
total, backend = sum(gather(info.process + 1.0)), (jax.process_index(), jax.device_count())
assert backend == ((info.process, 2) if info.transport == "mesh" else (0, 1)), backend
assert (processes.index(), processes.count()) == (info.process, info.processes)
result = f"{info.process} {info.processes} {info.source} {info.transport} {total}"
print(result, flush=True)
if "RESULTS" in os.environ:
    open(os.path.join(os.environ["RESULTS"], str(info.process)), "w").write(result)
if os.environ.get("LISTENS"):
    paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    inodes = {os.readlink(path) for path in paths if os.path.lexists(path)}
    for table in ("tcp", "tcp6"):
        for line in list(open(f"/proc/self/net/{table}"))[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                print("listens", fields[1].partition(":")[0], flush=True)
if os.environ.get("FAILS") == str(info.process):
    leave(7, together=False)
if "FAILS" in os.environ:
    gather(1.0)
leave(0, together=True)
"""


def environment(**more):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_FLAGS", "HETJAX_", "SLURM_", "OMPI_"))}
    return {**kept, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **{k: str(v) for k, v in more.items()}}


def together(*environments, program=PROGRAM, limit=280):
    """Run one process per environment concurrently; exit codes and outputs."""
    command = [sys.executable, "-c", program]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = [subprocess.Popen(command, env=environment(**e), cwd=ROOT, **pipes) for e in environments]
    try:
        outputs = [process.communicate(timeout=limit)[0] for process in started]
        return [process.returncode for process in started], outputs
    finally:
        for process in started:
            process.kill()
            process.wait()


def launched(processes=2, **more):
    """The variables that the launcher sets for each process."""
    port = free_port("127.0.0.1")
    base = {"HETJAX_COORDINATOR": f"127.0.0.1:{port}", "HETJAX_PROCESSES": processes} | more
    return [{**base, "HETJAX_PROCESS": k} for k in range(processes)]


# -- identification --


def test_a_single_process_needs_nothing():
    assert find_process(None, None, None, {}) == ProcessInfo()
    assert find_process(None, None, None, {**LAUNCHER, "HETJAX_PROCESSES": "1", "HETJAX_PROCESS": "0"}) == ProcessInfo()
    assert find_process("nowhere:1", 1, 0, {}) == ProcessInfo()
    assert ProcessInfo().first


def test_arguments_take_precedence_over_the_launcher():
    assert find_process(None, None, None, LAUNCHER) == ProcessInfo(1, 2, "127.0.0.1:5000", "the launcher")
    assert find_process("host:1", 4, 3, LAUNCHER) == ProcessInfo(3, 4, "host:1", "its arguments")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("host:1", 2, 2), "Process 2 of 2: processes are numbered from 0 to 1"),
        (("host:1", 2, -1), "Process -1 of 2"),
        (("host:1", 0, 0), "number of processes is 0"),
        (("host", 2, 0), "'host' is not HOST:PORT"),
        (("host:1", None, 0), "processes was not given"),
        ((None, 2, None), "coordinator and process was not given"),
    ],
)
def test_inconsistent_arguments_are_rejected(given, message):
    with pytest.raises(ValueError, match=message):
        find_process(*given, {})


def test_a_variable_that_is_not_a_number_is_rejected():
    with pytest.raises(ValueError, match="HETJAX_PROCESS is 'one': expected a whole number"):
        find_process(None, None, None, {**LAUNCHER, "HETJAX_PROCESS": "one"})


def test_slurm_provides_everything(monkeypatch):
    for name, value in {**SLURM, "SLURM_PROCID": "1", "SLURM_STEP_NODELIST": "node[07-09],x"}.items():
        monkeypatch.setenv(name, value)
    assert find_process(None, None, None, os.environ) == ProcessInfo(
        1, 2, "node07:61586", "slurm"
    )  # 4242 mod 4096 + 61440
    assert find_process("other:99", None, None, os.environ) == ProcessInfo(1, 2, "other:99", "slurm")
    assert find_process(None, None, None, {**os.environ, **LAUNCHER}).source == "the launcher"
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert find_process(None, None, None, os.environ) == ProcessInfo()


def test_open_mpi_5_needs_a_coordinator(monkeypatch):
    for name, value in {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"}.items():
        monkeypatch.setenv(name, value)
    assert find_process("host:1", None, None, os.environ) == ProcessInfo(2, 4, "host:1", "ompi")
    with pytest.raises(ValueError, match="mpirun -x HETJAX_COORDINATOR=HOST:PORT"):
        find_process(None, None, None, os.environ)
    monkeypatch.setenv("HETJAX_COORDINATOR", "host:2")
    assert find_process(None, None, None, os.environ) == ProcessInfo(2, 4, "host:2", "ompi")


def test_a_pod_alone_is_not_a_cluster(monkeypatch):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert detected_cluster(os.environ) is None


def test_a_pod_of_an_indexed_job_does_not_train_alone_by_accident(monkeypatch):
    monkeypatch.setitem(sys.modules, "kubernetes", None)  # as if it were not installed
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "3")
    with pytest.raises(ValueError, match=r"pod 3 of an indexed job .* pip install 'jax\[k8s\]'"):
        find_process(None, None, None, os.environ)
    assert find_process(None, 1, None, os.environ) == ProcessInfo()
    assert find_process("host:1", 4, 3, os.environ).source == "its arguments"


# -- real processes --


def outside_address():
    """An address of this machine that is not loopback; None if it has none."""
    try:
        own = own_address_towards("198.51.100.1:9")  # nothing is sent
    except OSError:
        return None
    return None if is_loopback(own) else own


def check_listening(outputs, host):
    """Both processes listen on this IPv4 address only, possibly mapped to IPv6; /proc lists it byte-reversed."""
    for text in outputs:
        assert "listens" in text
    listens = [line for text in outputs for line in text.splitlines() if line.startswith("listens")]
    as_listed = "".join(f"{int(part):02X}" for part in reversed(host.split(".")))
    assert all(line.endswith(as_listed) for line in listens), listens


@pytest.mark.parametrize("transport", ["host", "mesh"])
def test_slurm_processes_compute_together_and_listen_on_loopback_only(transport):
    """With the variables that srun sets; the port follows from the job number."""
    job = {**SLURM, "SLURM_JOB_ID": free_port("127.0.0.1") % 4096, "LISTENS": 1, "HETJAX_TRANSPORT": transport}
    codes, outputs = together(*({**job, "SLURM_PROCID": k, "SLURM_LOCALID": k} for k in range(2)))
    assert codes == [0, 0], outputs
    for k in range(2):
        assert f"{k} 2 slurm {transport} 3.0" in outputs[k]
    check_listening(outputs, "127.0.0.1")


@pytest.mark.parametrize("transport", ["host", "mesh"])
@pytest.mark.parametrize("with_key", [False, True])
def test_launched_processes_listen_on_the_coordinator_address_only(transport, with_key, tmp_path):
    """Without a key, process 0 says that this network is trusted."""
    host = outside_address() or "127.0.0.1"
    flags = {"LISTENS": 1, "HETJAX_COORDINATOR": f"{host}:{free_port(host)}", "HETJAX_TRANSPORT": transport}
    if with_key:
        make_key(tmp_path / "key")
        flags["HETJAX_KEY"] = tmp_path / "key"
    codes, outputs = together(*launched(**flags))
    assert codes == [0, 0], outputs
    for k in range(2):
        assert f"{k} 2 the launcher {transport} 3.0" in outputs[k]
    check_listening(outputs, host)
    trusted = "Messages between processes are neither encrypted nor authenticated: this network is trusted."
    assert [trusted in text for text in outputs] == [not with_key and not is_loopback(host), False]


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not installed")
def test_open_mpi_processes_compute_together(tmp_path):
    """Results are read from files: mpirun may interleave output lines."""
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    command = ["mpirun", *root, "--oversubscribe", "-np", "2", sys.executable, "-c", PROGRAM]
    port = free_port("127.0.0.1")
    given = environment(JAX_COORDINATOR_PORT=port, RESULTS=tmp_path)
    done = subprocess.run(command, env=given, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / str(k)).read_text() for k in range(2)] == ["0 2 ompi host 3.0", "1 2 ompi host 3.0"]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["host", "mesh"])
def test_a_failing_process_keeps_its_exit_code_and_the_other_does_not_hang(transport):
    flags = {"FAILS": 1, "HETJAX_TRANSPORT": transport}
    codes, outputs = together(*launched(**flags), limit=200)  # a hang would last for the wait limit, 600 s
    assert codes[1] == 7, outputs
    assert codes[0] != 0


# -- mistakes --


@pytest.fixture
def own_flags(monkeypatch):
    """`initialize` changes XLA_FLAGS; this restores them."""
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])


def test_an_unreachable_coordinator_is_reported(own_flags):
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    with pytest.raises(TimeoutError, match=f"The coordinator {address} cannot be reached"):
        initialize(address, processes=2, process=1, start_limit=0.1)


def test_a_port_in_use_is_reported(own_flags):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(OSError, match=f"cannot listen on {address}: Address already in use"):
            initialize(address, processes=2, process=0)


def test_missing_processes_and_different_numbers_of_processes_are_reported():
    """Two runs at the same time: one whose process 1 never starts, one whose processes expect different numbers."""
    alone, _ = launched(LIMIT=2)
    first, second = launched()
    codes, outputs = together(alone, first, {**second, "HETJAX_PROCESSES": 3})
    assert codes == [2, 2, 2]
    assert "Not all 2 processes connected to 127.0.0.1:" in outputs[0]
    for k in (1, 2):
        assert "Process 1 differs from process 0 in its number of processes: 3 instead of 2." in outputs[k]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([{"transport": "mesh", "devices": "second"}, {"transport": "mesh", "devices": "cpu"}],
         "The transport 'mesh' needs devices of one kind, but the processes have cpu, second"),
        ([{"transport": "mesh"}, {"transport": "host"}],
         "Process 1 differs from process 0 in its transport: host instead of mesh"),
        ([{}, {"devices": "gpu+"}], "Process 1: devices is 'gpu\\+', in which a kind is missing"),
        ([{"transport": "pigeons"}, {}], "Process 0: Unknown transport 'pigeons'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_reported_on_all_sides(options, message, own_flags, monkeypatch):
    """Both processes in threads of this one: each is refused, and ends its carrier."""
    monkeypatch.setattr("hetjax.fleet.distributed.group", SimpleNamespace(link=lambda: None, join=lambda link: None))
    port = free_port("127.0.0.1")

    def error_of(process):
        with pytest.raises(ValueError, match=message) as error:
            initialize(f"127.0.0.1:{port}", 2, process, start_limit=20, **options[process])
        return str(error.value)

    with ThreadPoolExecutor(2) as pool:
        assert len(set(pool.map(error_of, range(2)))) == 1
    assert not [thread for thread in threading.enumerate() if "carrier" in thread.name]


def test_keys(tmp_path):
    path = tmp_path / "key"
    make_key(path)
    assert len(read_key(path)) == 40
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError, match="a key is never overwritten"):
        make_key(path)
    path.chmod(0o644)
    with pytest.raises(ValueError, match=r"Others can read the key in .*: run chmod 600"):
        read_key(path)
    with pytest.raises(OSError, match="cannot be read: No such file or directory"):
        read_key(tmp_path / "nowhere")
    for content in (b"", b"x" * 39, b"x" * 41, bytes([200]) * 40, b" " * 40, b"\0" * 40):
        (other := tmp_path / "other").write_bytes(content)
        other.chmod(0o600)
        with pytest.raises(ValueError, match="holds no key: make one with `python -m hetjax key"):
            read_key(other)
