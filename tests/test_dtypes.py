import ctypes
import itertools
import math
from fractions import Fraction
from statistics import NormalDist

import numpy as np
import pytest
from each import each

import costgraph as cg
from costgraph.dtypes import (
    ALIASES,
    DTYPES,
    DType,
    bits_per_element,
    dtype,
    promote,
)
from costgraph.errors import FormatError

# name -> torch's name; the dtypes known to torch's finfo or iinfo
TORCH_FLOATS = {
    "fp64": "float64",
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "fp8_e8m0": "float8_e8m0fnu",
}
TORCH_COMPLEX = {name: name for name in ("complex64", "complex128")}
TORCH_INTS = {name: name for name in ("int64", "int32", "int16", "int8", "uint8")}


@each(("name", "other"), TORCH_FLOATS.items())
def test_ranges_match_torch(name, other):
    torch = pytest.importorskip("torch")
    info = torch.finfo(getattr(torch, other))
    ours = dtype(name)
    assert ours.bits == info.bits
    assert float(ours.max) == info.max
    assert float(ours.smallest_normal) == info.smallest_normal
    assert float(ours.epsilon) == info.eps
    if name != "fp8_e8m0":  # for an unsigned format, torch prints the negated maximum
        assert float(ours.min) == info.min


@pytest.mark.parametrize("name", TORCH_COMPLEX)
def test_complex_dtypes_have_two_components(name):
    torch = pytest.importorskip("torch")
    info, ours = torch.finfo(getattr(torch, name)), dtype(name)
    assert ours.bytes == getattr(torch, name).itemsize == 2 * dtype(ours.element).bytes
    assert (float(ours.max), float(ours.epsilon)) == (info.max, info.eps)  # for each component
    assert (ours.max, ours.round(0.1)) == (dtype(ours.element).max, dtype(ours.element).round(0.1))


@each("name", TORCH_INTS)
def test_integer_ranges_match_numpy(name):
    info = np.iinfo(name)
    assert (dtype(name).bits, dtype(name).max, dtype(name).min) == (info.bits, info.max, info.min)


@each(("name", "other"), [("fp16", "float16"), ("fp32", "float32"), ("fp64", "float64")])
def test_ieee_ranges_match_numpy(name, other):
    info = np.finfo(other)
    ours = dtype(name)
    assert (ours.exponent, ours.mantissa) == (info.nexp, info.nmant)
    assert Fraction(float(info.smallest_subnormal)) == ours.smallest_subnormal
    assert Fraction(float(info.max)) == ours.max


@each(
    ("name", "exponent", "mantissa", "largest", "normal", "subnormal"),
    [
        # exponent bits 1-e-m; the largest value derived by hand
        ("tf32", 8, 10, (2 - 2**-10) * 2.0**127, 2.0**-126, 2.0**-136),
        ("bf16", 8, 7, (2 - 2**-7) * 2.0**127, 2.0**-126, 2.0**-133),
        ("fp8_e4m3", 4, 3, 448, 2**-6, 2**-9),  # S.1111.110 = 1.75 * 2**8; 1111.111 is NaN
        ("fp8_e5m2", 5, 2, 57344, 2**-14, 2**-16),  # S.11110.11 = 1.75 * 2**15
        ("fp6_e2m3", 2, 3, 7.5, 1, 0.125),  # 1.875 * 2**2, MX v1.0 table 3
        ("fp6_e3m2", 3, 2, 28, 0.25, 0.0625),  # 1.75 * 2**4, MX v1.0 table 3
        ("fp4_e2m1", 2, 1, 6, 1, 0.5),  # 1.5 * 2**2, MX v1.0 table 5
        ("fp8_e8m0", 8, 0, 2.0**127, 2.0**-127, 2.0**-127),  # MX v1.0 table 7; 11111111 is NaN
    ],
)
def test_format_limits_derived_by_hand(name, exponent, mantissa, largest, normal, subnormal):
    ours = dtype(name)
    assert (ours.exponent, ours.mantissa) == (exponent, mantissa)
    assert ours.max == largest
    assert ours.smallest_normal == normal
    assert ours.smallest_subnormal == subnormal


@each(
    "name",
    [n for n, f in DTYPES.items() if f.kind == "float" and f.signed and not f.scale and not f.codes],
)
def test_bits_sum_to_sign_exponent_and_mantissa(name):
    ours = dtype(name)
    stored = 19 if name == "tf32" else ours.bits  # tf32 uses 19 of its 32 stored bits
    assert 1 + ours.exponent + ours.mantissa == stored


def test_bytes_per_element():
    expected = {
        "fp64": 8,
        "tf32": 4,
        "bf16": 2,
        "int8": 1,
        "bool": 1,
        "fp6_e2m3": Fraction(3, 4),
        "int4": Fraction(1, 2),
    }
    assert {name: dtype(name).bytes for name in expected} == expected


