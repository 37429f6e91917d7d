"""I/O bounds of a fast memory, against element-wise cache simulations and published constants."""

import random
from fractions import Fraction
from functools import cache
from itertools import product
from math import isqrt, sqrt

import numpy as np
import pytest
import sympy
from caches import Nest, by_blocks, ideal, least_recently_used, loops_of
from each import each
from shared import load

import costgraph as cg
from costgraph.algebra.polynomial import Poly, poly
from costgraph.analysis.tiling import (
    chains,
    exponents,
    feasible,
    of_chain,
)

# pattern, sizes (primes), shapes of operands and result
CASES = {
    "product": ("i k, k j -> i j", {"i": 11, "j": 7, "k": 13}),
    "batched": ("b i k, b k j -> b i j", {"b": 3, "i": 7, "j": 11, "k": 5}),
    "outer": ("i, j -> i j", {"i": 23, "j": 31}),
    "matrix-vector": ("i k, k -> i", {"i": 29, "k": 31}),
    "sum": ("i k -> i", {"i": 29, "k": 31}),
    "scaled columns": ("i k, k -> i k", {"i": 29, "k": 31}),
    "pairs": ("i, j -> i", {"i": 31, "j": 29}),
    "tensor contraction": ("a k l, k l b c -> a b c", {"a": 11, "b": 2, "c": 3, "k": 3, "l": 5}),
    "three operands": ("i j k, j r, k r -> i r", {"i": 7, "j": 5, "k": 11, "r": 3}),
    "convolution": ("c h+r, o c r -> o h", {"c": 3, "h": 17, "r": 5, "o": 5}),
    "padded": ("c h+r-2, o c r -> o h", {"c": 2, "h": 19, "r": 5, "o": 5}),
    "strided": ("c h*2+r w*2+s, o c r s -> o h w", {"c": 2, "h": 5, "w": 3, "r": 3, "s": 3, "o": 5}),
    "gaps": ("c h*3+r, o c r -> o h", {"c": 5, "h": 13, "r": 2, "o": 7}),
    "reversed": ("i k, j k -> j i", {"i": 17, "j": 2, "k": 19}),
}
ELEMENTS = (16, 101, 4096)


def shape_of(dims, sizes, padding=0):
    """Return the sizes of an operand: its largest index plus one, without the padding on both sides."""
    out = []
    for dim in dims:
        terms = [t.split("*") for t in dim.split("-")[0].split("+")]
        pad = int(dim.split("-")[1]) if "-" in dim else 0
        out.append(sum((sizes[t[0]] - 1) * int(t[1] if t[1:] else 1) for t in terms) + 1 - 2 * pad)
    return tuple(out)


def simulated(name):
    pattern, sizes = CASES[name]
    left, _, right = pattern.partition("->")
    return Nest(pattern, sizes, [shape_of(p.split(), sizes) for p in (*left.split(","), right)])


def declared(name):
    """Declare the same contraction as an op, with open sizes for plain axes; three operands require open sizes."""
    pattern, sizes = CASES[name]
    left = pattern.partition("->")[0]
    symbols = dict(zip(sizes, cg.dims(" ".join(n.upper() for n in sizes)), strict=True))
    with cg.Graph(name.replace(" ", "_")) as g:
        shapes = [
            [symbols[d] if d.isalpha() else n for d, n in zip(p.split(), shape_of(p.split(), sizes), strict=True)]
            for p in left.split(",")
        ]
        if "+" in pattern:
            shapes = [shape_of(p.split(), sizes) for p in left.split(",")]
        operands = [g.input(f"x{i}", shape) for i, shape in enumerate(shapes)]
        extra = {n: sizes[n] for n in "hw" if n in sizes and "+" in pattern}
        g.output(cg.einsum(*operands, pattern, **extra))
    (op,) = g.ops
    known = {} if "+" in pattern else {n.upper(): s for n, s in sizes.items()}
    return op, known


@cache
def tilings(name):
    """Return the tilings of a case for several cache sizes."""
    op, dims = declared(name)
    return [(n, cg.tiling(op, cache=4 * n, **dims)) for n in ELEMENTS]


def loops_of_tile(tile, sizes):
    """Return the loops of a tile; omitted indices have one position."""
    named = [(tuple(axis.strip("()").split()), tile.blocks[axis]) for axis in tile.order]
    seen = {n for names, _ in named for n in names}
    return [*named, *(((n,), 1) for n in sizes if n not in seen)]


