"""Measures what this machine takes for a pair of models, in its own worker processes. `measure` is the way in."""
