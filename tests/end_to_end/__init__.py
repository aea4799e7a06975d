"""Whole pipelines of real processes: tokens, kills, remote workers, clients over HTTP."""
