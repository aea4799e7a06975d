"""Tests what a pipeline promises to survive, with real processes and real faults.

Injects faults only into processes that it started.
"""
