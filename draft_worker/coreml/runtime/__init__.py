"""Runs a converted package with Core ML on a Mac, or with an executor in MLX anywhere; slots and caches.

Knows no sampling and no messages.
"""