@pytest.mark.parametrize("name", CASES)
def test_simulated_schedules_do_not_beat_bound(name):
    nest = simulated(name)
    drawn = [nest.accesses(loops_of(nest, f"{name} {i}")) for i in range(2)]
    for elements, found in tilings(name):
        tiled = nest.accesses(loops_of_tile(found.tiles[0], nest.sizes))
        for accesses in (*drawn, tiled):
            for replaced in (least_recently_used, ideal):
                assert found.bound <= replaced(nest, accesses, 4 * elements)


@each("name", CASES)
def test_tile_fits_and_moves_stated_bytes(name):
    nest = simulated(name)
    for elements, found in tilings(name):
        tile = found.tiles[0]
        moved, most = by_blocks(nest, loops_of_tile(tile, nest.sizes))
        assert most <= tile.footprint <= 4 * elements
        assert found.bound <= moved <= tile.traffic
        if name not in ("padded", "gaps", "convolution", "strided"):  # these count elements in gaps or padding
            assert (moved, most) == (tile.traffic, tile.footprint)


def test_matmul_constants_match_literature():
    # Smith, Lowery, Langou and van de Geijn 2019, theorem 1: 2*m*n*k/sqrt(M) - 2*M elements, loads plus stores
    m, n, k, M = cg.dims("m n k M")
    with cg.Graph("g", dtype="fp64") as g:
        g.output(g.input("a", (m, k)) @ g.input("b", (k, n)))
    (op,) = g.ops
    tiling = cg.tiling(op, cache=8 * M)
    assert 16 * m * n * k / sympy.sqrt(M) - 16 * M in [r.formula for r in cg.regimes(tiling.bound)]
    # a square result block with side sqrt(M + 1) - 1, plus one column and one row: a**2 + 2*a <= M
    tile = tiling.tiles[0]
    a = isqrt(10**6 + 1) - 1
    assert {cg.evaluate(b, M=10**6) if b != 1 else 1 for b in tile.blocks.values()} == {1, a}
    assert cg.evaluate(tile.footprint, M=10**6) == 8 * (a * a + 2 * a)
    sizes = dict.fromkeys("mnk", 9973 * a)  # blocks divide the sizes; the remaining difference is the loads of results
    assert 1 < cg.evaluate(tiling.ratio, M=10**6, **sizes) < 1.01
    # a tile with three equal squares moves sqrt(3) times as much: its sides are sqrt(M/3)
    assert 2 * m / sympy.sqrt(M / 3) / (2 * m / sympy.sqrt(M)) == sympy.sqrt(3)


def axes(*operands):
    return tuple(tuple(((n, 1),) for n in o.split()) for o in operands)


def window(stride=1):
    return (
        ((("c", 1),), (("h", stride), ("r", 1))),
        ((("o", 1),), (("c", 1),), (("r", 1),)),
        ((("o", 1),), (("h", 1),)),
    )


@each(
    ("names", "arrays", "wanted"),
    [
        # Hong and Kung 1981; Irony, Toledo and Tiskin 2004: traffic falls as 1/sqrt(M)
        ("i j k", axes("i k", "k j", "i j"), {(Fraction(3, 2), ())}),
        # particle pairs, Christ et al. 2013, section 1: as 1/M
        ("i j", axes("i", "j", "i"), {(Fraction(2), ())}),
        # Ballard, Knight and Rouse 2018: 1/M**(2/3) for a product of two three-axis factors
        (
            "i j k r",
            axes("i j k", "j r", "k r", "i r"),
            {(Fraction(5, 3), ()), *((Fraction(3, 2), ((n, Fraction(1, 2)),)) for n in "ijk")},
        ),
        # Demmel and Dinh 2018: 1/M, or 1/sqrt(M*R) for a small window with R positions
        ("c h o r", window(2), {(Fraction(2), ()), *((Fraction(3, 2), ((n, Fraction(1, 2)),)) for n in "hr")}),
        # no reuse: the sum over one axis
        ("i k", axes("i k", "i"), set()),
    ],
)
def test_exponents_match_literature(names, arrays, wanted):
    found = exponents(tuple(names.split()), arrays)
    assert {(e.total, e.indices) for sets in found for e in sets} == wanted
    assert all(feasible(tuple(names.split()), arrays, e) for sets in found for e in sets)


