"""Token trees and how they grow: growth plans, calibration, prompt lookup. Pure.

The draft worker, the orchestrator and the simulator share this code. It knows no engine, socket or clock.
"""
