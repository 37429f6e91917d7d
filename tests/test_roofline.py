import math
import textwrap
from fractions import Fraction

import pytest
import sympy
from each import each

import costgraph as cg

H100 = "h100-sxm"
PEAK, VECTOR, BANDWIDTH = Fraction(9894, 10) * 10**12, Fraction(669, 10) * 10**12, Fraction(335, 100) * 10**12

TOML = """
name = "a device of one's own"
vendor = "nobody"
[sources]
HAND = "written for a test"
[peak]
bf16 = { value = 100, unit = "TFLOP/s", source = ["HAND"] }
fp32 = { value = 10, unit = "TFLOP/s", source = ["HAND"] }
[vector]
fp32 = { value = 10, unit = "TFLOP/s", source = ["HAND"] }
[memory]
capacity = { value = 8, unit = "GB", source = ["HAND"] }
bandwidth = { value = 1, unit = "TB/s", source = ["HAND"] }
[pcie]
x16_per_direction = { value = 10, unit = "GB/s", source = ["HAND"] }
"""


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(textwrap.dedent(TOML))
    return str(path)


def matmul(dtype="bf16"):
    N = cg.dims("N")
    with cg.Graph("matmul", dtype=dtype) as g:
        g.output(g.input("a", (N, N)) @ g.input("b", (N, N)))
    return g


def layer(dtype="bf16"):
    B, D, F = cg.dims("B D F")
    with cg.Graph("layer", dtype=dtype) as g:
        g.output(cg.einsum(g.input("x", (B, D)), g.param("w", (D, F)), "b d, d f -> b f"))
    return g


def mlp(dtype="bf16"):
    B, D, F = cg.dims("B D F")
    with cg.Graph("mlp", dtype=dtype) as g:
        h = cg.gelu(cg.linear(g.input("x", (B, D)), "b d -> b f", f=F, bias=True, name="up"))
        g.output(cg.softmax(cg.linear(h, "b f -> b d", d=D, name="down"), -1))
    return g


def attention(kernel="flash", window=None, dtype="bf16"):
    B, H, S, K, L = cg.dims("B H S K L")
    with cg.Graph("attention", dtype=dtype) as g:

        def body(x):
            return x + cg.attention(x, x, x, causal=True, window=window, kernel=kernel)

        g.output(cg.repeat(L, body, g.input("x", (B, H, S, K)), name="layers"))
    return g


def projected():
    """Build a projection and attention, so that S**2, S and a constant appear in one balance of times."""
    B, H, S, K = cg.dims("B H S K")
    with cg.Graph("projected", dtype="bf16") as g:
        q = cg.einsum(g.input("x", (B, H, S, K)), g.param("w", (K, K)), "b h s j, j k -> b h s k")
        g.output(cg.attention(q, q, q, causal=True))
    return g


# -- textbook values ---------------------------------------------------------------------------------------------


def test_ridge_point_of_h100_is_295():
    estimate = cg.roofline(matmul(), H100, N=1024)
    assert estimate.ridge == float(PEAK / BANDWIDTH)
    assert round(estimate.ridge) == 295


def test_relu_in_bf16_has_intensity_one_quarter():
    N = cg.dims("N")
    with cg.Graph("relu", dtype="bf16") as g:
        g.output(cg.relu(g.input("x", (N,))))
    # per element 1 FLOP, 2 bytes read and 2 written
    assert cg.intensity(g) == 0.25
    row = cg.roofline(g, H100, N=10**6).rows[0]
    assert (row.flops, row.bytes, row.intensity, row.bound) == (10**6, 4 * 10**6, 0.25, "memory")
    assert row.attainable == pytest.approx(float(BANDWIDTH / 4))
    assert cg.crossover(g, H100, "N") == math.inf


def test_dot_product_in_bf16_tends_to_one_half():
    N = cg.dims("N")
    with cg.Graph("dot", dtype="bf16") as g:
        g.output(cg.einsum(g.input("x", (N,)), g.input("y", (N,)), "n, n ->"))
    # 2n by the convention (a multiply and an add for each index point), 2n + 2n read, 2 written
    assert sympy.simplify(cg.intensity(g) - 2 * N / (4 * N + 2)) == 0
    assert sympy.limit(cg.intensity(g), N, sympy.oo) == sympy.Rational(1, 2)
    assert cg.roofline(g, H100, N=10**9).rows[0].intensity == pytest.approx(0.5)


