"""Progress display, trackers, and the report of recorded runs."""

from hetjax.report.display import Display
from hetjax.report.hooks import Follow, Progress
from hetjax.report.page import ReportFiles, report
from hetjax.report.run_folder import read_run
from hetjax.report.trackers import Composite, JsonlTracker, TensorBoardTracker, Tracker, write_json

__all__ = [
    "Composite",
    "Display",
    "Follow",
    "JsonlTracker",
    "Progress",
    "ReportFiles",
    "TensorBoardTracker",
    "Tracker",
    "read_run",
    "report",
    "write_json",
]
