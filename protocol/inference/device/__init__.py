"""Where MLX computes: processor or GPU, and the memory kept resident there."""
