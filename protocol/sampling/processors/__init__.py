"""The processors that change logits before a token is sampled. `logits_processors` has the ordered list.

The result for a node depends only on the request and the node's path, so target and draft agree on it.
"""
