"""Progress, trackers, run report and plots."""

from hetjax.watch.display import Display
from hetjax.watch.hooks import Follow, Progress
from hetjax.watch.jsonl import JsonlTracker, write_json
from hetjax.watch.run_folder import read_run
from hetjax.watch.run_report import Report, report
from hetjax.watch.tensorboard import TensorBoardTracker
from hetjax.watch.tracker import Composite, Row, Tracker

__all__ = [
    "Composite",
    "Display",
    "Follow",
    "JsonlTracker",
    "Progress",
    "Report",
    "Row",
    "TensorBoardTracker",
    "Tracker",
    "read_run",
    "report",
    "write_json",
]
