"""Collective times against simulated message passing between ranks and against published measurements."""

import heapq
import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from each import each

import costgraph as cg
from costgraph.analysis.step_time import finished
from costgraph.hardware.units import Quantity, quantity
from costgraph.ops.fill import assign

PUBLISHED = Path(__file__).parent / "measured/published/gpus.json"
#: seconds and B/s as primes: an interconnect joining five devices, and their network
NEAR, FAR, DOMAIN = (13e-6, 101e9), (37e-6, 11e9), 5


def device(links=None, **table):
    """Return a device with these links and infinitely fast memory."""
    h100 = cg.load_hardware("h100-sxm")
    interconnect = {"per_direction": (101, "GB/s"), "latency": (13, "us"), "domain": (DOMAIN, "1"), **table}
    network = {"per_direction": (11, "GB/s"), "latency": (37, "us")}
    if links is not None:
        interconnect["links"] = (links, "1")
    stated = {"interconnect": interconnect, "network": network}
    link_tables = {name: {key: quantity(*q) for key, q in of.items() if q} for name, of in stated.items()}
    memory = {**h100.tables["memory"], "bandwidth": Quantity(10**18, "B/s")}
    return replace(h100, tables={**h100.tables, **link_tables, "memory": memory}, bandwidth=memory["bandwidth"])


def declared(kind, ranks, numbers):
    """Return a graph with one collective over `numbers` four-byte elements per rank."""
    with cg.Graph("g") as g:
        g.output(cg.ops.collective(g.input("x", (numbers,)), kind, ranks))
    return g


def on_links(kind, ranks, numbers, hardware=None):
    (row,) = cg.roofline(declared(kind, ranks, numbers), hardware or device()).rows
    return row


# -- simulated messages ------------------------------------------------------------------------------------------


def deliver(sends, first):
    """Simulate messages in the order of their arrival.

    `sends(rank, what)` returns the messages that a rank forwards on receipt: destination, payload, bytes and link. A
    port sends one message at a time; its bytes arrive latency + bytes/bandwidth after it starts. Return the time of
    the last arrival.
    """
    events, free, last, serial = [], {}, 0.0, 0
    for rank, what in first:
        heapq.heappush(events, (0.0, serial := serial + 1, rank, what))
    while events:
        now, _, rank, what = heapq.heappop(events)
        last = max(last, now)
        for to, message, size, (latency, bandwidth) in sends(rank, what):
            start = max(now, free.get((rank, bandwidth), 0.0))
            free[rank, bandwidth] = start + size / bandwidth
            heapq.heappush(events, (start + latency + size / bandwidth, serial := serial + 1, to, message))
    return last


def ring(n, size, link, rounds=1):
    """Return the time until each of n ranks has received every shard: `rounds` times around the ring."""

    def sends(rank, hops):
        return [((rank + 1) % n, hops + 1, size / n, link)] if hops < rounds * (n - 1) else []

    return deliver(sends, [(rank, 0) for rank in range(n)])


def gathered(size, m, k):
    """Return the time for rings between k domains with m ranks each, then within the domains."""
    return ring(k, size / m, FAR) + ring(m, size, NEAR)


@each(("ranks", "m", "k"), [(2, 2, 1), (5, 5, 1), (15, 5, 3), (35, 5, 7), (7, 3.5, 2)])
def test_gather_time_matches_simulated_hierarchical_rings(ranks, m, k):
    part = 30_030_030
    row = on_links("all_gather", ranks, part)
    if m == int(m):
        expected = gathered(4 * part * ranks, int(m), k)
    else:  # seven ranks in two domains of five: 3.5 each, the mean of three and four
        share = 4 * part
        expected = (m - 1) * (NEAR[0] + k * share / NEAR[1]) + (k - 1) * (FAR[0] + share / FAR[1])
    assert row.links_s == {"interconnect" if k == 1 else "network": pytest.approx(expected, rel=1e-12)}
    assert on_links("reduce_scatter", ranks, part * ranks).seconds == pytest.approx(expected, rel=1e-12)
    assert row.bound == ("interconnect" if k == 1 else "network")


