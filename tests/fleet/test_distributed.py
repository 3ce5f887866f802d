"""Several processes: who is who by arguments, launcher, Slurm or Open MPI; real ones on loopback; what goes wrong."""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hetjax.fleet.distributed import ProcessInfo, detected_cluster, find_place
from hetjax.fleet.rendezvous import free_port, is_loopback, own_address_towards

ROOT = Path(__file__).parents[2]
SLURM = {"SLURM_JOB_ID": "4242", "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
LAUNCHER = {"HETJAX_COORDINATOR": "127.0.0.1:5000", "HETJAX_PROCESSES": "2", "HETJAX_PROCESS": "1"}
# Joins, adds the process numbers (from 1) of all in a collective, says on which addresses it listens, and leaves.
PROGRAM = """
import os, sys
from hetjax.fleet import initialize, leave
try:
    place = initialize(start_limit=float(os.environ.get("LIMIT", 60)), heartbeat_limit=5)
except (ValueError, OSError) as error:
    print("error:", error, flush=True)
    leave(2, together=False)
import jax
from jax.experimental.multihost_utils import process_allgather
ranks = process_allgather(jax.numpy.asarray(place.process + 1.0))
said = f"{place.process} {place.processes} {place.source} {ranks.sum()} {jax.device_count()}"
print(said, flush=True)
if "SAID" in os.environ:
    open(os.path.join(os.environ["SAID"], str(place.process)), "w").write(said)
if os.environ.get("LISTENS"):
    paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    inodes = {os.readlink(path) for path in paths if os.path.lexists(path)}
    for table in ("tcp", "tcp6"):
        for line in list(open(f"/proc/self/net/{table}"))[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                print("listens", fields[1].partition(":")[0], flush=True)
if os.environ.get("FAILS") == str(place.process):
    leave(7, together=False)
if "FAILS" in os.environ:
    process_allgather(jax.numpy.ones(3))
leave(0, together=True)
"""


def environment(**more):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_FLAGS", "HETJAX_", "SLURM_", "OMPI_"))}
    return {**kept, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **{k: str(v) for k, v in more.items()}}


def together(*environments, program=PROGRAM, limit=90):
    """The programs at the same time: exit codes and outputs."""
    command = [sys.executable, "-c", program]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = [subprocess.Popen(command, env=environment(**e), cwd=ROOT, **pipes) for e in environments]
    try:
        told = [process.communicate(timeout=limit)[0] for process in started]
        return [process.returncode for process in started], told
    finally:
        for process in started:
            process.kill()
            process.wait()


def told_to(processes=2, **more):
    """What the launcher would tell each of so many processes."""
    port = free_port("127.0.0.1")
    base = {"HETJAX_COORDINATOR": f"127.0.0.1:{port}", "HETJAX_PROCESSES": processes} | more
    return [{**base, "HETJAX_PROCESS": k} for k in range(processes)]


# -- who is who --


def test_a_single_process_needs_nothing():
    assert find_place(None, None, None, {}) == ProcessInfo()
    assert find_place(None, None, None, {**LAUNCHER, "HETJAX_PROCESSES": "1", "HETJAX_PROCESS": "0"}) == ProcessInfo()
    assert find_place("nowhere:1", 1, 0, {}) == ProcessInfo()
    assert ProcessInfo().first


def test_arguments_come_before_the_launcher():
    assert find_place(None, None, None, LAUNCHER) == ProcessInfo(1, 2, "127.0.0.1:5000", "the launcher")
    assert find_place("host:1", 4, 3, LAUNCHER) == ProcessInfo(3, 4, "host:1", "its arguments")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("host:1", 2, 2), "Process 2 of 2: processes are numbered from 0 to 1"),
        (("host:1", 2, -1), "Process -1 of 2"),
        (("host:1", 0, 0), "number of processes is 0"),
        (("host", 2, 0), "'host' is not HOST:PORT"),
        (("host:1", None, 0), "processes was not given"),
        ((None, 2, None), "coordinator and process was not given"),
    ],
)
def test_what_does_not_fit_is_refused(given, told):
    with pytest.raises(ValueError, match=told):
        find_place(*given, {})


def test_a_variable_that_is_no_number():
    with pytest.raises(ValueError, match="HETJAX_PROCESS is 'one': expected a whole number"):
        find_place(None, None, None, {**LAUNCHER, "HETJAX_PROCESS": "one"})


def test_slurm_says_all(monkeypatch):
    for name, value in {**SLURM, "SLURM_PROCID": "1", "SLURM_STEP_NODELIST": "node[07-09],x"}.items():
        monkeypatch.setenv(name, value)
    assert find_place(None, None, None, os.environ) == ProcessInfo(
        1, 2, "node07:61586", "slurm"
    )  # 4242 mod 4096 + 61440
    assert find_place("other:99", None, None, os.environ) == ProcessInfo(1, 2, "other:99", "slurm")
    assert find_place(None, None, None, {**os.environ, **LAUNCHER}).source == "the launcher"
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert find_place(None, None, None, os.environ) == ProcessInfo()


