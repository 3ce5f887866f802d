"""Datasets, host batches, and the prefetching of rows for workers."""

from hetjax.data.catalog import digits_source, load
from hetjax.data.memory import MemorySource
from hetjax.data.source import Description, RowSource, Source, fetch
from hetjax.data.text import TextSource, text_source

__all__ = [
    "Description",
    "MemorySource",
    "RowSource",
    "Source",
    "TextSource",
    "digits_source",
    "fetch",
    "load",
    "text_source",
]
