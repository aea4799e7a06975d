"""From a draft's logits to candidate tokens: ranking, selection without a sort, noise drawn ahead of need.

Nothing here knows trees, KV or messages.
"""
