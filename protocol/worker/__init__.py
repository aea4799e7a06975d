"""What surrounds the logic of every worker process: the message loop, tracing, replay, pacing.

Does not know what a worker computes.
"""
