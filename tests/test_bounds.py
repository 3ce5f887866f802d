"""CI tests the oldest versions that pyproject.toml admits, not others."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_oldest_versions_tested_are_the_lower_bounds():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["track"], *extras["tfds"]]
    bounds = dict(requirement.split(">=") for requirement in wanted if ">=" in requirement)
    pins = dict(re.findall(r"^([\w-]+)==(.+)$", (ROOT / ".ci/oldest.txt").read_text(), re.MULTILINE))
    assert pins.pop("jaxlib") == pins["jax"]
    newer = {"array-record"}  # of its old versions some Pythons have no wheel
    assert pins == {name: version for name, version in bounds.items() if name not in newer}