def test_small_integers_and_bool():
    assert (dtype("int4").min, dtype("int4").max) == (-8, 7)
    assert (dtype("bool").min, dtype("bool").max) == (0, 1)


@each("what", ["epsilon", "smallest_normal", "smallest_subnormal"])
def test_integers_have_no_epsilon(what):
    with pytest.raises(FormatError) as error:
        getattr(dtype("int8"), what)
    named = {
        "epsilon": what,
        "smallest_normal": "smallest normal value",
        "smallest_subnormal": "smallest subnormal value",
    }
    assert str(error.value) == f"int8: a format of kind 'int' has no {named[what]}; expected a float format"


def test_1e_8_underflows_in_fp16_but_not_bf16():
    assert dtype("fp16").round(1e-8) == 0  # below half of the smallest subnormal, 2**-25 = 2.98e-8
    assert dtype("bf16").round(1e-8) == 1.0011717677116394e-08


def samples(ours: DType) -> list[float]:
    """Sample values around every boundary of a format, and some in between."""
    base = [
        0.0,
        0.1,
        1.0,
        1 + float(ours.epsilon) / 2,
        1 + 1.5 * float(ours.epsilon),
        math.pi,
        100.3,
        1e-8,
        1e-40,
    ]
    edges = [float(ours.max), float(ours.smallest_normal), float(ours.smallest_subnormal)]
    base += [e * f for e in edges for f in (0.49, 0.5, 0.51, 0.75, 0.999, 1, 1.01)]
    random = np.random.default_rng(0)
    base += list(np.exp(random.uniform(math.log(float(ours.smallest_subnormal)), math.log(float(ours.max)), 200)))
    base = [float(np.float32(x)) for x in base if float(x) < 3.4e38]  # torch casts from fp32
    return base + [-x for x in base]


@each("name", ["fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2"])
def test_rounding_matches_torch(name):
    torch = pytest.importorskip("torch")
    ours = dtype(name)
    values = [x for x in samples(ours) if abs(x) <= ours.max]
    theirs = torch.tensor(values, dtype=torch.float32).to(getattr(torch, TORCH_FLOATS[name])).double().tolist()
    assert [ours.round(x) for x in values] == theirs


@each(
    ("name", "bits", "exponent", "mantissa"),
    [("fp4_e2m1", 4, 2, 1), ("fp6_e2m3", 6, 2, 3), ("fp6_e3m2", 6, 3, 2)],
)
def test_rounding_finds_the_nearest_code(name, bits, exponent, mantissa):
    bias = 2 ** (exponent - 1) - 1
    codes = []
    for e, m in itertools.product(range(2**exponent), range(2**mantissa)):
        lead = 1 if e else 0
        codes.append((lead + m / 2**mantissa) * 2.0 ** (max(e, 1) - bias))
    assert len(codes) == 2 ** (bits - 1)
    for x in np.linspace(0, float(dtype(name).max), 997):
        distance = min(abs(x - code) for code in codes)
        assert abs(dtype(name).round(float(x)) - x) == distance


def test_rounding_ties_to_even():
    # the codes of E2M1 are 0, 0.5, 1, 1.5, 2, 3, 4, 6
    assert [dtype("fp4_e2m1").round(x) for x in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)] == [
        0,
        1,
        1,
        2,
        2,
        4,
        4,
    ]
    assert [dtype("int8").round(x) for x in (0.5, 1.5, 2.5, -0.5, -1.5)] == [0, 2, 2, 0, -2]


def test_rounding_overflow():
    assert dtype("fp16").round(65519.9) == 65504
    assert dtype("fp16").round(65520.0) == math.inf  # half a step above the largest value, IEEE 754 4.3.1
    assert dtype("bf16").round(-3.4e38) == -math.inf
    assert dtype("fp64").round(1e308) == 1e308
    assert dtype("fp8_e4m3").round(-1e9) == -448
    assert dtype("fp8_e5m2").round(1e9) == 57344
    assert dtype("fp4_e2m1").round(math.inf) == 6
    assert dtype("fp16").round(-math.inf) == -math.inf
    assert dtype("int8").round(200.0) == 127
    assert dtype("uint8").round(-3.0) == 0
    assert dtype("bool").round(0.3) == 1
    assert dtype("fp8_e8m0").round(1e-45) == 2.0**-127
    assert dtype("fp8_e8m0").round(3.1) == 4


def test_rounding_keeps_nan_and_signed_zero():
    assert math.isnan(dtype("fp8_e4m3").round(math.nan))
    assert math.copysign(1, dtype("fp16").round(-1e-9)) == -1


