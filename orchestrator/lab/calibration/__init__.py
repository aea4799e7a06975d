"""Measures the forward times of a pair of models on this machine, in worker processes. `calibrate` is the entry."""
