"""Converts MLX weights to a Core ML package for the Neural Engine, in a separate process.

Does not run the packages that it builds.
"""
