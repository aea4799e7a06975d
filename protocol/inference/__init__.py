"""A token tree through an unchanged mlx-lm model in one forward: positions, masks, layer caches.

Knows no sampling, messages or time.
"""
