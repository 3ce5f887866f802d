"""Fleets that cannot be: one sentence on every process, exit code 2, nothing left running."""

import pytest

pytestmark = pytest.mark.slow

TINY = ["--steps", "2", "--strategy", "equal", "--model", "mlp", "--width", "8", "--out", "run"]
TRAIN = """
import runpy
sys.path.insert(0, os.path.join(os.environ["PYTHONPATH"], "experiments"))
change = {0: FIRST, 1: SECOND}[rank]
os.environ.update(change.get("environment", {}))
sys.argv[1:] += change.get("flags", [])
print(f"pid {os.getpid()}", flush=True)
runpy.run_path(os.path.join(os.environ["PYTHONPATH"], "experiments", "train.py"), run_name="__main__")
"""

# what process 0 and process 1 are given, and what both say
CASES = {
    "no such kind": (
        {},
        {"flags": ["--devices", "gpu"]},
        "Process 1: There is no gpu that JAX can use here: it has cpu",
    ),
    "too many CPUs": (
        {"flags": ["--devices", "cpu:0,400"]},
        {},
        "Process 0: 401 devices were requested, but this CPU can be split",
    ),
    "nonsense": (
        {},
        {"environment": {"HETJAX_DEVICES": "gpu+"}},
        "Process 1: devices is 'gpu+', in which a kind is missing",
    ),
    "mesh over unlike kinds": (
        {"flags": ["--transport", "mesh", "--devices", "second"]},
        {"flags": ["--transport", "mesh"]},
        "The transport 'mesh' needs devices of one kind, but the processes have cpu, second",
    ),
    "other transports": (
        {"flags": ["--transport", "mesh"]},
        {"flags": ["--transport", "host"]},
        "Process 1 differs from process 0 in its transport: host instead of mesh",
    ),
    "memory of too many workers": (
        {},
        {"flags": ["--memory", "1e9,1e9,1e9"]},
        "Process 1: memory lists 3 numbers for 2 workers",
    ),
    "a senseless flag in one process": (
        {},
        {"flags": ["--wire", "int8", "--update", "replicated"]},
        "Process 1 differs from process 0 in its wire: int8 instead of float32",
    ),
    "other flags": (
        {},
        {"flags": ["--batch-size", "128"]},
        "Process 1 differs from process 0 in its batch size: 128 instead of 256",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_one_sentence_on_all_processes(sandbox, case):
    """The launcher gives the others time to say it as well: they end by themselves."""
    first, second, message = CASES[case]
    program = sandbox.program(TRAIN.replace("FIRST", repr(first)).replace("SECOND", repr(second)))
    code, _, err = sandbox.run("--grace", "20", "--", program, *TINY)
    assert code == 2, err
    errors = [line for line in err.splitlines() if "error:" in line]
    for process in (0, 1):
        own = [line for line in errors if line.startswith(f"[{process}]")]
        assert len(own) == 1, err
        assert message in own[0], err
