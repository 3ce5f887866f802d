"""Sources of samples, and the feeding of rows to workers."""

from hetjax.data.catalog import load
from hetjax.data.digits import digits_source
from hetjax.data.idx import idx_source
from hetjax.data.memory import MemorySource, labelled_images
from hetjax.data.npz import npz_source
from hetjax.data.source import Batch, Description, RowSource, Source, fetch
from hetjax.data.synthetic import synthetic_source
from hetjax.data.text import TextSource, text_source

__all__ = [
    "Batch",
    "Description",
    "MemorySource",
    "RowSource",
    "Source",
    "TextSource",
    "digits_source",
    "fetch",
    "idx_source",
    "labelled_images",
    "load",
    "npz_source",
    "synthetic_source",
    "text_source",
]
