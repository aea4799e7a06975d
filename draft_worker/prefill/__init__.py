"""The prefill worker: reads prompts in place of the target and hands their KV on, in its own process.

It drafts nothing.
"""
