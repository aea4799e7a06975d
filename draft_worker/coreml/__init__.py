"""The draft on the Neural Engine: MLX weights to a Core ML package, and the same package run anywhere."""
