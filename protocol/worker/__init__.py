"""Everything around a worker's logic: the message loop, tracing, replay, pacing.

Does not know what a worker computes.
"""
