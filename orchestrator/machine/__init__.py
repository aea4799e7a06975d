"""Facts about this machine: checkpoints, converted drafts, device profiles, hardware, addresses.

Starts no pipeline.
"""
