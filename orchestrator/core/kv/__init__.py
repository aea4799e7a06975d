"""Which arena holds which tokens, and where a prompt is prefilled. Pure; opens no shared memory.

A shortcut only: whatever is wrong with it costs a prefill, and no token.
"""
