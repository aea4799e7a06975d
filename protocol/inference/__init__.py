"""Token trees through stock mlx-lm models in one forward: positions, masks, layer caches.

Nothing here knows sampling, messages or time.
"""
