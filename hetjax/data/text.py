"""Byte-level text for language models: windows of tokens, their next tokens, and a weight for each."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hetjax.data.source import Description, RowSource, check_split


class TextSource(RowSource):
    """Consecutive windows of `window` bytes of a text.

    A sample has "tokens" [window], the bytes; "targets" [window], the same shifted by one; and "weights" [window], 0
    for the padding of the last window and 1 elsewhere. The loss is sum(weights * loss) / sum(weights), in which every
    byte but the first is predicted exactly once.

    Args:
        text: The text, of at least 2 bytes.
        window: Tokens of a sample.
        name: Name of the dataset.

    Raises:
        ValueError: If the text or the window is too short.
    """

    def __init__(self, text: bytes, *, window: int = 128, name: str = "text"):
        if window < 1:
            raise ValueError(f"A window of {window} tokens is too short: expected at least 1.")
        if len(text) < 2:
            raise ValueError(f"{name} has {len(text)} bytes: expected at least 2, to predict one from the other.")
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
    """Read windows of a file, or of the built-in text.

    Args:
        file: Path of the file; None: the built-in text.
        split: "train" or "test".
        window: Tokens of a sample.
        test_share: Share of the bytes, the last ones, that is the test split.

    Returns:
        The source.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If there is no such split, or if the text is too short for two.
    """
    check_split(split)
    if file is None:
        content, name = builtin_text(), "built-in text"
    else:
        path = Path(file)
        if not path.is_file():
            raise FileNotFoundError(
                f"There is no text file {path}. Give text:FILE the path of any file, or use the built-in 'text'."
            )
        content, name = path.read_bytes(), str(path)
    cut = len(content) - max(2, int(len(content) * test_share))
    if cut < 2:
        raise ValueError(f"{name} has {len(content)} bytes, too few for a training and a test split of 2 bytes each.")
    return TextSource(content[:cut] if split == "train" else content[cut:], window=window, name=name)


def builtin_text() -> bytes:
    """Python's language reference, as shown by help(): about 450 kB of English, depending on the version."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics)).encode()
