"""Compares our strategies with mlx-lm's own code, interleaved in one run. `trials` runs, `report` shows.

Only programs that run as processes of their own import MLX.
"""
