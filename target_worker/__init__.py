"""The target worker, a process of its own: verifies token trees and adds one token of its own to each.

Imports neither the draft worker nor the orchestrator.
"""

import protocol.inference  # noqa: F401  # pyright: ignore[reportUnusedImport] - before MLX and mlx-lm
