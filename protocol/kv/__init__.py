"""KV outside a forward: shared-memory arenas, blocks between machines, prefix caches and their sharing.

Imports no MLX: rows are numpy arrays.
"""