def test_matrix_times_vector_in_bf16_tends_to_one():
    N = cg.dims("N")
    with cg.Graph("matvec", dtype="bf16") as g:
        g.output(cg.einsum(g.input("a", (N, N)), g.input("x", (N,)), "n m, m -> n"))
    # 2n^2 FLOPs over n^2 + n + n elements of 2 bytes
    assert sympy.simplify(cg.intensity(g) - 2 * N**2 / (2 * N**2 + 4 * N)) == 0
    assert cg.roofline(g, H100, N=10**5).rows[0].intensity == pytest.approx(1, rel=1e-4)


def test_square_matmul_in_bf16_has_intensity_n_over_3_and_turns_at_886():
    N = cg.dims("N")
    g = matmul()
    assert sympy.simplify(cg.intensity(g) - N / 3) == 0  # 2n^3 / (3 n^2 * 2 B)
    turn = cg.crossover(g, H100, "N")
    assert turn == pytest.approx(float(3 * PEAK / BANDWIDTH))
    assert round(turn) == 886
    assert [cg.roofline(g, H100, N=n).rows[0].bound for n in (886, 887)] == ["memory", "compute"]


def test_thin_layer_turns_where_the_batch_is_the_ridge_point():
    B, D, F = cg.dims("B D F")
    g = layer()
    # 2BDF / (2(BD + DF + BF)) tends to B for B << D, F
    assert sympy.limit(cg.intensity(g).subs({F: 4 * D}), D, sympy.oo) == B
    turn = cg.crossover(g, H100, "B")
    ridge = PEAK / BANDWIDTH
    # 2BDF/P = 2(BD + DF + BF)/W  <=>  B = r DF / (DF - r(D + F))
    expected = ridge.numerator * D * F / (ridge.denominator * D * F - ridge.numerator * (D + F))
    assert sympy.cancel(turn - expected) == 0
    assert cg.crossover(g, H100, "B", D=10**7, F=10**7) == pytest.approx(295.3, rel=1e-3)
    assert cg.crossover(g, H100, "B", D=512, F=512) == math.inf  # r(D + F) > DF


# -- rows by hand ------------------------------------------------------------------------------------------------


def test_rows_totals_and_times_by_hand(own):
    B, D, F = 64, 1024, 4096
    estimate = cg.roofline(mlp(), own, B=B, D=D, F=F)
    up, gelu, down, _ = estimate.rows
    assert (up.kind, gelu.kind, down.kind) == ("matmul", "pointwise", "matmul")
    assert up.flops == 2 * B * D * F + B * F  # the bias is in the kernel
    assert up.bytes == 2 * (B * D + D * F + F + B * F)
    # at 100 TFLOP/s on the matrix unit and 10 TFLOP/s on the vector unit
    assert up.compute_s == pytest.approx(2 * B * D * F / 100e12 + B * F / 10e12)
    assert up.memory_s == pytest.approx(up.bytes / 1e12)
    assert gelu.flops == 5 * B * F
    assert gelu.memory_s == pytest.approx(4 * B * F / 1e12)
    assert down.flops == 2 * B * F * D
    assert estimate.flops == cg.flops(mlp(), B=B, D=D, F=F) == sum(r.flops for r in estimate.rows)
    assert estimate.bytes == cg.bytes_moved(mlp(), B=B, D=D, F=F) == sum(r.bytes for r in estimate.rows)
    assert estimate.fused_bytes == cg.bytes_moved(mlp(), fused=True, B=B, D=D, F=F)
    assert estimate.estimate == pytest.approx(sum(max(r.compute_s, r.memory_s) for r in estimate.rows))
    matrix = 2 * 2 * B * D * F / 100e12
    vector = (estimate.flops - 4 * B * D * F) / 10e12
    assert estimate.lower_bound == pytest.approx(max(matrix, vector, estimate.fused_bytes / 1e12))
    assert estimate.ridge == 100
    assert estimate.rates == {"matmul bf16": 100e12, "vector": 10e12}
    assert estimate.bound == "memory"
    assert estimate.intensity == pytest.approx(estimate.flops / estimate.bytes)
    assert estimate.fused_intensity > estimate.intensity


