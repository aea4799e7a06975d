"""Transport between processes: the codec, ZeroMQ sockets with every limit set, hub and link.

Does not know what a message means.
"""
