"""Simulated hours of faults, and what must hold after every event."""