def test_kernel_is_one_row_with_fused_ops(own):
    estimate = cg.roofline(attention(), own, B=1, H=2, S=128, K=64, L=3)
    kernel = next(r for r in estimate.rows if r.kind == "matmul")
    pairs = 128 * 129 // 2
    assert cg.matmul_flops(attention(), B=1, H=2, S=128, K=64, L=3) == 3 * 2 * 4 * 64 * pairs
    assert kernel.flops > 3 * 2 * 4 * 64 * pairs  # includes the softmax
    assert kernel.bytes == 3 * 2 * 2 * 128 * 64 * 2  # the fused qkv tensor and the result, 2-byte elements


def test_fp32_matmuls_share_vector_unit_if_rates_are_one(own):
    N = cg.dims("N")
    with cg.Graph("g", dtype="fp32") as g:
        g.output(cg.relu(g.input("a", (N, N)) @ g.input("b", (N, N))))
    estimate = cg.roofline(g, own, N=2048)
    # 2 n^3 and n^2 on one unit: they add up
    assert estimate.lower_bound == pytest.approx((2 * 2048**3 + 2048**2) / 10e12)


def test_equal_fp64_rates_do_not_imply_shared_unit():
    N = cg.dims("N")
    with cg.Graph("g", dtype="fp64") as g:
        g.output(cg.relu(g.input("a", (N, N)) @ g.input("b", (N, N))))
    h100 = cg.load_hardware(H100)
    assert h100.peak["fp64"].value == h100.vector["fp32"].value != h100.vector["fp64"].value
    assert cg.roofline(g, H100, N=4096).lower_bound == pytest.approx(2 * 4096**3 / float(VECTOR))


def test_views_take_no_time():
    N = cg.dims("N")
    with cg.Graph("views") as g:
        g.output(g.input("x", (N, N)).T)
    estimate = cg.roofline(g, H100, N=4)
    assert (estimate.rows, estimate.lower_bound, estimate.estimate, estimate.ridge) == ((), 0, 0, 0)
    assert estimate.intensity == estimate.fused_intensity == math.inf
    assert estimate.bound == "memory"


# -- transfers and collectives -----------------------------------------------------------------------------------


def test_transfer_is_one_stream_over_its_link(own):
    N = cg.dims("N")
    with cg.Graph("g", dtype="fp32") as g:
        g.output(cg.relu(cg.ops.transfer(g.input("x", (N,)))))
    estimate = cg.roofline(g, own, N=10**6)
    assert estimate.rows[0].bound == "link"
    assert estimate.rows[0].memory_s == pytest.approx(4e6 / 10e9)  # 4 MB over 10 GB/s, counted once
    assert estimate.rows[1].memory_s == pytest.approx(8e6 / 1e12)
    assert estimate.estimate == pytest.approx(4e6 / 10e9 + 8e6 / 1e12)
    assert estimate.lower_bound == pytest.approx(4e6 / 10e9)
    assert estimate.bound == "link"


def test_missing_link_is_refused(own):
    N = cg.dims("N")
    with cg.Graph("g") as g:
        g.output(cg.ops.transfer(g.input("x", (N,)), "network"))
    with pytest.raises(cg.SpecError, match=r"network\.per_direction is missing"):
        cg.roofline(g, own, N=8)


# -- errors ------------------------------------------------------------------------------------------------------


def test_named_fallback_replaces_missing_rate():
    g = matmul()
    v100 = cg.load_hardware("v100-sxm2-16gb")
    estimate = cg.roofline(g, v100, fallback="fp16", N=8192)
    assert estimate.rates == {"matmul bf16": float(v100.peak["fp16"].value)}
    assert estimate.rows[0].compute_s == pytest.approx(2 * 8192**3 / float(v100.peak["fp16"].value))
    assert cg.roofline(g, v100, fallback={"bf16": "fp16"}, N=8192).estimate == estimate.estimate
    with pytest.raises(cg.SpecError, match="nor one for its fallback"):
        cg.roofline(g, v100, fallback="fp8", N=64)


def test_unknown_names_are_refused():
    with pytest.raises(cg.BindingError, match="'Q' is not a dimension"):
        cg.roofline(layer(), H100, B=1, D=2, F=3, Q=4)


def test_unsolvable_crossovers_are_refused():
    g = layer()
    with pytest.raises(cg.BindingError, match="'Q', expected an unbound dimension among B, D, F"):
        cg.crossover(g, H100, "Q")
    with pytest.raises(cg.BindingError, match="'B', expected an unbound dimension"):
        cg.crossover(g, H100, "B", B=3)
    with pytest.raises(cg.GraphError, match="crossover: of is 3, expected a graph or an op"):
        cg.crossover(3, H100, "B")
    with pytest.raises(cg.UnsupportedError, match=r"no closed form for S in .* expected sizes for B, H, K"):
        cg.crossover(projected(), H100, "S")