def test_exponents_hold_for_random_sets_of_points():
    # the inequality itself: a point set is no larger than its projections allow
    draw = np.random.default_rng(3)
    names, arrays = ("c", "h", "o", "r"), window(2)
    for sets in exponents(names, arrays):
        for e in sets:
            for count in (5, 50, 500):
                points = {tuple(p) for p in draw.integers(0, 5, (count, 4))}
                images = [
                    {tuple(sum(f * p[names.index(n)] for n, f in row) for row in a) for p in points} for a in arrays
                ]
                lengths = {n: len({p[i] for p in points}) for i, n in enumerate(names)}
                most = np.prod([len(i) ** float(s) for i, s in zip(images, e.arrays, strict=True)])
                most *= np.prod([lengths[n] ** float(t) for n, t in e.indices])
                assert len(points) <= most * (1 + 1e-12)


@pytest.mark.parametrize("name", ["product", "batched", "pairs", "tensor contraction", "three operands"])
def test_symbolic_tiles_fit_and_move_stated_bytes(name):
    op, dims = declared(name)
    nest = simulated(name)
    tiling = cg.tiling(op, cache=cg.dims("M"))
    tried = 0
    for tile in tiling.tiles:
        for elements in (16, 101):
            sizes = dims | {"M": 4 * elements}

            def number(formula, sizes=sizes):
                used = {s.name for s in getattr(formula, "free_symbols", ())}
                return cg.evaluate(formula, **{n: v for n, v in sizes.items() if n in used})

            if number(tile.least) <= 4 * elements:
                blocks = {axis: number(b) for axis, b in tile.blocks.items()}
                loops = [(tuple(a.strip("()").split()), blocks[a]) for a in tile.order]
                moved, most = by_blocks(nest, loops)
                assert most <= min(number(tile.footprint), 4 * elements)
                # a block as long as its axis is not fetched again, which a formula cannot see
                assert moved <= number(tile.traffic)
                assert number(tiling.bound) <= moved
                tried += 1
    assert tried >= 2


def test_shared_operand_may_be_read_once():
    n, k = cg.dims("N K")
    with cg.Graph("gram") as g:
        x = g.input("x", (n, k))
        g.output(cg.einsum(x, x, "i k, j k -> i j"))
    (op,) = g.ops
    nest = Nest("i k, j k -> i j", {"i": 17, "j": 17, "k": 11}, [(17, 11), (17, 11), (17, 17)], same=True)
    for elements in (16, 101):
        tiling = cg.tiling(op, cache=4 * elements, N=17, K=11)
        for i in range(2):
            accesses = nest.accesses(loops_of(nest, f"gram {i}"))
            assert tiling.bound <= least_recently_used(nest, accesses, 4 * elements)


def test_mixed_dtypes_count_in_bytes():
    with cg.Graph("mixed") as g:
        a, b = g.input("a", (11, 13), dtype="bf16"), g.input("b", (13, 7), dtype="int8")
        g.output(cg.einsum(a, b, "i k, k j -> i j", dtype="fp32"))
    (op,) = g.ops
    nest = Nest("i k, k j -> i j", {"i": 11, "j": 7, "k": 13}, [(11, 13), (13, 7), (11, 7)], bytes_=(2, 1, 4))
    for room in (40, 160, 2000):
        tiling = cg.tiling(op, cache=room)
        moved, most = by_blocks(nest, loops_of_tile(tiling.tiles[0], nest.sizes))
        assert (moved, most) == (tiling.traffic, tiling.tiles[0].footprint)
        for i in range(3):
            accesses = nest.accesses(loops_of(nest, f"mixed {i}"))
            assert tiling.bound <= ideal(nest, accesses, room)


# -- kernels -----------------------------------------------------------------------------------------------------


def attention(causal=False):
    N, d = cg.dims("N d")
    with cg.Graph("g") as g:
        q, k, v = (g.input(x, (1, 1, N, d)) for x in "qkv")
        g.output(cg.attention(q, k, v, causal=causal))
    return next(op for op in g.ops if op.name == "attention")


def mlp():
    B, D, F = cg.dims("B D F")
    with cg.Graph("g") as g:
        x, up, down = g.input("x", (B, D)), g.input("up", (D, F)), g.input("down", (F, D))
        with cg.kernel("mlp"):
            y = cg.einsum(cg.relu(cg.einsum(x, up, "b d, d f -> b f")), down, "b f, f e -> b e")
        g.output(y)
    (op,) = g.ops
    return op


