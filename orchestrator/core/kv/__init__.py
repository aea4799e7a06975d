"""Which arena holds which tokens, and where a prompt is prefilled. Pure; opens no shared memory.

A shortcut only: any failure here costs a prefill, and no token.
"""
