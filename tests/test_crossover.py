"""Crossover sizes: ops with declared costs cross at a known size, which the search must find."""

import math
import random

import pytest
import sympy
from each import each
from shared import load

import costgraph as cg

N, M, B = cg.dims("N M B")

TOML = """
name = "slow"
vendor = "nobody"
[sources]
HAND = "written for a test"
[peak]
fp32 = { value = 10, unit = "TFLOP/s", source = ["HAND"] }
[vector]
fp32 = { value = 10, unit = "TFLOP/s", source = ["HAND"] }
[memory]
capacity = { value = 8, unit = "GB", source = ["HAND"] }
bandwidth = { value = 1, unit = "TB/s", source = ["HAND"] }
"""


@pytest.fixture
def device_file(tmp_path):
    """A device on which moving one byte takes as long as 10 FLOPs."""
    path = tmp_path / "own.toml"
    path.write_text(TOML)
    return str(path)


def stated(flops, *shape):
    """An op with the declared FLOPs that reads and writes 4 bytes per element, worth 80 FLOPs of time."""
    with cg.Graph("stated", dtype="fp32") as g:
        (y,) = cg.opaque("op", [g.input("x", shape)], [(shape, "fp32")], flops={"matmul": flops})
        g.output(y)
    return g


@each("turn", [2, 3, 7, 8, 9, 2**31 - 1, 2**58 + 5, 2**59, 2**59 + 12345, 2**60 - 1, 2**60])
def test_search_finds_the_known_crossover(device_file, turn):
    # N^5 / turn^2 against N^3: equal at N = turn, compute-bound above
    g = stated(80 * N**5 / turn**2, N, N, N)
    assert cg.crossover(g, device_file, "N") == turn


@each("turn", [2, 3, 7, 100, 2**40 + 1])
def test_search_finds_change_to_memory_bound(device_file, turn):
    # turn^2 * N against N^3: equal at N = turn, memory-bound above
    assert cg.crossover(stated(80 * turn**2 * N, N, N, N), device_file, "N") == turn + 1


def test_search_without_crossover_reports_the_bound(device_file):
    # N^5 - N^3 + N is positive at each size
    above = N**5 - N**3 + N
    assert cg.crossover(stated(80 * (N**3 + above), N, N, N), device_file, "N") == 0
    assert cg.crossover(stated(80 * (N**3 - above), N, N, N), device_file, "N") == math.inf
    # the change lies beyond the search range
    assert cg.crossover(stated(80 * N**5 / (2**60 + 1) ** 2, N, N, N), device_file, "N") == math.inf


def test_cancelling_terms_leave_no_power(device_file):
    # 80*N^2*B on both sides cancels: N^2 remains on one side
    assert cg.crossover(stated(80 * N**2 * B + N**2, N, N, B), device_file, "N", B=3) == 0
    assert cg.crossover(stated(80 * N**2 * B, N, N, B), device_file, "N") == 0
    assert cg.crossover(stated(80 * N**2 * B - N**2, N, N, B), device_file, "N") == math.inf


def test_crossover_is_a_formula_in_open_sizes(device_file):
    # N^3 * 80 / 7 against N^2 * M * 80: equal at N = 7*M
    g = stated(80 * N**3 / 7, N, N, M)
    assert cg.crossover(g, device_file, "N") == 7 * M
    assert cg.crossover(g, device_file, "N", M=11) == 77
    # reversed: larger M makes it memory-bound
    assert cg.crossover(g, device_file, "M") == N / 7
    with pytest.raises(cg.UnsupportedError, match=r"no closed form for N in .* expected sizes for M"):
        cg.crossover(stated(80 * N**4 / 7, N, N, M), device_file, "N")
    # N^4 / 7 against N^2 * 28: N^2 = 196
    assert cg.crossover(stated(80 * N**4 / 7, N, N, M), device_file, "N", M=28) == 14


