"""Counts how often a draft engine guesses what a target wrote, by staleness and depth: for a bench.

It asks engines as the draft worker does, so it knows nothing of kinds of drafters.
"""
