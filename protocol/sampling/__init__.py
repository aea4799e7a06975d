"""From logits to a token: logits processors, filters, grammars, the shared noise.

Row by row: the result for a node depends on its own path alone. Nothing here knows models, caches or messages' flow.
"""
