"""MLX's element types that shared memory can hold."""

import mlx.core as mx

from protocol.kv.arena_header import ElementType

ELEMENT_TYPES = {
    mx.float16: ElementType.FLOAT16,
    mx.bfloat16: ElementType.BFLOAT16,
    mx.float32: ElementType.FLOAT32,
}
