"""GGUF files to folders that mlx-lm reads. Imports no MLX.

`container` reads the file, `architectures` names its tensors, `weights` packs them, `tokenizer` writes the tokenizer's
files, `folder` puts all of it together.
"""
