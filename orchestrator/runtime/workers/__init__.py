"""All workers of a pipeline: its own processes, and the remote workers that attach from other machines.

Yields the core's events. Knows no requests.
"""
