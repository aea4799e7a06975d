"""The orchestrator's state machine: events and the time in, commands out.

Pure: no sockets, clocks, threads, randomness, MLX or numpy.
"""
