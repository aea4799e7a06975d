"""Keys and values outside a forward: shared-memory arenas, blocks between machines, sharing of prefixes.

Nothing here imports MLX: rows are numpy arrays.
"""
