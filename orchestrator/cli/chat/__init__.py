"""`launch-pipeline chat`: a conversation in the terminal.

Knows the pipeline only as a client.
"""
