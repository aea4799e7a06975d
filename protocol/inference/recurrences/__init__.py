"""Recurrences and short convolutions of mlx-lm's layers over all rows of a tree. Knows no layer cache and no model."""
