"""Bytes between processes: the codec, ZeroMQ sockets with every limit set, addresses.

Nothing here knows what a message means.
"""