def test_crossover_of_empty_op():
    M, N = cg.dims("M N")
    with cg.Graph("views") as g:
        g.output(cg.relu(g.input("x", (M, N)).T))
    with pytest.raises(cg.GraphError, match="takes no time"):
        cg.crossover(g.ops[0], H100, "N")


# -- properties --------------------------------------------------------------------------------------------------

GRAPHS = {
    "matmul": (matmul, {"N": 300}),
    "matmul-fp32": (lambda: matmul("fp32"), {"N": 4000}),
    "layer": (layer, {"B": 7, "D": 300, "F": 5000}),
    "mlp": (mlp, {"B": 512, "D": 1024, "F": 4096}),
    "mlp-fp32": (lambda: mlp("fp32"), {"B": 1, "D": 11, "F": 13}),
    "flash": (attention, {"B": 2, "H": 8, "S": 2048, "K": 64, "L": 4}),
    "eager": (lambda: attention("eager"), {"B": 2, "H": 8, "S": 2048, "K": 64, "L": 4}),
    "window": (lambda: attention(window=cg.dims("W")), {"B": 1, "H": 2, "S": 999, "K": 32, "L": 2, "W": 100}),
}


@each("device", cg.list_hardware())
@each("name", GRAPHS)
def test_estimate_is_not_below_lower_bound(name, device):
    declare, sizes = GRAPHS[name]
    hardware = cg.load_hardware(device)
    # dtypes that a device lacks, on any unit it has
    stand_in = next(f for f in ("bf16", "fp16", "fp32", *hardware.peak) if f in hardware.peak)
    estimate = cg.roofline(declare(), hardware, fallback=stand_in, **sizes)
    assert 0 < estimate.lower_bound <= estimate.estimate * (1 + 1e-12)
    assert estimate.fused_bytes <= estimate.bytes
    for row in estimate.rows:
        assert row.seconds == max(row.compute_s, row.memory_s)
        assert row.attainable <= max(estimate.rates.values(), default=0) * (1 + 1e-12)
        assert row.attainable <= row.intensity * float(hardware.bandwidth.value) * (1 + 1e-12)


# -- crossover against a scan ------------------------------------------------------------------------------------


def excess(g, hardware, sizes):
    rows = cg.roofline(g, hardware, **sizes).rows
    return sum(r.compute_s for r in rows) - sum(r.memory_s for r in rows)


def agrees_with_a_scan(g, hardware, symbol, sizes, upto):
    turn = cg.crossover(g, hardware, symbol, **sizes)
    # the first of ten consecutive sizes, and then the first one after the previous ten
    coarse = next(
        (n for n in (*range(1, upto - 1, 10), upto - 1) if excess(g, hardware, {**sizes, symbol: n}) >= 0), None
    )
    fine = range(max(coarse - 9, 1), coarse + 1) if coarse else ()
    first = next((n for n in fine if excess(g, hardware, {**sizes, symbol: n}) >= 0), None)
    if first is None:
        assert turn >= upto - 1
    elif first == 1:
        assert turn <= 1
    else:
        assert math.ceil(turn - 1e-9) == first


@pytest.mark.parametrize(
    ("declare", "symbol", "sizes"),
    [
        (matmul, "N", {}),
        (layer, "B", {"D": 1000, "F": 3000}),
        (layer, "D", {"B": 150, "F": 3000}),
        (layer, "F", {"B": 250, "D": 900}),
        (mlp, "F", {"B": 300, "D": 700}),
        (attention, "S", {"B": 1, "H": 2, "K": 128, "L": 1}),  # a domain: S**2 and S with the constant
        (attention, "S", {"B": 3, "H": 2, "K": 64, "L": 5}),
        (projected, "S", {"B": 1, "H": 1, "K": 800}),
        (lambda: attention("eager"), "K", {"B": 1, "H": 2, "S": 600, "L": 2}),
        (lambda: attention(window=cg.dims("W")), "W", {"B": 1, "H": 2, "K": 128, "L": 1, "S": 300}),
    ],
)
def test_crossover_matches_scan(own, declare, symbol, sizes):
    agrees_with_a_scan(declare(), own, symbol, sizes, 1000)


