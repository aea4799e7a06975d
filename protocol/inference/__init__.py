"""A token tree through an unchanged mlx-lm model in one forward: positions, masks, layer caches.

Knows no sampling, messages or time. Every process of ours that computes with MLX imports this package before mlx-lm.
"""

from protocol.kernels_folder import use_private_kernels
from protocol.processes import keep_descriptor_limit

use_private_kernels()
keep_descriptor_limit()
