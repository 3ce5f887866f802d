"""Datasets, host batches, and the prefetching of rows for workers."""

from hetjax.data.catalog import digits_source, load, synthetic_source
from hetjax.data.files import idx_source, npz_source
from hetjax.data.memory import MemorySource, labeled_images
from hetjax.data.source import Batch, Description, RowSource, Source, fetch
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
    "labeled_images",
    "load",
    "npz_source",
    "synthetic_source",
    "text_source",
]
