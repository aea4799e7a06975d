"""Tests as laws, in folders that mirror the packages."""

import os

# Before MLX is imported: an M5 and CUDA otherwise multiply float32 in 19 bits (MLX, mlx/utils.h, enable_tf32), and the
# tests compare logits in float32.
os.environ["MLX_ENABLE_TF32"] = "0"
