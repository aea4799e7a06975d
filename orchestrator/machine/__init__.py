"""What this machine has: checkpoints, converted drafts, device profiles, hardware facts, addresses.

Starts no pipeline.
"""
