"""Trains a small language model on a target's own answers, in MLX. Knows no pipeline, trees or messages.

`answers` lets the target answer prompts and records its last states, `loop` trains the drafter of `language`, and
`held_out` measures it.
"""
