"""Converts MLX weights to a Core ML package for the Neural Engine, in a process of its own.

Does not run the packages that it builds.
"""
