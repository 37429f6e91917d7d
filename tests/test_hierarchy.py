"""Memory hierarchy: times against separately derived traffic, and bounds against simulated caches."""

from dataclasses import replace

import pytest
from caches import Nest, ideal, loops_of
from each import each
from shared import load, training_step

import costgraph as cg
from costgraph.hardware.specs import levels
from costgraph.hardware.units import Quantity

A100 = cg.load_hardware("a100-80-sxm")
I, J, K, L = cg.dims("I J K L")


def device(memory=100, *, peak=10**9, cores=3, **cache):
    """A device with few bytes; rates in B/s and FLOP/s."""
    quantities = {key: Quantity(value, "B/s" if "bandwidth" in key else "B") for key, value in cache.items()}
    rates = {key: Quantity(peak, "FLOP/s") for key in ("fp32", "bf16")}
    bandwidth = Quantity(memory, "B/s")
    tables = {
        "peak": rates, "vector": rates, "cache": quantities, "cores": {"count": Quantity(cores, "1")},
        "memory": {**A100.tables["memory"], "bandwidth": bandwidth},
    }  # fmt: skip
    return replace(A100, peak=rates, vector=rates, bandwidth=bandwidth, tables=tables)


def product():
    with cg.Graph("product", dtype="fp32") as g:
        g.output(g.input("a", (I, K)) @ g.input("b", (K, J)))
    return g


def chain():
    with cg.Graph("chain", dtype="fp32") as g:
        h = cg.relu(g.input("x", (I, K)) @ g.param("w", (K, J)))
        g.output(h @ g.param("v", (J, L)))
    return g


SIZES = {"I": 41, "J": 37, "K": 43}
CACHES = {"l2": 4096, "l2_bandwidth": 170, "l1_and_shared_per_core": 64, "registers_per_core": 32}


# -- levels ------------------------------------------------------------------------------------------------------------


def test_nearer_capacity_sums_over_all_cores():
    memory, l2 = levels(device(shared_per_core=50, **CACHES))
    assert (memory.name, memory.bandwidth.value, memory.nearer) == ("memory", 100, 4096 + 3 * (64 + 32))
    # shared memory is carved out of the L1 cache
    assert (l2.name, l2.bandwidth.value, l2.nearer) == ("l2", 170, 3 * (64 + 32))
    assert memory.whole
    assert l2.whole


def test_levels_follow_the_specification():
    assert [(v.name, v.nearer, v.whole) for v in levels(device())] == [("memory", 0, False)]
    bare = device(l2=4096, l2_bandwidth=9, shared_per_core=5)
    assert [(v.name, v.nearer, v.whole) for v in levels(bare)] == [("memory", 4096 + 15, False), ("l2", 15, False)]
    # capacity below the level next to the compute units is unknown
    assert [v.name for v in levels(device(l2=4096, l2_bandwidth=9))] == ["memory"]
    assert [v.name for v in levels(cg.load_hardware("mi300x"))] == ["memory", "last_level", "l2"]
    for name in cg.list_hardware():
        memory, *caches = levels(cg.load_hardware(name))
        assert all(memory.nearer.constant > v.nearer.constant > 0 for v in caches), name


# -- times -------------------------------------------------------------------------------------------------------------


@each(
    ("change", "bound"),
    [({}, "l2"), ({"l2_bandwidth": 700}, "memory"), ({"peak": 100}, "compute"), ({"l2_bandwidth": 10**9}, "memory")],
)
def test_op_time_is_the_maximum_over_levels(change, bound):
    small = device(**(CACHES | change))
    (row,) = (found := cg.roofline(product(), small, hierarchical=True, **SIZES)).rows
    # 2 I J K FLOPs; 4384 bytes fit above the memory, 288 above the L2 cache
    flops = 2 * 41 * 37 * 43 / change.get("peak", 10**9)
    moved = [
        cg.bytes_moved(product(), cache=n, **SIZES) / rate
        for n, rate in ((4384, 100), (288, small.tables["cache"]["l2_bandwidth"].value))
    ]
    assert row.compute_s == pytest.approx(flops)
    assert [row.memory_s, *row.caches_s.values()] == pytest.approx(moved)
    assert found.estimate == row.seconds == pytest.approx(max(flops, *moved))
    assert row.bound == found.bound == bound
    assert found.estimate == cg.seconds(product(), small, hierarchical=True, **SIZES)
    assert "l2" in str(found).split("\n")[0].split()
    assert "l2" in found._repr_html_()


