"""The draft engines, one module each. `draft_worker.engine` has their interface.

An engine knows neither messages nor growth plans.
"""
