"""Devices: which ones, how they become workers, their memory, and programs compiled for them."""