def test_total_time_sums_per_op_maxima():
    small, at = device(**CACHES), {**SIZES, "L": 31}
    roofline = cg.roofline(chain(), small, hierarchical=True, **at)
    parts = []
    for op in chain().ops:
        least = [cg.tiling(op, cache=n, **at).bound / rate for n, rate in ((4384, 100), (288, 170))]
        parts.append(max(least))
    assert [row.seconds for row in roofline.rows] == pytest.approx(parts)
    assert roofline.estimate == pytest.approx(sum(parts))
    flat = cg.roofline(chain(), small, **at)
    assert flat.estimate < roofline.estimate
    assert not flat.levels
    assert not flat.rows[0].caches_s


def test_hierarchy_changes_nothing_if_all_fits():
    roomy = device(l2=10**9, l2_bandwidth=10**9, l1_and_shared_per_core=10**8, registers_per_core=10**8)
    for graph in (product(), chain()):
        at = {**SIZES, "L": 31} if graph.name == "chain" else SIZES
        one, other = cg.roofline(graph, roomy, **at), cg.roofline(graph, roomy, hierarchical=True, **at)
        assert (one.estimate, one.lower_bound) == (other.estimate, other.lower_bound)
        assert [row.bound for row in one.rows] == [row.bound for row in other.rows]


def test_aliased_operands_in_a_loop_are_moved_once():
    # the optimizer squares gradients layer by layer: only the loop body knows which operands alias
    step = training_step(load("gpt2"))
    one, other = (cg.roofline(step, A100, hierarchical=switch, B=2, S=61) for switch in (False, True))
    assert one.estimate == other.estimate
    assert [row.memory_s for row in one.rows] == [row.memory_s for row in other.rows]


def test_device_without_caches_changes_nothing_with_a_note():
    bare = device()
    one, other = cg.roofline(product(), bare), cg.roofline(product(), bare, hierarchical=True)
    assert (one.estimate, one.lower_bound, one.rows) == (other.estimate, other.lower_bound, other.rows)
    assert "no bandwidth of a cache, it has no caches: the memory is its only level" in str(other)
    assert "note" not in str(one)
    assert "of caches it has sizes alone" in str(cg.roofline(product(), "tpu-v5e", hierarchical=True))
    assert "lacks the size of registers or of first caches" in str(cg.roofline(product(), "mi300x", hierarchical=True))


def test_open_sizes_give_formulas_and_conditions():
    small = device(**CACHES, peak=5000)
    roofline = cg.roofline(product(), small, hierarchical=True)
    lower = cg.seconds(product(), small, "lower", hierarchical=True)
    for at in (SIZES, {"I": 5, "J": 3, "K": 7}, {"I": 1, "J": 1, "K": 997}, {"I": 101, "J": 97, "K": 1}):
        bound = cg.roofline(product(), small, hierarchical=True, **at)
        assert cg.evaluate(roofline.estimate, **at) == pytest.approx(bound.estimate)
        assert cg.evaluate(lower, **at) == pytest.approx(bound.lower_bound)
        assert cg.evaluate(roofline.rows[0].seconds, **at) == pytest.approx(bound.rows[0].seconds)
        condition, where = roofline.rows[0].bound, {I: at["I"], J: at["J"], K: at["K"]}
        while not isinstance(condition, str):
            condition = condition.first if condition.compute.subs(where) else condition.otherwise
        assert condition == bound.rows[0].bound
    assert "compute where" in str(roofline.rows[0].bound)
    assert ", else memory where" in str(roofline.rows[0].bound)


