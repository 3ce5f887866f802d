"""Simulated speeds: workers of unequal speed on equal devices, with padding charged."""
