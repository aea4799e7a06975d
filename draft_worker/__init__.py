"""The draft: grows token trees ahead of the target, in its own process.

Imports neither the target worker nor the orchestrator.
"""
