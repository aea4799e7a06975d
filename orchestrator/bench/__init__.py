"""Compares our strategies with mlx-lm's own code, interleaved in one run. `trials` runs, `table` shows."""
