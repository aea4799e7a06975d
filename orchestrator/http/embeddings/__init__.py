"""Vectors of texts by an embedding model, beside the models that generate."""