def test_attention_tile_matches_flash_attention_traffic():
    op, M = attention(), cg.dims("M")
    tile = cg.tiling(op, cache=4 * M).tiles[0]
    # A block holds b rows of queries and results with d elements each, their scores against one key, and two statistics
    # per row, plus one key and one value: b*(2*d + 3) + 2*d <= M. Keys and values are read for every row block (Dao et
    # al. 2022, theorem 2).
    N, d = cg.dims("N d")
    rows = sympy.floor((M - 2 * d) / (2 * d + 3))
    for at in ({"N": 4099, "d": 61, "M": 25_000}, {"N": 997, "d": 127, "M": 100_003}):
        wanted = 4 * (2 * N * d + 2 * N * d * sympy.ceiling(N / rows))
        assert cg.evaluate(tile.traffic, **at) == wanted.subs({cg.dims(n): x for n, x in at.items()})
    # 2*N*d reads of keys and values, N/b times, with b = M/(2*d): 4*N**2*d**2/M elements
    far = {"N": 10**12 + 39, "d": 61, "M": 10**9 + 7}
    assert cg.evaluate(tile.traffic, **far) / (16 * far["N"] ** 2 * far["d"] ** 2 / far["M"]) == pytest.approx(
        1, rel=0.03
    )


def test_simulated_attention_does_not_beat_bound():
    op, (rows, keys, d) = attention(), (67, 67, 3)
    nest = Nest("s k, t k, t v, s t -> s v", {}, [])
    nest.begun, nest.held = {3, 4}, {3}  # scores start in the cache, and are dropped after multiplying their value
    for elements, (tall, wide) in ((16, (3, 1)), (16, (1, 2)), (16, (2, 31))):
        bound = cg.tiling(op, cache=4 * elements, N=rows, d=d).bound
        assert bound > 1.1 * cg.bytes_moved(op.graph, N=rows, d=d)  # stronger than reading every tensor once
        accesses = []
        for s0, t0 in product(range(0, rows, tall), range(0, keys, wide)):
            pairs = list(product(range(s0, min(s0 + tall, rows)), range(t0, min(t0 + wide, keys))))
            accesses += [[(0, (s, k)), (1, (t, k)), (3, (s, t))] for k in range(d) for s, t in pairs]
            accesses += [[(3, (s, t)), (2, (t, v)), (4, (s, v))] for s, t in pairs for v in range(d)]
        assert bound <= ideal(nest, accesses, 4 * elements)


def fused(rows, columns, left, right, tall, wide, draw=None):
    """Yield accesses of two chained matmuls, blocked over the intermediate: `left` terms, then `right` sums."""
    blocks = list(product(range(0, rows, tall), range(0, columns, wide)))
    if draw is not None:
        draw.shuffle(blocks)
    for s0, t0 in blocks:
        pairs = list(product(range(s0, min(s0 + tall, rows)), range(t0, min(t0 + wide, columns))))
        for s, t in pairs:
            yield from ([(0, (s, k)), (1, (t, k)), (3, (s, t))] for k in range(left))
            yield from ([(3, (s, t)), (2, (t, v)), (4, (s, v))] for v in range(right))


