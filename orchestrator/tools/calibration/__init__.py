"""Measures what this machine takes for a pair of models, in its own worker processes. `calibrate` is the way in."""
