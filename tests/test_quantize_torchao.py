"""torchao weight formats for bf16 matmuls: int8 per row, int4 in groups, and int4 tinygemm tiles."""

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
def test_int4_tiles_match_torch_packing(linear, group, n, k):
    """In torchao 0.18.0, `Int4TilePackedTo4dTensor.from_hp` pads to 1024 and 8, then packs with this torch op."""
    torch = pytest.importorskip("torch")
    rows, columns = up(n, 8), up(k, 1024)
    codes = torch.empty(rows, columns // 2, dtype=torch.uint8, device="meta")
    packed = torch.ops.aten._convert_weight_to_int4pack(codes, 8)
    scale_and_zero = torch.empty(columns // group, rows, 2, dtype=torch.bfloat16, device="meta")
    small = cg.quantize(linear, TINYGEMM.format(group))
    assert cg.param_bytes(small, N=n, K=k) == packed.nbytes + scale_and_zero.nbytes


def test_unpadded_int4_bytes(linear):
    # `Int4Tensor`: N * K / 2 codes, and a bf16 scale and zero point per row group, the last group short
    small = cg.quantize(linear, "int4_g64_bf16_zero_bf16")
    assert cg.param_bytes(small, N=67, K=256) == 67 * 128 + 67 * 4 * (2 + 2)
    assert cg.param_bytes(small, N=67, K=100) == 67 * 50 + 67 * 2 * (2 + 2)


def test_int8_per_row_bytes(linear):
    # `Int8Tensor` in torchao 0.18.0, for a bf16 weight (67, 256): int8 codes (67, 256) and zero points (67, 1), fp32
    # scales (67, 1)
    assert cg.param_bytes(cg.quantize(linear, "int8_row_fp32_zero"), N=67, K=256) == 67 * 256 + 67 * 4 + 67


def test_padding_is_read(linear):
    """For 5 rows of 100, a matmul reads 8 of 1024, with scales and zero points for 8 groups each."""
    small = cg.quantize(linear, TINYGEMM.format(128))
    stored = 8 * 512 + 8 * 8 * 4
    moved = cg.bytes_moved(small, B=3, N=5, K=100)
    assert moved == 3 * 100 * 2 + stored + 3 * 5 * 2
    assert run(small, B=3, N=5, K=100).peak == cg.peak_memory(small, B=3, N=5, K=100)
    assert cg.matmul_flops(small, B=3, N=5, K=100) == 2 * 3 * 5 * 100


def test_models_accept_torchao_formats():
    model = load("llama-2-7b")
    # 17/4 bits per weight; the second MLP matrix has 11264 columns instead of 11008
    names = ("int4_g128_bf16_zero_bf16", TINYGEMM.format(128))
    plain, tiles = (cg.param_bytes(cg.quantize(model, name)) for name in names)
    assert tiles - plain == 32 * 4096 * 256 * 17 // 32


def test_torchao_format_names():
    found = cg.dtype(TINYGEMM.format(128))
    assert (found.padded, [s.format for s in found.scale], found.element) == ((1024, 8), ["bf16", "bf16"], "uint4")
    assert cg.dtype("e4m3_g128_fp32_pad16x16").name == "fp8_e4m3_g128_fp32_pad16x16"
    assert cg.bits_per_element(found) == cg.bits_per_element("int4_g128_fp16_zero_fp16")
    for name in ("int4_g128_bf16_zero_int4", "int4_g128_bf16_pad0x8", "fp8_g128_fp32_zero_bf16", "int4_g128_bf16_pad8"):
        with pytest.raises(FormatError, match="is unknown"):
            cg.dtype(name)


def test_torchao_formats_survive_save_and_load(linear, tmp_path):
    small = cg.quantize(linear, TINYGEMM.format(64))
    cg.save(small, tmp_path / "small.json")
    assert cg.param_bytes(cg.load(tmp_path / "small.json")) == cg.param_bytes(small)
