"""`launch-pipeline chat`: a conversation in the terminal.

Uses the pipeline only as a client does.
"""
