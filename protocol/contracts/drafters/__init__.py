"""Trained drafters, as their config.json and the headers of their weights describe them. Knows no MLX.

`detection` finds the kind; a module for each published format reads what is particular to it.
"""
