"""Measures this machine's times for a pair of models, in worker processes of its own. `calibrate` is the entry point.

Predicts nothing.
"""
