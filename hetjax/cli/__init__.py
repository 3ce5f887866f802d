"""The commands of `python -m hetjax`."""
