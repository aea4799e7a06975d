"""What the processes share: messages, transport, KV in shared memory, token trees, sampling, MLX inference.

Imports none of the other three packages. Code belongs here only if two of them use it.
"""
