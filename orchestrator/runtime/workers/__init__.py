"""All workers of a pipeline: its own processes, and those that attach from other machines.

Yields the core's events; knows no requests.
"""
