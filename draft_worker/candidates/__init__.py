"""From a draft's logits to candidate tokens: ranking, selection without a sort, prefetched noise.

Knows no trees, KV or messages.
"""
