"""From logits to a token: logits processors, filters, grammars, the shared noise.

Works row by row: the result for a node depends on its own path alone. Knows no models, caches or message flow.
"""