@pytest.mark.parametrize("kernel", ["attention", "mlp"])
def test_intermediate_rows_count_toward_traffic_bound(kernel):
    nest = Nest("s k, t k, t v, s t -> s v", {}, [])
    nest.begun, nest.held = {3, 4}, {3}
    rows, columns, d = (41, 41, 3) if kernel == "attention" else (43, 37, 3)
    op = attention() if kernel == "attention" else mlp()
    sizes = {"N": rows, "d": d} if kernel == "attention" else {"B": rows, "D": d, "F": columns}
    for elements in (16, 149):
        bound = cg.tiling(op, cache=4 * elements, **sizes).bound
        best = max(1, (elements - 2 * d - 1) // (2 * d))  # rows of two arrays, next to one row of each other array
        moved = []
        for tall, wide, draw in ((best, 1, None), (best, 1, random.Random(7)), (3, 3, None)):
            accesses = list(fused(rows, columns, d, d, tall, wide, draw))
            moved.append(ideal(nest, accesses, 4 * elements))
        assert bound <= min(moved)
        if 8 * d * d <= elements:  # the size from which rows decide
            assert min(moved) < 2 * bound


def test_attention_bound_matches_flash_attention_traffic():
    # 4*N**2*d**2/M elements, less M for the last partition
    N, d, M = (sympy.Symbol(n) for n in "NdM")
    op, far = attention(), {"N": 10**12 + 39, "d": 61, "M": 10**9 + 7}
    tiling = cg.tiling(op, cache=4 * cg.dims("M"))
    wanted = 4 * (4 * N**2 * d**2 / M - M)
    assert cg.evaluate(tiling.bound, **far) == pytest.approx(float(wanted.subs({s: far[s.name] for s in (N, d, M)})))
    assert cg.evaluate(tiling.ratio, **far) < 1.03
    with cg.Graph("g") as g:  # with heads that share keys, each query block reads them
        q, k, v = g.input("q", (1, 8, 4096, 64)), g.input("k", (1, 2, 4096, 64)), g.input("v", (1, 2, 4096, 64))
        g.output(cg.attention(q, k, v, causal=False))
    (shared,) = (op for op in g.ops if op.kind.name == "kernel")
    assert 1 < cg.tiling(shared, cache="192 KiB").ratio < 1.2
    masked = cg.tiling(attention(causal=True), cache=4 * cg.dims("M")).bound  # half of the scores, plus the diagonal
    assert cg.evaluate(masked, **far) == pytest.approx(cg.evaluate(tiling.bound, **far) / 2, rel=1e-3)


def test_backward_attention_bound_counts_all_score_operands():
    # a query needs its row, its gradient row and the result row, d each; a key-value pair needs four rows
    with cg.Graph("g", dtype="fp32") as g:
        q, k, v = (g.param(x, (1, 1, 9973, 61)) for x in "qkv")
        y = cg.attention(q, k, v, causal=False)
        g.output(cg.reduce(y * g.input("weight", (1, 1, 9973, 61)), "a b s d ->", "sum"))
    op = next(op for op in cg.training_step(g).walk() if op.name.endswith("attention_backward"))
    (chain,) = chains(op, stored=True)
    assert sorted(chain.rows.values(), key=Poly.sort_key) == [3 * 4 * 61, 4 * 4 * 61]
    assert chain.entries == 9973**2
    # three and four rows fill half of 2*M bytes each: (M/732)*(M/976) scores per M bytes moved
    found = max(p.constant for p in of_chain(chain, poly(10**6)))
    assert found == pytest.approx(10**6 * (9973**2 * 732 * 976 / 10**12 - 1))


def test_kernel_tiles_fit_and_move_stated_bytes():
    nest = Nest("s k, t k, t v -> s v", {"s": 17, "t": 13, "k": 5, "v": 5}, [(17, 5), (13, 5), (13, 5), (17, 5)])
    N, T, d = cg.dims("N T d")
    with cg.Graph("g") as g:
        q, k, v = g.input("q", (1, 1, N, d)), g.input("k", (1, 1, T, d)), g.input("v", (1, 1, T, d))
        g.output(cg.attention(q, k, v, causal=False))
    op = next(op for op in g.ops if op.name == "attention")
    for elements in (31, 101, 4096):
        tile = cg.tiling(op, cache=4 * elements, N=17, T=13, d=5).tiles[0]
        moved, most = by_blocks(nest, loops_of_tile(tile, nest.sizes))
        held = tile.blocks["s"] * (tile.blocks["t"] + 2)  # scores, with the maximum and the sum per row
        assert (moved, most + 4 * held) == (tile.traffic, tile.footprint)
        assert tile.footprint <= 4 * elements
    nest = Nest("b d, d f, f e -> b e", {"b": 17, "d": 5, "f": 13, "e": 5}, [(17, 5), (5, 13), (13, 5), (17, 5)])
    for elements in (31, 101, 4096):
        tile = cg.tiling(mlp(), cache=4 * elements, B=17, D=5, F=13).tiles[0]
        moved, most = by_blocks(nest, loops_of_tile(tile, nest.sizes))
        assert (moved, most + 4 * tile.blocks["b"] * tile.blocks["f"]) == (tile.traffic, tile.footprint)


def test_unsplittable_kernel_indices_stay_whole():
    # division by the row sum needs the whole row first
    B, D, M = cg.dims("B D M")
    for function in (cg.softmax, cg.layer_norm, cg.rms_norm):
        with cg.Graph("g") as g:
            g.output(function(g.input("x", (B, D))))
        tiling = cg.tiling(*g.ops, cache=M)
        assert all(D in tile.blocks.values() for tile in tiling.tiles)
        assert cg.tiling(*g.ops, cache=1_000_003, B=101, D=103).ratio == 1
    with cg.Graph("g") as g:
        g.output(cg.softmax(g.input("x", (B, D))))
    with pytest.raises(cg.BindingError, match="expected at least 140"):  # three rows of 11: operand, result, what is
        cg.tiling(*g.ops, cache=100, B=3, D=11)  # between; the largest of a row and its sum


def test_self_product_in_kernel_reads_tensor_along_two_indices():
    S, D, M = cg.dims("S D M")
    with cg.Graph("g") as g:
        x = g.input("x", (S, D))
        with cg.kernel("gram"):
            y = cg.relu(cg.einsum(x, x, "s d, t d -> s t"))
        g.output(y)
    # rows of x against rows of x: one operand is read again for every block of the other
    tile = cg.tiling(*g.ops, cache=4 * M).tiles[0]
    assert tile.blocks["d"] == D
    assert cg.evaluate(tile.traffic, S=997, D=61, M=4099) > cg.evaluate(cg.bytes_moved(g), S=997, D=61)


# -- graphs ------------------------------------------------------------------------------------------------------


def test_graph_bytes_through_cache():
    B, L, M = cg.dims("B L M")
    with cg.Graph("g", dtype="bf16") as g:
        g.output(cg.repeat(L, lambda x: cg.relu(cg.linear(x, "b d -> b f", f=1009)), g.input("x", (B, 1009))))
    moved = cg.bytes_moved(g, cache=M)
    # a matmul of B x 1009 by 1009 x 1009 in bf16: 2*sqrt(2**3)*B*1009**2/sqrt(M) - 2*M; relu reads and writes
    b, layers, room = 499, 7, 4096
    product = max(2 * (2 * b * 1009 + 1009**2), 4 * sqrt(2) * b * 1009**2 / sqrt(room) - 2 * room)
    assert cg.evaluate(moved, B=b, L=layers, M=room) == pytest.approx(layers * (product + 4 * b * 1009), rel=1e-12)
    assert cg.bytes_moved(g, cache=room, B=b, L=layers) == pytest.approx(layers * (product + 4 * b * 1009), rel=1e-12)
    assert cg.bytes_moved(g, cache="1 GB", B=b, L=layers) == cg.bytes_moved(g, B=b, L=layers)
    assert cg.bytes_moved(g, cache="4 KiB", B=b, L=layers) == cg.bytes_moved(g, cache=4096, B=b, L=layers)


def test_smaller_cache_does_not_reduce_traffic():
    for name in ("llama-3-8b", "resnet50"):
        graph = load(name)
        dims = {"B": 3} | ({"S": 512} if name != "resnet50" else {})
        found = [cg.bytes_moved(graph, cache=2**e, **dims) for e in (34, 22, 10)]
        assert found == sorted(found)
        assert found[0] == cg.bytes_moved(graph, **dims) < found[-1]


def test_three_operand_op_moves_each_operand_once():
    # pairwise contraction order depends on sizes, so no single nest computes all points
    op, dims = declared("three operands")
    assert cg.bytes_moved(op.graph, cache=64, **dims) == cg.bytes_moved(op.graph, **dims)


@each("cache", [0, -1, True, 1.5, "x", "50", "0 B", "5 s", "MB", (), "1/0 B"])
def test_cache_size_must_be_positive(cache):
    op, dims = declared("product")
    with pytest.raises(cg.BindingError, match=r"cache .*, expected a positive number of bytes, a text such as"):
        cg.tiling(op, cache=cache, **dims)
    with pytest.raises(cg.BindingError, match=r"bytes_moved: cache .*, expected a positive number of bytes"):
        cg.bytes_moved(op.graph, cache=cache, **dims)


def test_untileable_ops_are_refused():
    op, dims = declared("product")
    with pytest.raises(cg.BindingError, match="cache 2\\*I, but I is a dimension of graph 'product', expected another"):
        cg.tiling(op, cache=2 * cg.dims("I"))
    with pytest.raises(cg.BindingError, match=r"cache of 8 bytes, expected at least 12: one element of each array"):
        cg.tiling(op, cache=8, **dims)
    with pytest.raises(cg.GraphError, match="expected only one of them"):
        cg.bytes_moved(op.graph, True, cache=64)
    with pytest.raises(cg.BindingError, match="'Q' is not a dimension"):
        cg.tiling(op, cache=64, Q=3)
    with cg.Graph("g") as g:
        x = g.input("x", (5, 7))
        with cg.kernel("k"):
            y = cg.einsum(cg.ops.concat([x, x], 0), x, "i k, j k -> i j")
        g.output(y)
    with pytest.raises(cg.UnsupportedError, match=r"tiling of 'k': 'k/concat' is concat, expected only contractions"):
        cg.tiling(*g.ops, cache=64)
