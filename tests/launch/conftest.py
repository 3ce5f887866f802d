import pytest
from launching import nothing_left


@pytest.fixture
def place(tmp_path):
    with nothing_left(tmp_path) as place:
        yield place
