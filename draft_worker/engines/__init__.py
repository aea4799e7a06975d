"""The draft engines, one module each. `draft_worker.engine_interface` has their interface.

An engine knows neither messages nor growth plans.
"""
