"""Keys and values outside a forward: shared-memory arenas, blocks between machines, prefix index and prefix cache.

Nothing here imports MLX: rows are numpy arrays.
"""
