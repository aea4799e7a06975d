"""mlx-lm's own decoding as the baseline, in a process of its own.

Only `process` and `paced_network` import MLX, and only that process imports them.
"""
