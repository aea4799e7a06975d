"""The target's KV on disk, in files that a later start takes up.

Rows of full attention are kept in chunks of tokens, which turns of a conversation share. What can't be cut to any
token (recurrent states, rows of windows) is kept as snapshots behind some tokens.
"""
