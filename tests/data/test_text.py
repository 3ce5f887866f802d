"""Text windows: every byte but the first is predicted exactly once, whatever the window."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax.data import TextSource, fetch, load, text_source


@given(st.binary(min_size=2, max_size=200), st.integers(1, 50))
@settings(max_examples=60, deadline=None)
def test_every_byte_but_the_first_is_a_target_once(text, window):
    source = TextSource(text, window=window)
    batch = fetch(source, np.arange(len(source)))
    real = batch["weights"] == 1
    assert set(np.unique(batch["weights"])) <= {0.0, 1.0}
    assert bytes(batch["targets"][real].astype(np.uint8)) == text[1:]
    assert bytes(batch["tokens"][real].astype(np.uint8)) == text[:-1]
    assert real.any(axis=1).all()


def test_a_file_and_its_split(tmp_path):
    file = tmp_path / "poem.txt"
    file.write_bytes(b"abcdefghij" * 100)
    train, test = (load(f"text:{file}", split, window=16) for split in ("train", "test"))
    assert bytes(train.text) + bytes(test.text) == file.read_bytes()
    assert len(test.text) == 100
    assert train.description.vocab == 256
    assert train.description.input_shape == (16,)


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.txt"):
        text_source(tmp_path / "nothing.txt")
    (tmp_path / "short.txt").write_bytes(b"abc")
    with pytest.raises(ValueError, match=r"short\.txt has 3 bytes"):
        text_source(tmp_path / "short.txt")
    with pytest.raises(ValueError, match="window of 0"):
        text_source(window=0)


def test_the_builtin_text_is_long_enough_to_train_on():
    assert len(load("text").text) > 100_000
