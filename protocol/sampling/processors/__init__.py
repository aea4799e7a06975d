"""What changes logits before a token is sampled. `logits_processors` has the ordered list of all processors.

The result for a node depends on the request and on the node's own path alone, so target and draft agree on it.
"""
