"""The orchestrator process around the pure core: the event loop, clients, sessions, recording.

Adds sockets, clocks and processes to the core, and decides nothing about requests itself.
"""
