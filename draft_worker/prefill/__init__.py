"""The prefill worker: prefills prompts in place of the target and offers their KV, in a process of its own.

Grows no token trees.
"""
