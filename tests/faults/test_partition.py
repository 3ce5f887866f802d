"""A network that breaks in two: the side with the rendezvous trains on, the other one makes no further step and ends.

Real carriers in network namespaces; only root may create these.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import quick_compiles
from launching import LIMIT, until

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

from benches.links import Links, LinksRefused

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("partition_program.py")
PORT = 29400


@pytest.fixture
def links():
    try:
        with Links(2) as found:
            yield found
    except LinksRefused as refused:
        pytest.skip(f"A network cannot be cut in two here. {refused}")
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert f"hetjax-{os.getpid()}-" not in left


class Side:
    """The programs on one side of the network."""

    def __init__(self, links, node, folder):
        self.prefix, self.node, self.folder, self.programs = links.command_prefix(node), node, folder, []

    def start(self, *arguments):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": quick_compiles.FLAGS}
        command = [*self.prefix, sys.executable, "-m", "hetjax", *map(str, arguments)]
        output = open(self.folder / f"output-{self.node}-{len(self.programs)}", "w+")  # noqa: SIM115
        started = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        self.programs.append((started, output))
        return started

    def members(self, *flags):
        log = self.folder / f"log-{self.node}"
        return self.start("launch", "--processes", 2, *flags, "--", PROGRAM, log, self.folder / "end")

    def rows(self):
        """The steps of both members."""
        log = self.folder / f"log-{self.node}"
        lines = log.read_text().splitlines(True) if log.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def output(self):
        return "".join(Path(output.name).read_text() for _, output in self.programs)

    def close(self):
        for program, output in self.programs:
            program.kill()
            program.wait()
            output.close()


def test_of_two_pairs_the_one_with_the_rendezvous_goes_on(links, tmp_path):
    rendezvous = f"{links.address(0)}:{PORT}"
    near, far = (Side(links, node, tmp_path) for node in range(2))
    try:
        served = near.start("rendezvous", "--bind", rendezvous, "--processes", 2, "--silent-limit", 5)
        first = near.members("--rendezvous", rendezvous)
        until(lambda: near.rows() or first.poll() is not None, "the first steps", LIMIT)
        second = far.members("--join", rendezvous)
        together = lambda: any(row["members"] == [0, 1, 2, 3] for row in far.rows())
        until(lambda: together() or second.poll() is not None, "all four members", LIMIT)
        assert (first.poll(), second.poll()) == (None, None), near.output() + far.output()
        links.cut(1)
        until(lambda: near.rows()[-1]["members"] == [0, 1], "the near side goes on", LIMIT)
        assert second.wait(LIMIT) == 1, far.output()
        alone = len(near.rows())
        until(lambda: len(near.rows()) >= alone + 20, "further steps of the near side", LIMIT)
        (tmp_path / "end").touch()
        assert (first.wait(LIMIT), served.wait(LIMIT)) == (0, 0), near.output()
    finally:
        near.close()
        far.close()
    assert "sent nothing for 15 s, and the rendezvous" in far.output()
    assert all(set(row["members"]) >= {0, 1} for row in far.rows())  # never without the others
    trained, losses = near.rows(), {}
    apart = min(row["step"] for row in trained if row["members"] == [0, 1] and row["step"] > far.rows()[0]["step"])
    assert max(row["step"] for row in far.rows()) <= apart
    for row in trained + far.rows():  # a step that both have made is one step
        assert losses.setdefault(row["step"], (row["loss"], row["samples"])) == (row["loss"], row["samples"])
        assert not row["twice"]
