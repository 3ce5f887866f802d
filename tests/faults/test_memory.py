"""One of two processes really runs out of memory: it goes on in smaller microbatches, and the run stays the same."""

import json
from pathlib import Path

import memory_program
import numpy as np
import pytest
from problems import distance

pytestmark = pytest.mark.slow


def test_a_process_out_of_memory_goes_on_in_smaller_microbatches(sandbox, monkeypatch):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")  # further ones reserve 64 MiB of address space per thread
    program = Path(memory_program.__file__)
    code, lines, err = sandbox.run("--processes", 2, "--", program, sandbox.folder)
    assert code == 0, (lines, err)
    there = [json.loads((sandbox.folder / f"{process}.json").read_text()) for process in (0, 1)]
    free = there[0]["free"]
    for results in there:
        limited = results["limited"]
        np.testing.assert_allclose(limited["losses"], free["losses"], rtol=1e-5)
        for name, values in free["params"].items():
            assert distance(limited["params"][name], values) <= 1e-5
        assert limited["samples"] == free["samples"]
        assert limited["counts"] == free["counts"]  # plans are those that all processes agreed on
    exhausted = [[line for line in results["messages"] if "ran out of memory" in line] for results in there]
    assert exhausted[0] == []
    (message,) = exhausted[1]  # later steps keep to the limit
    large, small = memory_program.LARGE, memory_program.SMALL
    assert message.startswith("Worker 1 (")
    assert f"ran out of memory with a microbatch of {large} rows" in message
    assert f"computes at most {small} rows at a time. Plans still assume the larger ones" in message
