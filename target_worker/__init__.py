"""The target: verifies token trees and adds one token of its own, in its own process.

Imports neither the draft worker nor the orchestrator.
"""
