"""`launch-pipeline launch`: the server that a program of others asks, found or started for it.

The programs themselves are in `orchestrator.tools.agents`.
"""
