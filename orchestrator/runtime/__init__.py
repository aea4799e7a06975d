"""The orchestrator process around the pure core: the event loop, clients, sessions, recording.

The only layer with sockets and clocks.
"""
