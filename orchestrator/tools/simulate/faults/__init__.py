"""Simulated hours full of faults, and what must hold after every event."""
