"""The draft worker: grows token trees ahead of the target, in a process of its own.

Imports neither the target worker nor the orchestrator.
"""
