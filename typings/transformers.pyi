# mlx-lm imports a few classes of transformers, whose thousand modules the type checker would otherwise read.
from typing import Any

def __getattr__(name: str) -> Any: ...
