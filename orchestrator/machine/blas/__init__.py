"""The BLAS that MLX multiplies with on a Linux processor. Not MLX itself, and no models."""
