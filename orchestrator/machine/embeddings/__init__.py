"""Embedding models: a process that computes vectors of texts with mlx-embeddings, in an environment of its own."""
