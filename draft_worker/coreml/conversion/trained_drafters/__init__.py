"""Converts trained drafters, which read a target's features, and compares them with MLX."""
