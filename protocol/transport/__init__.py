"""Bytes between processes: the codec, and ZeroMQ sockets with every limit set.

Knows no message's meaning.
"""
