"""The draft worker: grows token trees ahead of the target, in a process of its own.

Imports neither the target worker nor the orchestrator.
"""

import protocol.inference  # noqa: F401  # pyright: ignore[reportUnusedImport] - before MLX and mlx-lm
