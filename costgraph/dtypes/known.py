"""The formats that there are, by their names and by the other names that they have.

Sources: IEEE 754-2019 (fp64, fp32, fp16); Wang and Kanwar 2019 for bf16; NVIDIA A100 whitepaper for tf32;
OCP 8-bit Floating Point Specification (OFP8) 1.0 for E4M3 and E5M2; OCP Microscaling Formats (MX) 1.0 for
fp6, fp4, E8M0 and the formats with a scale for 32 elements; NVIDIA's description of NVFP4 (E2M1, an E4M3
scale for 16 elements and one fp32 scale for the tensor); Dettmers et al. 2023, arXiv 2305.14314, section 3 and
appendix E for NF4 and its double quantization; llama.cpp's ggml/src/ggml-common.h (structs block_q4_0 to block_q6_K)
for the formats of GGUF files.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from types import MappingProxyType

from .record import BlockScale, DType

__all__ = ["ALIASES", "DTYPES"]


def _mx(name: str, bits: int, exponent: int, mantissa: int, specials: str) -> DType:
    return DType(name, bits, "float", exponent, mantissa, True, specials, (BlockScale(8, 32, "fp8_e8m0"),))


def _gguf(name: str, bits: int, *shared: tuple[int, int, str], signed: bool = True) -> DType:
    return DType(name, bits, "int", signed=signed, scale=tuple(BlockScale(*facts) for facts in shared))


# quantiles of the normal distribution, scaled to reach from -1 to 1
_NF4 = tuple(
    Fraction(code)
    for code in (
        "-1", "-0.6961928009986877", "-0.5250730514526367", "-0.39491748809814453", "-0.28444138169288635",
        "-0.18477343022823334", "-0.09105003625154495", "0", "0.07958029955625534", "0.16093020141124725",
        "0.24611230194568634", "0.33791524171829224", "0.44070982933044434", "0.5626170039176941",
        "0.7229568362236023", "1",
    )
)  # fmt: skip
# a scale in 8 bits for 64 elements, one in fp32 for 256 of those scales, and the mean that was taken from them
_DOUBLE = (
    BlockScale(8, 64, "fp8_e4m3", flat=True), BlockScale(32, 64 * 256, "fp32", flat=True), BlockScale(32, None, "fp32"),
)  # fmt: skip

_FORMATS = (
    DType("fp64", 64, "float", 11, 52),
    DType("fp32", 32, "float", 8, 23),
    DType("tf32", 32, "float", 8, 10),  # 19 bits take part in a product, the memory holds 32
    DType("fp16", 16, "float", 5, 10),
    DType("bf16", 16, "float", 8, 7),
    DType("fp8_e4m3", 8, "float", 4, 3, specials="nan"),
    DType("fp8_e5m2", 8, "float", 5, 2),
    DType("fp8_e8m0", 8, "float", 8, 0, signed=False, specials="nan"),
    DType("fp6_e2m3", 6, "float", 2, 3, specials="none"),
    DType("fp6_e3m2", 6, "float", 3, 2, specials="none"),
    DType("fp4_e2m1", 4, "float", 2, 1, specials="none"),
    DType("complex128", 128, "complex", 11, 52, element="fp64"),
    DType("complex64", 64, "complex", 8, 23, element="fp32"),
    DType("int64", 64, "int"),
    DType("int32", 32, "int"),
    DType("int16", 16, "int"),
    DType("int8", 8, "int"),
    DType("uint64", 64, "int", signed=False),
    DType("uint32", 32, "int", signed=False),
    DType("uint16", 16, "int", signed=False),
    DType("uint8", 8, "int", signed=False),
    DType("int6", 6, "int"),
    DType("uint6", 6, "int", signed=False),
    DType("int4", 4, "int"),
    DType("uint4", 4, "int", signed=False),
    DType("bool", 8, "bool"),
    _mx("mxfp8", 8, 4, 3, "nan"),
    _mx("mxfp8_e5m2", 8, 5, 2, "ieee"),
    _mx("mxfp6", 6, 2, 3, "none"),
    _mx("mxfp6_e3m2", 6, 3, 2, "none"),
    _mx("mxfp4", 4, 2, 1, "none"),
    DType("nvfp4", 4, "float", 2, 1, True, "none", (BlockScale(8, 16, "fp8_e4m3"), BlockScale(32, None, "fp32"))),
    DType("nf4", 4, "float", specials="none", codes=_NF4),
    DType("nf4_double", 4, "float", specials="none", scale=_DOUBLE, codes=_NF4),
    # one block: a scale, and a minimum where elements are unsigned
    _gguf("q4_0", 4, (16, 32, "fp16")),
    _gguf("q4_1", 4, (16, 32, "fp16"), (16, 32, "fp16"), signed=False),
    _gguf("q5_0", 5, (16, 32, "fp16")),
    _gguf("q5_1", 5, (16, 32, "fp16"), (16, 32, "fp16"), signed=False),
    _gguf("q8_0", 8, (16, 32, "fp16")),
    # blocks of a super-block of 256, whose own scales, and minima, are multiples of one in fp16
    _gguf("q2_k", 2, (4, 16, "uint4"), (4, 16, "uint4"), (16, 256, "fp16"), (16, 256, "fp16"), signed=False),
    _gguf("q3_k", 3, (6, 16, "int6"), (16, 256, "fp16")),
    _gguf("q4_k", 4, (6, 32, "uint6"), (6, 32, "uint6"), (16, 256, "fp16"), (16, 256, "fp16"), signed=False),
    _gguf("q5_k", 5, (6, 32, "uint6"), (6, 32, "uint6"), (16, 256, "fp16"), (16, 256, "fp16"), signed=False),
    _gguf("q6_k", 6, (8, 16, "int8"), (16, 256, "fp16")),
)

DTYPES: Mapping[str, DType] = MappingProxyType({f.name: f for f in _FORMATS})
"""Every format by its name."""

_OTHER_NAMES = {
    "fp64": ("float64", "double"), "fp32": ("float32", "float"), "tf32": ("tfloat32",),
    "fp16": ("float16", "half"), "bf16": ("bfloat16",),
    "fp8_e4m3": ("fp8", "e4m3", "float8_e4m3fn"),
    "fp8_e5m2": ("e5m2", "float8_e5m2"),
    "fp8_e8m0": ("e8m0", "float8_e8m0fnu"),
    "fp6_e2m3": ("fp6", "e2m3"), "fp6_e3m2": ("e3m2",),
    "fp4_e2m1": ("fp4", "e2m1"),
    "complex128": ("cdouble",), "complex64": ("cfloat",),
    "int64": ("long",), "int32": ("int",), "int16": ("short",), "int8": ("char",), "uint8": ("byte",),
    "mxfp8": ("mxfp8_e4m3",), "mxfp6": ("mxfp6_e2m3",), "mxfp4": ("mxfp4_e2m1",),
}  # fmt: skip

ALIASES: Mapping[str, str] = MappingProxyType(
    {other: name for name, others in _OTHER_NAMES.items() for other in others}
)
"""Other names of the formats, torch's among them."""
