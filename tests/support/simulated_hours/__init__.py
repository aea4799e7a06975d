"""Simulated hours of faults, and the invariants that must hold after every event.

All randomness comes from one seed, so any hour can be replayed.
"""
