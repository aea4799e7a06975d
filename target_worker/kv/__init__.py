"""A target sequence's KV and shared memory: checkpoints written, arenas adopted.

Knows no requests and no message flow.
"""
