"""What runs a package: Core ML, Core AI, or the executor in MLX."""
