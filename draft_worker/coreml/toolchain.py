"""Imports coremltools on first use, because the import takes a second, and without its warnings about libraries.

Its operation builder and its protobuf messages are made at run time, so a type checker can't see into them.
"""

import importlib
import logging
import os
from functools import cache
from typing import Any

from protocol.errors import InputError


class Toolchain:
    """The parts of coremltools that this package uses."""

    def __init__(self) -> None:
        # coremltools warns of each missing library; conversion and reading need none of them.
        logging.getLogger("coremltools").setLevel(logging.ERROR)
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        self.coremltools: Any = _import()
        self.program: Any = importlib.import_module("coremltools.converters.mil.mil")
        self.operations: Any = self.program.Builder
        self.types: Any = self.program.types
        self.uint4: Any = importlib.import_module("coremltools.converters.mil.mil.types.type_mapping").np_uint4_dtype
        self.model: Any = self.coremltools.proto.Model_pb2.Model
        """The protobuf message of a saved model."""
        self.decode_error: type[Exception] = importlib.import_module("google.protobuf.message").DecodeError
        self.data_type: Any = self.coremltools.proto.MIL_pb2.DataType


def _import() -> Any:
    try:
        return importlib.import_module("coremltools")
    except ImportError as error:
        raise InputError(
            f"coremltools can't be imported ({error}): it takes Python 3.11 to 3.13 on a Mac or on Linux x86-64; "
            "elsewhere use the MLX draft engine."
        ) from error


@cache
def toolchain() -> Toolchain:
    return Toolchain()
