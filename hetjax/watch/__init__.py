"""Progress, trackers, run report and plots."""
