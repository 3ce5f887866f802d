"""The commands of `hetjax`, or `python -m hetjax`."""
