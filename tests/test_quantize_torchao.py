"""Weights as torchao keeps them for products in bf16: int8 a row, int4 in groups, and in tiles of tinygemm."""

import pytest
from each import each
from shared import load

import costgraph as cg
from costgraph import FormatError
from costgraph.testing import run

B, N, K = cg.dims("B N K")
TINYGEMM = "uint4_g{}_bf16_zero_bf16_pad1024x8"


@pytest.fixture(scope="module")
def linear():
    with cg.Graph("linear", dtype="bf16") as g:
        g.output(cg.linear(g.input("x", (B, K)), "b k -> b n", n=N))
    return g


def up(size, multiple):
    return -(-size // multiple) * multiple


@each("group", [32, 64, 128, 256])
@each(("n", "k"), [(4096, 4096), (4096, 11008), (67, 2048), (8, 1280)])
def test_int4_in_tiles_is_what_torch_packs(linear, group, n, k):
    """`Int4TilePackedTo4dTensor.from_hp` of torchao 0.18.0 pads to 1024 and 8, then packs with this op of torch's."""
    torch = pytest.importorskip("torch")
    rows, columns = up(n, 8), up(k, 1024)
    codes = torch.empty(rows, columns // 2, dtype=torch.uint8, device="meta")
    packed = torch.ops.aten._convert_weight_to_int4pack(codes, 8)
    scale_and_zero = torch.empty(columns // group, rows, 2, dtype=torch.bfloat16, device="meta")
    small = cg.quantize(linear, TINYGEMM.format(group))
    assert cg.param_bytes(small, N=n, K=k) == packed.nbytes + scale_and_zero.nbytes


def test_int4_that_is_not_padded(linear):
    # `Int4Tensor`: N * K / 2 codes, and a scale and a zero point in bf16 for each group of a row, the last one short
    small = cg.quantize(linear, "int4_g64_bf16_zero_bf16")
    assert cg.param_bytes(small, N=67, K=256) == 67 * 128 + 67 * 4 * (2 + 2)
    assert cg.param_bytes(small, N=67, K=100) == 67 * 50 + 67 * 2 * (2 + 2)


def test_int8_of_a_row(linear):
    # `Int8Tensor` of torchao 0.18.0, of a weight of (67, 256) in bf16: codes (67, 256) and zero points (67, 1) in int8,
    # scales (67, 1) in fp32
    assert cg.param_bytes(cg.quantize(linear, "int8_row_fp32_zero"), N=67, K=256) == 67 * 256 + 67 * 4 + 67


def test_what_is_padded_is_read(linear):
    """Of 5 rows of 100 a product reads 8 of 1024, with scales and zero points of 8 groups each."""
    small = cg.quantize(linear, TINYGEMM.format(128))
    stored = 8 * 512 + 8 * 8 * 4
    moved = cg.bytes_moved(small, B=3, N=5, K=100)
    assert moved == 3 * 100 * 2 + stored + 3 * 5 * 2
    assert run(small, B=3, N=5, K=100).peak == cg.peak_memory(small, B=3, N=5, K=100)
    assert cg.matmul_flops(small, B=3, N=5, K=100) == 2 * 3 * 5 * 100


def test_a_model_takes_them():
    model = load("llama-2-7b")
    # 17/4 bits for each weight, and of the second matrix of the perceptron 11264 columns for 11008
    names = ("int4_g128_bf16_zero_bf16", TINYGEMM.format(128))
    plain, tiles = (cg.param_bytes(cg.quantize(model, name)) for name in names)
    assert tiles - plain == 32 * 4096 * 256 * 17 // 32


def test_names():
    found = cg.dtype(TINYGEMM.format(128))
    assert (found.padded, [s.format for s in found.scale], found.element) == ((1024, 8), ["bf16", "bf16"], "uint4")
    assert cg.dtype("e4m3_g128_fp32_pad16x16").name == "fp8_e4m3_g128_fp32_pad16x16"
    assert cg.bits_per_element(found) == cg.bits_per_element("int4_g128_fp16_zero_fp16")
    for name in ("int4_g128_bf16_zero_int4", "int4_g128_bf16_pad0x8", "fp8_g128_fp32_zero_bf16", "int4_g128_bf16_pad8"):
        with pytest.raises(FormatError, match="is unknown"):
            cg.dtype(name)


def test_they_are_written_and_read(linear, tmp_path):
    small = cg.quantize(linear, TINYGEMM.format(64))
    cg.save(small, tmp_path / "small.json")
    assert cg.param_bytes(cg.load(tmp_path / "small.json")) == cg.param_bytes(small)
