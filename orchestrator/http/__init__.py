"""The HTTP server: a client of the pipeline, in a process of its own beside the orchestrator's.

What all APIs share is here; each API has a folder of its own.
"""
