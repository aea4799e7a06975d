"""From a traced run to figures: rounds, overlap, what the target waits for. Pure.

Starts no process and draws nothing.
"""
