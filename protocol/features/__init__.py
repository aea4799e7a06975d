"""The target's hidden states outside a forward: feature rings in shared memory, and blocks between machines.

Imports no MLX: rows are numpy arrays.
"""
