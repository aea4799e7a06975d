"""Trains a draft for a chat model on the target's own answers; docs/lab/draft-training.md is the recipe.

`prompts` makes the prompts, `write` lets the target answer them, `distil` trains the draft, `measure` says how often it
is right, `package` makes what is shipped. They need torch (the extra `training`).
"""