def test_crossover_for_one_op_or_whole_graph(device_file):
    with cg.Graph("two", dtype="fp32") as g:
        x = g.input("x", (N, N, N))
        (y,) = cg.opaque("a", [x], [((N, N, N), "fp32")], flops={"matmul": 80 * N**4 / 5})
        (z,) = cg.opaque("b", [y], [((N, N, N), "fp32")], flops={"matmul": 80 * N**4 / 7})
        g.output(z)
    first, second = g.ops
    assert (cg.crossover(first, device_file, "N"), cg.crossover(second, device_file, "N")) == (5, 7)
    # N/5 + N/7 = 2
    assert cg.crossover(g, device_file, "N") == pytest.approx(2 * 35 / 12, rel=1e-12)
    assert cg.crossover(first, cg.load_hardware(device_file), "N") == 5


def test_crossover_inside_rounding_is_searched(device_file):
    # N^3 * ceil(N / 7) against N^2 * 60: 19 * 3 is below 60, 20 * 3 is not
    g = stated(80 * N**3 * sympy.ceiling(N / 7), N, N, 60)
    assert cg.crossover(g, device_file, "N") == 20
    with pytest.raises(cg.UnsupportedError, match=r"no closed form for N in .* expected sizes for M"):
        cg.crossover(stated(80 * N**3 * sympy.ceiling(N / 7), N, N, M), device_file, "N")


def test_default_of_the_swept_size_is_ignored(device_file):
    g = stated(80 * N**3 / 7, N, N, M)
    with g:
        g.defaults.update(N=3, M=2)
    assert cg.crossover(g, device_file, "N") == 14
    assert cg.crossover(g, device_file, "N", M=11) == 77


# -- open sizes --------------------------------------------------------------------------------------------------------


def ops_of(graph):
    """Ops with a time in their own right; kernels count as one op."""
    names = {row.op for row in cg.roofline(graph, "h100-sxm").rows}
    return [op for op in graph.walk() if op.name in names]


@pytest.mark.parametrize("name", ["llama-3-8b", "bert-base"])
def test_open_size_formula_matches_numeric_crossover(name):
    model, pick, device = load(name, symbolic=True), random.Random(name), cg.load_hardware("h100-sxm")
    preset, met = load(name).defaults, 0
    for op in ops_of(model)[-9:]:
        crossover = cg.crossover(op, device, "B")
        for _ in range(3):
            sizes = {n: max(1, pick.choice((v // 4, v, 3 * v))) for n, v in preset.items() if n in ("F", "V", "L")}
            sizes = {**preset, **sizes, "S": pick.randrange(1, 400)}
            number = cg.crossover(op, device, "B", **sizes)
            used = {s.name: sizes[s.name] for s in getattr(crossover, "free_symbols", ())}
            at = cg.evaluate(crossover, **used) if used else crossover
            if number not in (0, math.inf):
                assert at == pytest.approx(number, rel=1e-12)
                met += 1
            else:  # the bound never changes: no size is below 1
                assert at in (number, sympy.oo) or at < 1
    assert met >= 5


def test_crossover_without_closed_form_requires_other_sizes(device_file):
    g = stated(80 * N**5 / M**2, N, N, N)
    with pytest.raises(cg.UnsupportedError, match=r"no closed form for N in .*, expected sizes for M"):
        cg.crossover(g, device_file, "N")
    assert cg.crossover(g, device_file, "N", M=101) == 101
    # 80 N (N - M) compute against 80 N memory: equal at N = M + 1
    with cg.Graph("g", dtype="fp32") as g:
        (y,) = cg.opaque("op", [g.input("x", (N,))], [((N,), "fp32")], flops={"matmul": 80 * N * cg.Max(0, N - M)})
        g.output(y)
    with pytest.raises(cg.UnsupportedError, match="expected sizes for M"):
        cg.crossover(g, device_file, "N")
    assert cg.crossover(g, device_file, "N", M=7) == 8
