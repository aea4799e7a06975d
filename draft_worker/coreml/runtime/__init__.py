"""Runs a converted package: Core ML on a Mac, an executor in MLX anywhere; slots and caches of its sequences.

Knows neither sampling nor messages.
"""
