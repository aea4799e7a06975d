"""Times forwards of random models, one for each kind of layer, beside mlx-lm's own caches."""
