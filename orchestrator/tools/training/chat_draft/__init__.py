"""Trains a draft for a chat model on the target's own answers; docs/draft-training.md is the recipe.

`gguf` converts the target, `prompts` makes the prompts, `write` lets the target answer them, `distil` trains the
draft, `measure` says how often it is right. Needs torch and safetensors (the extra `training`).
"""