def test_conditions_are_simplified_with_device_numbers():
    # (2304 S + 7340032)/memory bandwidth against 117440512 S/peak; L2 never dominates
    llama = load("llama-3-8b")
    rows = {row.op: row for row in cg.roofline(llama, A100, hierarchical=True, B=1).rows}
    gate = rows["layers/mlp/gate/matmul"].bound
    assert str(gate) == "compute where S >= 160.7, else memory"
    for size, bound in ((160, "memory"), (161, "compute")):
        found = cg.roofline(llama, A100, hierarchical=True, B=1, S=size).rows
        assert next(row for row in found if row.op == "layers/mlp/gate/matmul").bound == bound
    # with a unit fast enough for the cache to dominate, the two conditions have different sides
    fast = device(**CACHES, peak=5000)
    bound = cg.roofline(product(), fast, hierarchical=True, J=37, K=43).rows[0].bound
    assert not bound.compute.has(cg.Max)
    for size in (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 10**3, 10**5):
        condition = bound
        while not isinstance(condition, str):
            condition = condition.first if condition.compute.subs(I, size) else condition.otherwise
        assert condition == cg.roofline(product(), fast, hierarchical=True, I=size, J=37, K=43).rows[0].bound


def test_symbolic_device_conditions_have_no_max():
    unknown = device(**CACHES).symbolic()
    bound = cg.roofline(product(), unknown, hierarchical=True).rows[0].bound
    relu = cg.roofline(chain(), unknown, hierarchical=True).rows[1].bound
    assert str(relu) == (
        "compute where bandwidth >= 8*vector_fp32 and l2_bandwidth >= 8*vector_fp32, else memory where "
        "l2_bandwidth >= bandwidth, else l2"
    )
    while not isinstance(bound, str):
        assert not bound.compute.has(cg.Max)
        bound = bound.otherwise


def test_symbolic_device_has_symbolic_caches():
    small = device(**CACHES)
    unknown = small.symbolic()
    names = {"l2_size", "l2_bandwidth", "l1_and_shared_per_core_size", "registers_per_core_size"}
    assert names <= unknown.symbols
    assert "last_level_size" not in unknown.symbols
    formula = cg.seconds(product(), unknown, hierarchical=True, **SIZES)
    assert names <= {s.name for s in formula.free_symbols}
    assert float(formula.subs(small.bindings())) == pytest.approx(
        cg.seconds(product(), small, hierarchical=True, **SIZES)
    )
    with cg.Graph("g") as g:
        g.output(cg.relu(g.input("x", cg.dims("l2_size,"))))
    with pytest.raises(cg.BindingError, match="l2_size names a dimension and a rate of the device"):
        cg.seconds(g, unknown)


def test_transfer_uses_only_its_link():
    with cg.Graph("g") as g:
        g.output(cg.ops.transfer(g.input("x", (I,)), "pcie"))
    one, other = (cg.roofline(g, A100, hierarchical=switch, I=1009) for switch in (False, True))
    assert [row.bound for row in other.rows] == ["link"]
    assert not other.rows[0].caches_s
    assert one.estimate == other.estimate


def test_hierarchical_must_be_boolean():
    for call in (cg.roofline, cg.seconds):
        with pytest.raises(cg.GraphError, match="hierarchical is 'yes', expected True or False"):
            call(product(), A100, hierarchical="yes")


# -- lower bound -------------------------------------------------------------------------------------------------------


