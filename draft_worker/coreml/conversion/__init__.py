"""MLX weights to a Core ML package for the Neural Engine, in a process of its own.

Runs nothing that it builds.
"""
