"""A target's KV on disk, in files of its own, if no arena holds it.

Rows of full attention are kept in chunks of tokens, which turns of a conversation share. What can't be cut to any
token (recurrent states, rows of windows) is kept as snapshots behind some tokens.
"""
