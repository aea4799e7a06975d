"""Which engines there are, by the names that options and workers know them by."""

from typing import Literal

DraftEngineName = Literal["mlx", "coreml", "ngram", "none", "random"]
"""coreml is for the Neural Engine, and runs by an executor where there is none; random guesses blindly at the
cost of mlx: for measuring what a useless draft costs."""

TargetEngineName = Literal["mlx", "none"]
"""none: a target of another machine is waited for."""

PrefillEngineName = Literal["none", "mlx", "coreml", "guest"]
"""What reads prompts in a process of its own; guest: one of another machine, which is trusted with the text."""
