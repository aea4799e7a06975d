"""What every worker process has around its logic: the message loop, tracing, replay, pacing.

Nothing here knows what a worker computes.
"""