def test_single_op_crossover_matches_graph_with_it_alone():
    g = mlp()
    up = next(op for op in g.ops if op.scope.startswith("up"))
    B, D, F = cg.dims("B D F")
    with cg.Graph("alone", dtype="bf16") as alone:
        alone.output(cg.linear(alone.input("x", (B, D)), "b d -> b f", f=F, bias=True, name="up"))
    assert cg.crossover(up, H100, "B", D=4096, F=4096) == cg.crossover(alone, H100, "B", D=4096, F=4096)


def stated(flops):
    """Build an op with stated FLOPs that reads and writes 4 bytes per element."""
    N = cg.dims("N")
    with cg.Graph("stated", dtype="fp32") as g:
        (y,) = cg.opaque("op", [g.input("x", (N, N, N))], [((N, N, N), "fp32")], flops={"matmul": flops(N)})
        g.output(y)
    return g


def test_crossover_to_memory_bound(own):
    # 8 N^3 B at 1 TB/s against 8e6 * 10 FLOP at 10 TFLOP/s: equal at N = 100, compute-bound below
    g = stated(lambda N: 80_000_000)
    assert excess(g, own, {"N": 99}) > 0 > excess(g, own, {"N": 101})
    assert cg.crossover(g, own, "N") == 101  # the first size after the change
    assert cg.crossover(stated(lambda N: 81 * N**3), own, "N") == 0
    assert cg.crossover(stated(lambda N: 79 * N**3), own, "N") == math.inf


def test_several_crossovers_are_refused(own):
    g = stated(lambda N: 80 * N**3 + 80 * (N**4 - 1000 * N**3 + 10_000 * N**2))
    with pytest.raises(cg.UnsupportedError, match="N has several crossovers, above 8, 512"):
        cg.crossover(g, own, "N")
    # for narrow heads the softmax is already compute-bound and the matmuls are not
    with pytest.raises(cg.UnsupportedError, match="K has several crossovers, above 2, 1024"):
        cg.crossover(projected(), own, "K", B=1, H=2, S=60)


# -- user-defined devices ----------------------------------------------------------------------------------------


def test_user_defined_device_file(own):
    estimate = cg.roofline(matmul(), own, N=299)
    assert estimate.hardware.name == "a device of one's own"
    assert estimate.ridge == 100
    assert cg.crossover(matmul(), own, "N") == 300  # n/3 = 100
    assert estimate.rows[0].bound == "memory"
    assert cg.roofline(matmul(), cg.load_hardware(own), N=300).rows[0].bound == "compute"


# -- initial location of operands --------------------------------------------------------------------------------------


@each("n", [64, 512, 2048, 2956, 2957, 16384])
def test_warm_start_subtracts_last_level_cache(n):
    """Three bf16 matrices of an H100 with 50 MiB of L2; 2956 is the last size that fits."""
    with cg.Graph("g", dtype="bf16") as g:
        g.output(g.input("a", (n, n)) @ g.input("b", (n, n)))
    cold, warm = (cg.roofline(g, H100, bound=bound) for bound in ("cold", "warm"))
    left = max(0, 6 * n * n - 50 * 2**20)
    assert (left == 0) == (n <= 2956)
    assert warm.lower_bound == pytest.approx(float(max(Fraction(2 * n**3) / PEAK, left / BANDWIDTH)))
    assert warm.lower_bound <= cold.lower_bound == cg.roofline(g, H100).lower_bound
    assert (cold.start, warm.start) == ("cold", "warm")
    assert warm.estimate == cold.estimate


def test_warm_start_is_symbolic_in_cache_size():
    N = cg.dims("N")
    with cg.Graph("g", dtype="bf16") as g:
        g.output(cg.relu(g.input("a", (N,))))
    device = cg.load_hardware(H100).symbolic()
    found = cg.roofline(g, device, bound="warm").lower_bound
    values = {"N": 1000, "vector_fp32": 10**12, "bandwidth": 10}
    assert [cg.evaluate(found, **values, l2_size=held) for held in (1000, 4000)] == [300.0, pytest.approx(1e-9)]


def test_warm_start_requires_cache_size():
    with cg.Graph("g") as g:
        g.output(cg.relu(g.input("a", (3,))))
    with pytest.raises(cg.SpecError, match=r"hardware 'gaudi2' has none; add cache\.l2"):
        cg.roofline(g, "gaudi2", bound="warm")
    with pytest.raises(cg.GraphError, match="roofline: bound 'hot', expected one of cold, warm"):
        cg.roofline(g, H100, bound="hot")
