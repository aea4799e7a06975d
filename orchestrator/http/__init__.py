"""The HTTP server: a client of the pipeline, in a process beside the orchestrator's.

The code that all APIs share is here; each API has a folder of its own. Nothing here decides on tokens.
"""
