"""Progress, trackers, run report and plots."""

from hetjax.report.display import Display
from hetjax.report.hooks import Follow, Progress
from hetjax.report.jsonl import JsonlTracker, write_json
from hetjax.report.page import Report, report
from hetjax.report.run_folder import read_run
from hetjax.report.trackers import Composite, Row, TensorBoardTracker, Tracker

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
