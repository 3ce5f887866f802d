"""Simulated speeds: unlike workers on like devices, charged honestly."""
