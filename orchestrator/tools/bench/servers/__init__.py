"""The same requests to `launch-pipeline serve` and to `mlx_lm.server`, side by side."""
