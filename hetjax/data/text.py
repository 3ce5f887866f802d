"""Byte-level text for language models: windows of tokens, the tokens that follow, and a weight for each."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hetjax.data.source import Description, RowSource, check_split


class TextSource(RowSource):
    """Consecutive windows of `window` bytes of a text.

    A sample has "tokens" [window], the bytes; "targets" [window], the bytes that come one later; and "weights"
    [window], 1 for a target that exists and 0 for the padding of the last window. A model learns from
    sum(weights * loss) and divides by sum(weights): every byte but the first is predicted exactly once.
    """

    def __init__(self, text: bytes, *, window: int = 128, name: str = "text"):
        if window < 1:
            raise ValueError(f"A window of {window} tokens is too short: give at least 1.")
        if len(text) < 2:
            raise ValueError(f"{name} has {len(text)} bytes: at least 2 are needed, to predict one from the other.")
        self.text = np.frombuffer(text, np.uint8)
        self.window = window
        self.description = Description(name, (window,), vocab=256)

    def __len__(self) -> int:
        return -(-(len(self.text) - 1) // self.window)

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        position_BxT = self.checked_indices(indices)[:, None] * self.window + np.arange(self.window)
        last = len(self.text) - 1
        return {
            "tokens": self.text[np.minimum(position_BxT, last)].astype(np.int32),
            "targets": self.text[np.minimum(position_BxT + 1, last)].astype(np.int32),
            "weights": (position_BxT < last).astype(np.float32),
        }


def text_source(
    file: str | Path | None = None, split: str = "train", *, window: int = 128, test_share: float = 0.1
) -> TextSource:
    """Windows of a file, or of the built-in text without one; the last tenth of the bytes is the test split."""
    check_split(split)
    if file is None:
        content, name = builtin_text(), "built-in text"
    else:
        path = Path(file)
        if not path.is_file():
            raise FileNotFoundError(
                f"There is no text file {path}. Give text:FILE the path of any file, or plain text."
            )
        content, name = path.read_bytes(), str(path)
    cut = len(content) - max(2, int(len(content) * test_share))
    if cut < 2:
        raise ValueError(f"{name} has {len(content)} bytes, too few for a training and a test split of 2 bytes each.")
    return TextSource(content[:cut] if split == "train" else content[cut:], window=window, name=name)


def builtin_text() -> bytes:
    """The language reference that comes with Python for its help(): some 450 kB of English, differing by version."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics)).encode()
