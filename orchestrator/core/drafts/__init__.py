"""All drafts of a pipeline: which one is active, which one is on trial, what outlives a draft's process. Pure.

Nothing here changes tokens, only speed.
"""
