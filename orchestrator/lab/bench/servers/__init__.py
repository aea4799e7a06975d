"""Sends the same requests to `launch-pipeline serve` and to `mlx_lm.server`, and compares the answers.

Measures no speed, except what a restart costs.
"""
