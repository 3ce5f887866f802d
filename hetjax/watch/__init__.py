"""Progress, trackers, run report and plots."""

from hetjax.watch.display import Display
from hetjax.watch.jsonl import JsonlTracker, write_json
from hetjax.watch.run_report import Report, report
from hetjax.watch.tensorboard import TensorBoardTracker
from hetjax.watch.tracker import Composite, Row, Tracker

__all__ = [
    "Composite",
    "Display",
    "JsonlTracker",
    "Report",
    "Row",
    "TensorBoardTracker",
    "Tracker",
    "report",
    "write_json",
]
