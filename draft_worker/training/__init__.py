"""Trains drafters on a target's own answers, in MLX. Knows no pipeline, trees or messages.

`answers` lets the target answer prompts, `states` records its hidden states, `loop` trains a drafter of one of the
`kinds`, and `held_out` measures it.
"""
