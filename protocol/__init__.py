"""What the processes share: messages, transport, KV in shared memory, token trees, sampling, MLX inference.

Imports nothing of the other three packages. A thing belongs here only if two of them use it.
"""