@pytest.mark.parametrize(("ranks", "m", "k"), [(5, 5, 1), (15, 5, 3)])
def test_large_all_reduce_matches_simulated_rings(ranks, m, k):
    size = 4 * 15 * 10_007_003
    expected = 2 * gathered(size, m, k) if k > 1 else ring(m, size, NEAR, rounds=2)
    assert on_links("all_reduce", ranks, size // 4).seconds == pytest.approx(expected, rel=1e-12)


def two_trees(n):
    """Return the parents of n ranks in two binary trees; inner nodes of one tree are leaves of the other.

    Every second rank is a leaf; the other tree is shifted by one rank. The last rank is the root of both.
    """

    def parents(low, high, above, out):
        if low < high:
            root = 1
            while 2 * root <= high - low:
                root *= 2
            middle = low + root - 1
            out[middle] = above
            parents(low, middle, middle, out)
            parents(middle + 1, high, middle, out)
        return out

    first = parents(0, n - 1, n - 1, {})
    turn = {**{r: (r + 1) % (n - 1) for r in range(n - 1)}, n - 1: n - 1}
    return first, {turn[r]: turn[p] for r, p in first.items()}


def heights(parents, n):
    out = []
    for r in range(n):
        steps = 0
        while r in parents:
            r, steps = parents[r], steps + 1
        out.append(steps)
    return out


@each("n", [5, 7, 13, 31])
def test_small_all_reduce_matches_simulated_double_tree(n):
    numbers, hardware = 11, device(domain=(127, "1"))
    trees = two_trees(n)

    def down(rank, parents):
        return [(r, parents, 0, NEAR) for r, p in parents.items() if p == rank]

    # without bytes, down takes as long as up: from the last rank to the deepest leaf
    last = max(deliver(down, [(n - 1, parents)]) for parents in trees)
    assert last == pytest.approx(NEAR[0] * max(max(heights(p, n)) for p in trees))
    # pipelined bytes: the busiest rank sends half to each parent and each child
    sent = [sum((r in p) / 2 + sum(q == r for q in p.values()) / 2 for p in trees) for r in range(n)]
    busiest = 4 * numbers * max(sent) / NEAR[1]
    seconds = on_links("all_reduce", n, numbers, hardware).seconds
    assert seconds == pytest.approx(2 * last + busiest, rel=1e-12)
    assert seconds < ring(n, 4 * numbers, NEAR, rounds=2)


@pytest.mark.parametrize(("ranks", "m"), [(3, 3), (15, 5)])
def test_all_to_all_matches_simulated_exchange(ranks, m):
    size = 4 * 15 * 1_000_003
    near, far = m - 1, ranks - m
    # each waits for its partner's shard before it sends the next
    order = [NEAR] * near + [FAR] * far

    def sends(rank, done):
        return [(rank, done + 1, size / ranks, order[done])] if done < len(order) else []

    expected = deliver(sends, [(rank, 0) for rank in range(ranks)])
    assert on_links("all_to_all", ranks, size // 4).seconds == pytest.approx(expected, rel=1e-12)


def test_point_to_point_uses_one_link():
    numbers = 1_000_003
    assert on_links("send", 3, numbers).seconds == pytest.approx(13e-6 + 4 * numbers / 101e9)
    assert on_links("send", 15, numbers).seconds == pytest.approx(37e-6 + 4 * numbers / 11e9)
    meshed = device(links=DOMAIN - 1)
    assert on_links("send", 3, numbers, meshed).seconds == pytest.approx(13e-6 + 4 * numbers / (101e9 / 4))
    # in a mesh, two of five devices use one of four links, five use all
    for ranks in (2, 5):
        few = on_links("all_gather", ranks, numbers, meshed).seconds
        assert few == pytest.approx((ranks - 1) * 13e-6 + 4 * numbers / (101e9 / 4))


# -- lower bounds ------------------------------------------------------------------------------------------------


def sharded(**axes):
    B, D, F = cg.dims("B D F")
    names = " ".join(f"(f {' '.join(axes)})".split())
    with cg.Graph("mlp") as g:
        h = cg.einsum(g.input("x", (B, D)), g.param("up", (D, F)), "b d, d f -> b f")
        g.output(cg.einsum(h, g.param("down", (F, D)), "b f, f d -> b d"))
    return cg.shard(g, cg.mesh(**axes), {"up": f"d {names}", "down": f"{names} d"})


@pytest.fixture(scope="module")
def readings():
    rows = [r for r in json.loads(PUBLISHED.read_text()) if r["family"] == "allreduce"]
    assert len(rows) == 38
    return rows


def printed(row):
    """Return bytes (a power of two, matched by its printed digits) and the time for eight ranks in seconds."""
    digits, suffix = row["inputs"]["size"][:-1], row["inputs"]["size"][-1]
    size = 2 ** round(math.log2(int(digits) * 1000 ** " KMG".index(suffix)))
    return size, 1.75 * size / (row["value"] * 1e9)


def test_all_reduce_times_match_published_range(readings):
    for row in readings:
        size, taken = printed(row)
        g = declared("all_reduce", 8, size // 4)
        bound, estimate = (cg.seconds(g, row["device"], which) for which in ("lower", "estimate"))
        print(f"{row['device']} {size} B: {taken * 1e6:.1f} us, estimate {estimate / taken - 1:+.1%}")
        assert bound <= taken
        # an A100 reaches three quarters of its data sheet's rate, kernel launches are slow, H200 switches reduce
        assert 0.45 * taken < estimate < 1.08 * taken


def test_measured_link_reproduces_large_all_reduces(readings):
    a100 = cg.load_hardware("a100-80-sxm")
    fitted = {**a100.tables["interconnect"], "per_direction": quantity(227.3, "GB/s"), "latency": quantity(5.61, "us")}
    a100 = replace(a100, tables={**a100.tables, "interconnect": fitted})
    large = [printed(row) for row in readings if row["device"] == "a100-80-sxm" and row["inputs"]["size"][-1] == "G"]
    assert len(large) == 2
    for size, taken in large:
        assert cg.seconds(declared("all_reduce", 8, size // 4), a100) == pytest.approx(taken, rel=0.02)


def test_lower_bound_is_bytes_a_rank_must_receive():
    numbers = 15 * 1_000_003
    size = 4 * numbers

    def least(kind, ranks, times=1):
        return cg.seconds(declared(kind, ranks, times * numbers), device(), "lower")

    assert least("all_reduce", 5) == pytest.approx(size / 101e9)  # sums computed in a switch
    assert least("all_reduce", 15) == pytest.approx(size / 5 / 11e9)  # five NICs carry the sums from ten other ranks
    assert least("all_gather", 5) == pytest.approx(4 * size / 101e9)
    assert least("all_gather", 15) == pytest.approx(10 * size / 5 / 11e9)
    assert least("reduce_scatter", 15) == pytest.approx(10 * size / 15 / 5 / 11e9)
    assert least("all_to_all", 15) == pytest.approx(size * 10 / 15 / 11e9)
    assert least("send", 15) == pytest.approx(size / 101e9)
    assert least("send", 2) == pytest.approx(size / 101e9)


# -- placement of mesh axes --------------------------------------------------------------------------------------


def test_last_mesh_axis_is_within_domains_and_first_between():
    s = sharded(dp=3, tp=5)
    links = {m.axis: m.link for m in cg.communication(s, hardware=device(), B=1, D=7, F=15)}
    assert links == {"dp": "network", "tp": "interconnect"}
    turned = sharded(tp=5, dp=3)
    links = {m.axis: m.link for m in cg.communication(turned, hardware=device(), B=1, D=7, F=15)}
    assert links == {"dp": "interconnect", "tp": "network"}


def test_strided_ranks_share_a_domain_if_they_fit():
    # a domain with seven devices fits two ranks at stride three, but not three
    for outer, domains in ((2, 1), (3, 2)):
        (m,) = cg.communication(sharded(a=outer, b=3), hardware=device(domain=(7, "1")), B=7, D=11, F=18).filter(
            axis="a"
        )
        inside, size = outer / domains, 4 * 7 * 11
        ringed = 2 * (inside - 1) * (13e-6 + size / inside / 101e9)
        ringed += 2 * (domains - 1) * (37e-6 + size / outer / 11e9)
        assert m.link == ("interconnect" if domains == 1 else "network")
        assert m.seconds <= ringed * (1 + 1e-12)


def test_device_without_interconnect_is_its_own_domain():
    h = device()
    alone = replace(h, tables={name: of for name, of in h.tables.items() if name != "interconnect"})
    assert on_links("send", 2, 11, alone).bound == "network"


@pytest.mark.parametrize("which", ["estimate", "lower"])
def test_open_degree_formulas_match_numbers(which):
    n, o = cg.dims("n o")
    s = sharded(o=o, n=n)
    formula = cg.seconds(s, device(), which, B=7, D=11, F=2520)
    for outer, inner in ((1, 1), (1, 2), (2, 1), (3, 2), (1, 5), (3, 5), (2, 6), (2, 10), (7, 3)):
        exact = cg.seconds(s, device(), which, B=7, D=11, F=2520, n=inner, o=outer)
        assert cg.evaluate(formula, n=inner, o=outer) == pytest.approx(exact, rel=1e-12), (outer, inner)
    alone = cg.roofline(s, device(), B=7, D=11, F=2520, n=1, o=1)
    assert [r.links_s for r in alone.rows if r.links_s] == [{"interconnect": 0}] * 2


def test_symbolic_hardware_has_symbolic_links():
    h = device()
    formula = cg.seconds(declared("all_gather", 15, 7), h.symbolic())
    assert {s.name for s in formula.free_symbols} >= {"interconnect", "network"}
    seconds = float(formula.subs(h.bindings()))
    assert seconds == pytest.approx(cg.seconds(declared("all_gather", 15, 7), h), rel=1e-12)


# -- overlap -----------------------------------------------------------------------------------------------------


def test_ideal_overlap_takes_max_of_compute_and_communication():
    s, sizes = sharded(tp=5), {"B": 1009, "D": 1013, "F": 5 * 1019}
    rows = cg.roofline(s, device(), **sizes).rows
    sent = math.fsum(r.seconds for r in rows if r.links_s)
    alone = math.fsum(r.seconds for r in rows if not r.links_s)
    assert cg.seconds(s, device(), **sizes) == pytest.approx(sent + alone)
    roofline = cg.roofline(s, device(), overlap="ideal", **sizes)
    assert roofline.estimate == cg.seconds(s, device(), overlap="ideal", **sizes) == pytest.approx(max(sent, alone))
    assert "the larger of both" in str(roofline)
    orders = [cg.seconds(s, device(), which, **sizes) for which in ("lower", "estimate")]
    assert all(a <= b for a, b in pairwise([orders[0], roofline.estimate, orders[1]]))


def seconds_by_op(g, **sizes):
    """Return the seconds per op over all iterations, by name."""
    return {r.op: r.seconds for r in cg.roofline(g, slow_memory(), **sizes).rows}


def slow_memory():
    """Return devices whose memory is slower than every link, so that local ops take time too."""
    h = device()
    memory = {**h.tables["memory"], "bandwidth": Quantity(10**11, "B/s")}
    return replace(h, tables={**h.tables, "memory": memory}, bandwidth=memory["bandwidth"])


def streams(g, **sizes):
    return cg.seconds(g, slow_memory(), overlap="streams", **sizes)


def test_streams_wait_only_for_dependencies():
    N = cg.dims("N")
    with cg.Graph("g") as g:
        x, y = g.input("x", (N,)), g.input("y", (N,))
        alone = cg.relu(x)
        g.output(cg.ops.collective(y, "all_to_all", 15) + alone)
    t = seconds_by_op(g, N=15 * 10007)
    assert streams(g, N=15 * 10007) == pytest.approx(max(t["relu"], t["all_to_all"]) + t["add"], rel=1e-12)


@pytest.mark.parametrize("apart", [True, False])
def test_in_place_write_waits_for_pending_reads(apart):
    N = cg.dims("N")
    with cg.Graph("g") as g:
        x, y = g.input("x", (N,)), g.input("y", (N,))
        g.output(cg.ops.collective(x, "all_to_all", 15))
        g.output(assign(g.input("z", (N,)) if apart else x, y))
    t = seconds_by_op(g, N=15 * 10007)
    expected = max(t.values()) if apart else sum(t.values())
    assert streams(g, N=15 * 10007) == pytest.approx(expected, rel=1e-12)


@each("packed", [False, True])
@each(("ranks", "size"), [(2, 10007), (15, 10007), (15, 101)])
def test_layer_gathers_overlap_the_previous_layer(ranks, size, packed):
    L, count = cg.dims("L"), 7
    with cg.Graph("g") as g:

        def block(x):
            w = g.param("w", (size, 3))
            w = cg.rearrange(w, "n a -> (a n)", name="pack") if packed else cg.rearrange(w, "n a -> (n a)")
            return cg.relu(x + cg.ops.collective(w, "all_gather", ranks))

        g.output(cg.repeat(L, block, g.input("x", (ranks * size * 3,)), name="layers"))
    t = {name: s / count for name, s in seconds_by_op(g, L=count).items()}
    # packing for a collective runs on its stream
    gathered, rest = t["layers/all_gather"] + t.get("layers/pack", 0), t["layers/add"] + t["layers/relu"]
    assert ("layers/pack" in t) == packed
    expected = max(gathered + count * rest, count * gathered + rest)
    assert streams(g, L=count) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "axes", [{"dp": 3, "zero": 3}, {"dp": 2, "tp": 2, "sequence": True}, {"dp": 2, "tp": 3, "zero": 2}]
)
def test_loop_stream_time_matches_unrolled_iterations(axes):
    B, S, D, F, L = cg.dims("B S D F L")
    with cg.Graph("mlp") as g:

        def block(x):
            with cg.scope("mlp"):
                h = cg.relu(cg.linear(x, "b s d -> b s f", f=F, name="up"))
                return x + cg.linear(h, "b s f -> b s d", d=D, name="down")

        g.output(cg.reduce(cg.repeat(L, block, g.input("x", (B, S, D)), name="layers"), "b s d -> ", "sum"))
    step = cg.training_step(g, optimizer=cg.SGD(), checkpoint=cg.every_block())
    s = cg.parallelize(step, **axes)
    sizes = {"B": 6, "S": 60, "D": 42, "F": 66}
    seconds = streams(s, L=5, **sizes)
    unrolled = cg.unroll(s, L=5)
    unrolled.sharding = None
    with pytest.raises(
        cg.UnsupportedError, match=r"time of '.*' over '[dt]p' in graph 'mlp': expected an axis of a mesh"
    ):
        streams(unrolled, **sizes)
    unrolled.sharding = s.sharding
    assert cg.seconds(s, slow_memory(), L=5, **sizes) == pytest.approx(cg.seconds(unrolled, slow_memory(), **sizes))
    assert seconds == pytest.approx(streams(unrolled, **sizes), rel=1e-9)
    assert cg.seconds(s, slow_memory(), "lower", L=5, **sizes) <= seconds
    assert seconds < cg.seconds(s, slow_memory(), L=5, **sizes)


@pytest.mark.parametrize("every", [False, True])
def test_prefetched_gathers_run_out_with_fast_layers(monkeypatch, every):
    """Layers start behind a long op and run faster than their all-gathers, so that some of them wait."""
    L, count, size = cg.dims("L"), 1009, 10007
    with cg.Graph("g") as g:

        def block(x):
            return cg.relu(x + cg.ops.collective(g.param("w", (size,)), "all_gather", 3))

        long = cg.reduce(g.input("y", (3 * size, 8009)), "d n -> d", "sum", name="long")
        g.output(cg.repeat(L, block, long, name="layers"))
    t = seconds_by_op(g, L=count)
    gathered, rest = t["layers/all_gather"] / count, (t["layers/add"] + t["layers/relu"]) / count
    before = t["long"]
    assert rest < gathered
    if every:  # no layer is left out
        monkeypatch.setattr(finished.__module__ + "._moved", lambda *_: None)
    until = before / (gathered - rest)
    assert count / 3 < until < count / 2
    assert streams(g, L=count) == pytest.approx(count * gathered + rest, rel=1e-9)
    few = int(until) - 1  # all gathers finish in time
    assert streams(g, L=few) == pytest.approx(before + few * rest, rel=1e-9)


def test_streams_require_numbers_and_bounded_ops(monkeypatch):
    L = cg.dims("L")
    with cg.Graph("g") as g:
        g.output(cg.repeat(L, lambda x: cg.ops.collective(x, "all_reduce", 5), g.input("x", (7,)), name="layers"))
    with pytest.raises(cg.BindingError, match="overlap 'streams' of graph 'g': expected numbers, still unbound: L"):
        streams(g)
    assert streams(g, L=10**9) == pytest.approx(10**9 * streams(g, L=1), rel=1e-9)
    monkeypatch.setattr(finished.__module__ + "._MOST", 3)
    with pytest.raises(cg.UnsupportedError, match="overlap 'streams' of graph 'g': more than 3 ops to simulate"):
        streams(g, L=7)


def test_report_names_the_link():
    report = cg.report(sharded(tp=15), device(), B=7, D=11, F=30)
    assert "network-bound" in str(report)


# -- missing figures ---------------------------------------------------------------------------------------------


@each(
    ("table", "key", "says"),
    [
        ("interconnect", "domain", "h100-sxm: interconnect.domain is missing; expected the number of devices"),
        ("interconnect", "latency", "h100-sxm: interconnect.latency is missing; expected the seconds"),
        ("interconnect", "per_direction", "h100-sxm: interconnect.per_direction is missing"),
        ("network", "latency", "h100-sxm: network.latency is missing; expected the seconds"),
        ("network", "per_direction", "h100-sxm: network.per_direction is missing"),
    ],
)
def test_missing_link_figures_raise(table, key, says):
    h = device()
    less = replace(h, tables={**h.tables, table: {k: q for k, q in h.tables[table].items() if k != key}})
    for ask in (lambda g: cg.roofline(g, less), lambda g: cg.communication(g, hardware=less)):
        with pytest.raises(cg.SpecError, match=says.replace(".", r"\.")):
            ask(declared("all_reduce", 15, 7))
    if table == "network":  # not needed within a domain
        assert on_links("all_reduce", 5, 7, less).bound == "interconnect"


def test_domain_size_must_be_an_integer():
    with pytest.raises(cg.SpecError, match=r"interconnect\.domain is 5/2, expected a positive integer"):
        on_links("all_reduce", 5, 7, device(domain=(2.5, "1")))


def test_calibrated_time_uses_estimated_collectives():
    sizes = {"B": 1009, "D": 1013, "F": 5 * 1019}
    seconds = cg.seconds(sharded(tp=5), "h100-sxm", "calibrated", **sizes)
    sent = math.fsum(m.seconds for m in cg.communication(sharded(tp=5), hardware="h100-sxm", **sizes))
    B, D, F = cg.dims("B D F")
    with cg.Graph("rank") as g:
        h = cg.einsum(g.input("x", (B, D)), g.param("up", (D, F)), "b d, d f -> b f")
        g.output(cg.einsum(h, g.param("down", (F, D)), "b f, f d -> b d"))
    alone = cg.seconds(g, "h100-sxm", "calibrated", B=1009, D=1013, F=1019)
    assert sent > 0
    assert seconds == pytest.approx(alone + sent, rel=1e-9)
    beside = (cg.seconds(sharded(tp=5), "h100-sxm", "calibrated", overlap=how, **sizes) for how in ("ideal", "streams"))
    # all communication depends on the last product, and nothing follows it
    assert [*beside] == pytest.approx([max(alone, sent), alone + sent], rel=1e-9)


def test_single_device_queries_reject_collectives():
    N = cg.dims("N")
    g = declared("all_reduce", 5, N)
    with pytest.raises(cg.UnsupportedError, match="'all_reduce' is a collective; expected an op of a single device"):
        cg.crossover(g, device(), "N")
    for ask in (cg.seconds, cg.roofline):
        with pytest.raises(cg.GraphError, match="overlap 'some', expected one of none, ideal, streams"):
            ask(g, device(), overlap="some", N=7)