@each(
    ("name", "x", "text"),
    [
        ("mxfp4", 1.0, "mxfp4: cannot round 1.0 alone, blocks share scales; expected a format without them"),
        ("int8", math.nan, "int8: cannot round nan, the format has none; expected a number"),
        ("fp4_e2m1", math.nan, "fp4_e2m1: cannot round nan, the format has none; expected a number"),
        (
            "fp8_e8m0",
            -2.0,
            "fp8_e8m0: cannot round -2.0, the format holds powers of two; expected a positive number",
        ),
    ],
)
def test_unsupported_rounding_raises(name, x, text):
    with pytest.raises(FormatError) as error:
        dtype(name).round(x)
    assert str(error.value) == text


@each(
    ("name", "block", "scale_bits", "tensor_bits", "bits"),
    [
        ("mxfp8", 32, 8, 0, 8.25),  # 8 + 8/32
        ("mxfp8_e5m2", 32, 8, 0, 8.25),
        ("mxfp6", 32, 8, 0, 6.25),
        ("mxfp6_e3m2", 32, 8, 0, 6.25),
        ("mxfp4", 32, 8, 0, 4.25),
        ("nvfp4", 16, 8, 32, 4.5),  # 4 + 8/16, and 32 bits once a tensor
        ("bf16", None, 0, 0, 16),
        ("int4", None, 0, 0, 4),
    ],
)
def test_block_formats_have_documented_scales(name, block, scale_bits, tensor_bits, bits):
    ours = dtype(name)
    assert (ours.block, ours.scale_bits, ours.tensor_bits) == (block, scale_bits, tensor_bits)
    assert bits_per_element(name) == bits


def _struct(**fields):
    """Return a GGUF C struct with the given field sizes in bytes; ggml_half takes two."""

    class Block(ctypes.Structure):
        _pack_ = 1
        _fields_ = [(name, ctypes.c_uint8 * n) for name, n in fields.items()]

    return Block


# llama.cpp, ggml/src/ggml-common.h: struct fields in bytes, QK_K = 256 and K_SCALE_SIZE = 12
STRUCTS = {
    "q4_0": (32, _struct(d=2, qs=16)),
    "q4_1": (32, _struct(dm=4, qs=16)),
    "q5_0": (32, _struct(d=2, qh=4, qs=16)),
    "q5_1": (32, _struct(dm=4, qh=4, qs=16)),
    "q8_0": (32, _struct(d=2, qs=32)),
    "q2_k": (256, _struct(scales=16, qs=64, dm=4)),
    "q3_k": (256, _struct(hmask=32, qs=64, scales=12, d=2)),
    "q4_k": (256, _struct(dm=4, scales=12, qs=128)),
    "q5_k": (256, _struct(dm=4, scales=12, qh=32, qs=128)),
    "q6_k": (256, _struct(ql=128, qh=64, scales=16, d=2)),
}


@each("name", STRUCTS)
def test_gguf_block_bytes_match_c_structs(name):
    elements, struct = STRUCTS[name]
    size = ctypes.sizeof(struct)
    assert bits_per_element(name) * elements == 8 * size
    with cg.Graph("g") as g:
        g.param("w", (7, 11 * elements), dtype=name)
    assert cg.param_bytes(g) == 7 * 11 * size


def test_partial_block_has_full_scales():
    with cg.Graph("g") as g:
        g.param("w", (3, 257), dtype="q4_k")
    # 3 rows, 257 elements each, 4 bits per element; 9 6-bit scales and minima, 2 16-bit pairs
    assert cg.param_bytes(g) == Fraction(3 * (257 * 4 + 9 * 12 + 2 * 32), 8)


def test_double_quantization_matches_qlora():
    """QLoRA (arXiv 2305.14314), section 3: 8/64 + 32/(64 * 256) bits per weight instead of 0.5 for fp32 scales."""
    assert bits_per_element("nf4_double") == 4 + Fraction(8, 64) + Fraction(32, 64 * 256)
    assert f"{float(bits_per_element('nf4_double') - 4):.3f}" == "0.127"
    assert bits_per_element("nf4_g64_fp32") == Fraction("4.5")
    for rows, row in ((4096, 11008), (5, 101)):
        with cg.Graph("g") as g:
            g.param("w", (rows, row), dtype="nf4_double")
        # blocks continue across row ends, as in the flattened array
        scales = len(range(0, rows * row, 64))
        wide = len(range(0, scales, 256))
        assert cg.param_bytes(g) == Fraction(rows * row, 2) + scales + 4 * wide + 4