def test_no_simulated_schedule_beats_the_lower_bound():
    sizes = {"i": 11, "j": 13, "k": 7}
    nest = Nest("i k, k j -> i j", sizes, [(11, 7), (7, 13), (11, 13)])
    at = {name.upper(): n for name, n in sizes.items()}
    held = 0
    for room in (24, 48, 96, 192, 1024):
        small = device(1, l1_and_shared_per_core=room - 4, registers_per_core=4, cores=1)
        least = cg.seconds(product(), small, "lower", hierarchical=True, **at)
        held += least > cg.seconds(product(), small, "lower", **at)
        for seed in range(5):
            assert ideal(nest, nest.accesses(loops_of(nest, seed)), room) >= least
    assert held >= 2  # cases where the bound exceeds moving each element once


def test_lower_bound_holds_for_fused_products():
    # the cache holds x w: row by row, w and v are read at most once more per row
    rows, inner, mid, out = 23, 5, 7, 3
    at = {"I": rows, "K": inner, "J": mid, "L": out}
    for room in (64, 128, 256, 4 * (inner + mid + out + inner * mid + mid * out)):
        small = device(1, l1_and_shared_per_core=room - 32, registers_per_core=32, cores=1)
        fused = 4 * (rows * inner + rows * out)  # x is read and y is written once
        weights = 4 * (inner * mid + mid * out)
        fits = room >= 4 * (inner + mid + out) + weights
        moved = fused + weights * (1 if fits else rows)
        assert cg.seconds(chain(), small, "lower", hierarchical=True, **at) <= moved
    # unfused, x w is written and read in between
    assert cg.seconds(chain(), small, hierarchical=True, **at) > moved


def test_lower_bound_ignores_unused_results():
    # only one row of the result is output: partial sums for the others can start and end in the cache
    with cg.Graph("part", dtype="fp32") as g:
        g.output((g.input("a", (I, K)) @ g.input("b", (K, J)))[:1])
    rows, inner, mid = 29, 5, 7
    at = {"I": rows, "K": inner, "J": mid}
    for room in (24, 48, 96, 4 * (2 * mid + inner * mid + inner)):
        small = device(1, l1_and_shared_per_core=room - 4, registers_per_core=4, cores=1)
        # row by row: one element of a, b and the result at a time, or all of b
        fits = room >= 4 * (inner * mid + 1 + 1)
        moved = 4 * (rows * inner * (1 if fits else mid) + inner * mid * (1 if fits else rows) + mid)
        assert cg.seconds(g, small, "lower", hierarchical=True, **at) <= moved


def test_lower_bound_is_below_estimate_on_every_device():
    model = load("gpt2")
    for name in ("a100-80-sxm", "v100-sxm2-32gb", "h100-sxm", "mi300x", "l4"):
        roofline = cg.roofline(model, name, hierarchical=True, B=3, S=509, fallback="fp32" if "v100" in name else None)
        flat = cg.roofline(model, name, B=3, S=509, fallback="fp32" if "v100" in name else None)
        assert flat.lower_bound <= roofline.lower_bound <= roofline.estimate
        assert flat.estimate <= roofline.estimate * (1 + 1e-12)


def test_machine_balance_scales_with_root_of_cache_size():
    # 2 n^3/P = 4 * 2 n^3/sqrt(M/4) / W for a large product of 4-byte elements: sqrt(M) = 8 P/W
    n = 10**6
    unknown = device(l1_and_shared_per_core=1, registers_per_core=1, cores=1).symbolic()
    time = cg.seconds(product(), unknown, "lower", hierarchical=True, I=n, J=n, K=n)
    symbols = {s.name: s for s in time.free_symbols}
    # M is 64, so that both are 2 n^3/1000
    at = {symbols["peak_fp32"]: 1000, **{s: 32 for name, s in symbols.items() if name.endswith("_size")}}
    for bandwidth in (1000, 999):
        assert float(time.subs(at | {symbols["bandwidth"]: bandwidth})) == pytest.approx(2 * n**3 / bandwidth, rel=1e-5)
    assert float(time.subs(at | {symbols["bandwidth"]: 2000})) == pytest.approx(2 * n**3 / 1000, rel=1e-5)
