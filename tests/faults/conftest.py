import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "launch"))  # its way to start the launcher and find what is left

from launching import nothing_left


@pytest.fixture
def place(tmp_path):
    with nothing_left(tmp_path) as place:
        yield place
