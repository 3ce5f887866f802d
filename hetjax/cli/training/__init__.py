"""Runs of `hetjax train`: flags, what they build, what a run writes."""
