"""The draft engines, one module each; `draft_worker.engine` is their interface.

An engine knows neither messages nor growth plans.
"""
