"""Compares our strategies with mlx-lm's own code, interleaved in one run. `trials` runs, `table` shows.

Only the processes in `baseline` and `micro` import MLX.
"""