def test_nf4_table_values():
    nf4 = dtype("nf4")
    assert (len(nf4.codes), nf4.min, nf4.max) == (16, -1, 1)
    assert [nf4.round(x) for x in (0.0, 0.03, 0.05, 9.0)] == [0.0, 0.0, 0.07958029955625534, 1.0]
    # half of the normal quantiles on either side, plus one above: appendix E
    normal = NormalDist()
    for sign, n in ((1, 8), (-1, 7)):
        top = 1 - (1 / 30 + 1 / 32) / 2
        drawn = [normal.inv_cdf(top + (0.5 - top) * i / n) for i in range(n)]
        own = sorted((c for c in map(float, nf4.codes) if c * sign > 0), key=abs, reverse=True)
        assert own == pytest.approx([sign * x / drawn[0] for x in drawn], abs=1e-6)
    with pytest.raises(FormatError, match=r"^nf4: a format of 16 given values has no epsilon$"):
        _ = nf4.epsilon
    with pytest.raises(FormatError, match=r"^x: codes \(.*\), expected at most 2\*\*bits in ascending order$"):
        DType("x", 1, "float", codes=(Fraction(1), Fraction(0)))


def test_block_tensor_bytes_follow_format_definition():
    nvfp4 = dtype("nvfp4")
    outer, inner = 3, 40  # three rows of 40: 60 bytes of elements, ceil(40/16) = 3 scales a row, one fp32
    scales = math.ceil(inner / nvfp4.block) * outer
    assert outer * inner * nvfp4.bytes + Fraction(scales * nvfp4.scale_bits + nvfp4.tensor_bits, 8) == 60 + 9 + 4


def test_block_format_elements_match_plain_formats():
    for block, plain in {
        "mxfp8": "fp8_e4m3",
        "mxfp8_e5m2": "fp8_e5m2",
        "mxfp6": "fp6_e2m3",
        "nvfp4": "fp4_e2m1",
    }.items():
        assert (dtype(block).bits, dtype(block).max) == (dtype(plain).bits, dtype(plain).max)
        assert all(scale.format in DTYPES for scale in dtype(block).scale)


def test_dtype_names_and_aliases():
    assert dtype("float") is dtype("fp32") is dtype(DTYPES["fp32"])
    assert {"float32", "half", "bfloat16", "fp8", "long", "e4m3"} <= set(ALIASES)
    assert set(ALIASES.values()) <= set(DTYPES)
    assert not set(ALIASES) & set(DTYPES)
    assert all(name == f.name for name, f in DTYPES.items())


@each(
    ("name", "hint"),
    [("bf61", "did you mean 'bf16'? "), ("BF16", "did you mean 'bf16'? "), ("zzz", ""), ("", "")],
)
def test_unknown_dtype_suggests_nearest_name(name, hint):
    with pytest.raises(FormatError) as error:
        dtype(name)
    assert str(error.value) == f"number format {name!r} is unknown: {hint}known are {', '.join(DTYPES)}"


def test_dtype_must_be_a_name():
    with pytest.raises(FormatError, match=r"number format 16: expected a name or a DType; known are fp64, "):
        dtype(16)


def test_promotion_matches_torch():
    torch = pytest.importorskip("torch")
    names = {k: v for k, v in TORCH_FLOATS.items() if "fp8" not in k} | TORCH_COMPLEX | TORCH_INTS | {"bool": "bool"}
    back = {getattr(torch, other): name for name, other in names.items()}
    for a, b in itertools.product(names, repeat=2):
        theirs = torch.promote_types(getattr(torch, names[a]), getattr(torch, names[b]))
        assert promote(a, b).name == back[theirs], (a, b)


@each(
    ("a", "b", "expected"),
    [
        ("fp8_e4m3", "bf16", "bf16"),
        ("mxfp4", "fp16", "fp16"),
        ("fp6", "fp64", "fp64"),
        ("mxfp4", "mxfp4", "mxfp4"),
        ("tf32", "fp32", "fp32"),
        ("tf32", "bf16", "tf32"),  # 8 exponent and 10 mantissa bits hold both
        ("int4", "int8", "int8"),
        ("int4", "uint8", "int16"),
        ("fp8_e5m2", "int64", "fp8_e5m2"),
        ("bool", "int4", "int4"),
    ],
)
def test_promotion_beyond_torch(a, b, expected):
    assert promote(a, b).name == promote(b, a).name == expected


@each(("a", "b"), [("fp8_e4m3", "fp8_e5m2"), ("mxfp4", "nvfp4"), ("fp4", "mxfp8")])
def test_narrow_floats_need_explicit_cast(a, b):
    with pytest.raises(FormatError) as error:
        promote(a, b)
    assert str(error.value) == (
        f"{dtype(a).name} with {dtype(b).name}: neither holds the values of the other; "
        "expected equal formats or one of 16 bits and more, cast one of the two first"
    )
