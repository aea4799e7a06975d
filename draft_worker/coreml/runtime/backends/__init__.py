"""What runs a package: Core ML, or the executor in MLX."""