def test_open_mpi_5_has_to_be_told_where(monkeypatch):
    for name, value in {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"}.items():
        monkeypatch.setenv(name, value)
    assert find_place("host:1", None, None, os.environ) == ProcessInfo(2, 4, "host:1", "ompi")
    with pytest.raises(ValueError, match="mpirun -x HETJAX_COORDINATOR=HOST:PORT"):
        find_place(None, None, None, os.environ)
    monkeypatch.setenv("HETJAX_COORDINATOR", "host:2")
    assert find_place(None, None, None, os.environ) == ProcessInfo(2, 4, "host:2", "ompi")


def test_a_pod_is_no_cluster_by_itself(monkeypatch):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert detected_cluster(os.environ) is None


def test_a_pod_of_an_indexed_job_does_not_train_alone_by_mistake(monkeypatch):
    monkeypatch.setitem(sys.modules, "kubernetes", None)  # as if it were not installed
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "3")
    with pytest.raises(ValueError, match=r"pod 3 of an indexed job .* pip install 'jax\[k8s\]'"):
        find_place(None, None, None, os.environ)
    assert find_place(None, 1, None, os.environ) == ProcessInfo()
    assert find_place("host:1", 4, 3, os.environ).source == "its arguments"


# -- real processes --


def test_two_processes_compute_together_and_listen_on_loopback_only():
    codes, told = together(*told_to(LISTENS=1))
    assert codes == [0, 0], told
    assert "0 2 the launcher 3.0 2" in told[0]
    assert "1 2 the launcher 3.0 2" in told[1]
    listens = [line for text in told for line in text.splitlines() if line.startswith("listens")]
    assert len(listens) >= 3  # the coordinator, and the collectives of both
    assert all(line.endswith("0100007F") for line in listens)  # 127.0.0.1, also as part of an IPv6 address


def outside_address():
    """An address of this machine that is not loopback; None where it has none."""
    try:
        own = own_address_towards("198.51.100.1:9")  # nothing is sent
    except OSError:
        return None
    return None if is_loopback(own) else own


@pytest.mark.skipif(outside_address() is None, reason="this machine has loopback only")
def test_a_coordinator_on_another_address_listens_there_only():
    own = outside_address()
    codes, told = together(*told_to(LISTENS=1, HETJAX_COORDINATOR=f"{own}:{free_port(own)}"))
    assert codes == [0, 0], told
    listens = [line for text in told for line in text.splitlines() if line.startswith("listens")]
    assert len(listens) >= 3
    as_listed = "".join(f"{int(part):02X}" for part in reversed(own.split(".")))
    assert all(line.endswith(as_listed) for line in listens), listens


def test_slurm_for_real():
    """With the variables that srun sets; the port follows from the number of the job."""
    job = free_port("127.0.0.1") % 4096
    codes, told = together(*({**SLURM, "SLURM_JOB_ID": job, "SLURM_PROCID": k, "SLURM_LOCALID": k} for k in range(2)))
    assert codes == [0, 0], told
    assert "0 2 slurm 3.0 2" in told[0]
    assert "1 2 slurm 3.0 2" in told[1]


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not installed")
def test_open_mpi_for_real(tmp_path):
    """The processes answer in files: mpirun may mix their lines."""
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    command = ["mpirun", *root, "--oversubscribe", "-np", "2", sys.executable, "-c", PROGRAM]
    port = free_port("127.0.0.1")
    given = environment(JAX_COORDINATOR_PORT=port, SAID=tmp_path)
    done = subprocess.run(command, env=given, cwd=ROOT, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / str(k)).read_text() for k in range(2)] == ["0 2 ompi 3.0 2", "1 2 ompi 3.0 2"]


@pytest.mark.slow
def test_a_failing_process_ends_with_its_own_exit_code_and_the_other_does_not_hang():
    began = time.monotonic()
    codes, told = together(*told_to(FAILS=1))
    assert codes[1] == 7, told
    assert codes[0] != 0
    assert time.monotonic() - began < 40


# -- mistakes --


def test_nobody_at_the_meeting_point():
    began = time.monotonic()
    _, other = told_to(LIMIT=1)
    codes, told = together(other)
    assert codes == [2]
    assert f"The coordinator {other['HETJAX_COORDINATOR']} cannot be reached" in told[0]
    assert time.monotonic() - began < 20


def test_not_all_come():
    first, _ = told_to(LIMIT=2)
    codes, told = together(first)
    assert codes == [2]
    assert "Not all 2 processes came to 127.0.0.1:" in told[0]


def test_processes_that_were_told_different_numbers():
    first, second = told_to()
    codes, told = together(first, {**second, "HETJAX_PROCESSES": 3})
    assert codes == [2, 2]
    assert "Process 0 was told that there are 2 processes, process 1 that there are 3." in told[0]
    assert "Process 1 was told that there are 3 processes, process 0 that there are 2." in told[1]


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        codes, told = together({**told_to()[0], "HETJAX_COORDINATOR": f"127.0.0.1:{port}"})
    assert codes == [2]
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in told[0]
