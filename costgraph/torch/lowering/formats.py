"""Number formats of torch."""

from __future__ import annotations

import torch

from ...dtypes import DType
from ...errors import UnsupportedError

__all__ = ["FORMATS", "torch_dtype"]

#: torch's format for each that it has; tf32 is stored as fp32 is.
FORMATS: dict[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "fp8_e8m0": torch.float8_e8m0fnu,
    "complex128": torch.complex128,
    "complex64": torch.complex64,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}


def torch_dtype(place: str, dtype: DType) -> torch.dtype:
    """Return torch's format, or raise UnsupportedError where torch stores nothing like it."""
    if dtype.name not in FORMATS:
        raise UnsupportedError(f"{place}: torch has no tensors of {dtype.name}, expected one of {', '.join(FORMATS)}")
    return FORMATS[dtype.name]
