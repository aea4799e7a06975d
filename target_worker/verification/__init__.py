"""Which proposed tokens are accepted: the proposed tree, coupled verification, rejection sampling, log-probabilities.

Knows logits and trees; no KV and no message flow.
"""
