"""Tori against link-by-link message simulation, and against Google's published pod figures."""

import heapq
import math
from dataclasses import replace
from itertools import combinations, permutations, product
from math import prod

import numpy as np
import pytest
from test_links import declared, sharded

import costgraph as cg
from costgraph.hardware.units import quantity
from costgraph.plan.serving import _between

#: seconds and B/s of a link, both prime
HOP, LINK = 13e-6, 7e9


def torus(*sizes, rates=None):
    """Return a device in a torus with the given extents in x, y and z, and instantaneous memory."""
    h100 = cg.load_hardware("h100-sxm")
    levels = {
        name: {
            "devices": quantity(prod(sizes[: i + 1]), "1"),
            "latency": quantity(13, "us"),
            "per_link_per_direction": quantity((rates or [7] * len(sizes))[i], "GB/s"),
        }
        for i, name in enumerate("xyz"[: len(sizes)])
    }
    cluster = replace(cg.load_network("tpu-v4"), id="own", levels=levels)
    memory = {**h100.tables["memory"], "bandwidth": quantity(10**9, "GB/s")}
    return replace(h100, tables={**h100.tables, "memory": memory}, bandwidth=memory["bandwidth"], cluster=cluster)


def taken(kind, ranks, numbers, device, which="estimate"):
    return cg.seconds(declared(kind, ranks, numbers), device, which)


# -- message simulation --------------------------------------------------------------------------------------------


def play(starts, onward):
    """Simulate messages hop by hop and return the last arrival; a link carries one message at a time.

    `onward(message)` returns the messages that a device sends on arrival: link, bytes and message each.
    """
    events, free, last, serial = [(0.0, i, m) for i, m in enumerate(starts)], {}, 0.0, len(starts)
    while events:
        now, _, message = heapq.heappop(events)
        last = max(last, now)
        for link, size, sent in onward(message):
            start = max(now, free.get(link, 0.0))
            free[link] = start + size / LINK
            heapq.heappush(events, (start + HOP + size / LINK, serial := serial + 1, sent))
    return last


def neighbour(at, dimension, way, sizes, wraps):
    """Return the neighbour of a device in a dimension, or None at the end of a line."""
    to = at[dimension] + way
    if not 0 <= to < sizes[dimension]:
        if not wraps:
            return None
        to %= sizes[dimension]
    return (*at[:dimension], to, *at[dimension + 1 :])


def gather(sizes, size, wraps=True):
    """Simulate an all-gather in d rotated dimension orders, each with 1/d of the bytes.

    In each phase, a device sends everything it has both ways around its ring, once the previous ring has finished. All
    orders run concurrently, as each phase uses a different dimension per order.
    """
    d, n, total = len(sizes), prod(sizes), 0.0
    devices = [*product(*map(range, sizes))]
    for phase in range(d):
        starts, parts = [], {}
        for order in range(d):
            here = (order + phase) % d
            parts[here] = size / d / n * prod(sizes[(order + p) % d] for p in range(phase))
            for at, way in product(devices, (1, -1)):
                starts.append((at, here, way, sizes[here] // 2 if wraps else sizes[here] - 1))

        def onward(message, parts=parts):
            at, here, way, left = message
            to = neighbour(at, here, way, sizes, wraps)
            # half of the data from the antipode of an even ring arrives each way
            halved = 2 if wraps and left == 1 and sizes[here] % 2 == 0 else 1
            return [((at, here, way), parts[here] / halved, (to, here, way, left - 1))] if left and to else []

        total += play(starts, onward)
    return total


@pytest.mark.parametrize("sizes", [(3,), (4,), (7,), (4, 4), (5, 5), (3, 3, 3), (4, 4, 4)])
def test_collectives_use_both_ring_directions_in_all_dimensions(sizes):
    n, part = prod(sizes), 30_030
    expected = gather(sizes, 4 * part * n)
    assert taken("all_gather", n, part, torus(*sizes)) == pytest.approx(expected, rel=1e-12)
    assert taken("reduce_scatter", n, part * n, torus(*sizes)) == pytest.approx(expected, rel=1e-12)
    assert taken("all_reduce", n, part * n, torus(*sizes)) == pytest.approx(2 * expected, rel=1e-12)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_partial_ring_is_a_line(count):
    part = 30_030
    expected = gather((count,), 4 * part * count, wraps=False)
    assert taken("all_gather", count, part, torus(7, 3)) == pytest.approx(expected, rel=1e-12)


def test_partial_slice_consists_of_lines():
    whole = torus(3, 3)
    rings = {name: {**level, "ring": quantity(16, "1")} for name, level in whole.cluster.levels.items()}
    part = replace(whole, cluster=replace(whole.cluster, levels=rings))
    expected = gather((3, 3), 4 * 30_030 * 9, wraps=False)
    assert taken("all_gather", 9, 30_030, part) == pytest.approx(expected, rel=1e-12)
    lines = HOP * 4 + routed((3, 3), 4 * 10007, False)
    assert taken("all_to_all", 9, 9 * 10007, part) == pytest.approx(lines, rel=1e-12)
    for kind in ("all_gather", "all_reduce", "all_to_all", "send"):
        assert taken(kind, 9, 9 * 10007, part, "lower") <= taken(kind, 9, 9 * 10007, part)


def routed(sizes, share, wraps):
    """Return the longest link time in an all-to-all with dimension-ordered shortest-path routing.

    Messages to the antipode split evenly over both directions.
    """
    load = {}
    for source, target in product(product(*map(range, sizes)), repeat=2):
        at = source
        for i, m in enumerate(sizes):
            ahead = (target[i] - at[i]) % m
            ways = (
                [(1, ahead), (-1, m - ahead)] if wraps else [(1 if target[i] > at[i] else -1, abs(target[i] - at[i]))]
            )
            least = min(steps for _, steps in ways) if at[i] != target[i] else 0
            best = [way for way, steps in ways if steps == least and least]
            for way in best:
                spot = at
                for _ in range(least):
                    load[spot, i, way] = load.get((spot, i, way), 0) + share / len(best)
                    spot = neighbour(spot, i, way, sizes, wraps)
            at = (*at[:i], target[i], *at[i + 1 :])
    return max(load.values()) / LINK


@pytest.mark.parametrize("sizes", [(3,), (4,), (7,), (5, 3), (4, 6), (3, 4, 5)])
def test_all_to_all_is_bound_by_bisection(sizes):
    n = prod(sizes)
    numbers = n * 10007
    hops = sum(m // 2 for m in sizes)
    expected = routed(sizes, 4 * 10007, True)
    assert taken("all_to_all", n, numbers, torus(*sizes)) == pytest.approx(HOP * hops + expected, rel=1e-12)
    assert taken("all_to_all", n, numbers, torus(*sizes), "lower") == pytest.approx(expected, rel=1e-12)
    line = HOP * 4 + routed((5,), 4 * 10007, False)
    assert taken("all_to_all", 5, 5 * 10007, torus(7, 3)) == pytest.approx(line, rel=1e-12)


def balanced(sizes, links):
    """Return the least time over all mixtures of orders, per byte of a rank's shard: the best vertex of a linear
    program.

    With k orders, k dimensions are saturated, which determines the shares. The optimum is the best feasible vertex.
    """
    d, best = len(sizes), math.inf
    # traffic in a dimension: the data gathered along earlier dimensions, times the other members of its ring
    loads = np.array([
        [prod(sizes[j] for j in order[: order.index(i)]) * (sizes[i] - 1) / links[i] for i in range(d)]
        for order in permutations(range(d))
    ])  # fmt: skip
    for k in range(1, d + 1):
        for orders, busy in product(combinations(range(len(loads)), k), combinations(range(d), k)):
            system = np.ones((k + 1, k + 1))
            system[:k, :k] = loads[np.ix_(orders, busy)].T * 1e9
            system[:k, k], system[k, k] = -1, 0
            if abs(np.linalg.det(system)) > 1e-9:
                *shares, spent = np.linalg.solve(system, [0] * k + [1])
                each = np.array(shares) @ loads[list(orders)] * 1e9
                if min(shares) >= -1e-12 and max(each) <= spent * (1 + 1e-12):
                    best = min(best, spent)
    return best / 1e9


@pytest.mark.parametrize(
    ("sizes", "rates"),
    [((4, 16), (7, 7)), ((16, 20, 28), (7, 7, 7)), ((3, 5), (7, 1)), ((3, 3, 11), (5, 7, 1)), ((2, 8), (7, 7))],
)
def test_dimension_orders_balance_link_load(sizes, rates):
    n, part = prod(sizes), 10**9 + 7
    links = [rate * 1e9 * (1 if m == 2 else 2) for m, rate in zip(sizes, rates, strict=True)]
    latency = HOP * sum(m // 2 for m in sizes)
    expected = 4 * part * balanced(sizes, links)
    found = taken("all_gather", n, part, torus(*sizes, rates=rates))
    assert found - latency == pytest.approx(expected, rel=1e-9)
    assert taken("all_gather", n, part, torus(*sizes, rates=rates), "lower") == pytest.approx(expected, rel=1e-9)


def test_tpu_v4_pod_matches_published_figures():
    n, numbers = 4096, 4096 * 10**9
    found = {}
    for kind in ("all_to_all", "all_reduce"):
        rows = cg.roofline(declared(kind, n, numbers), "tpu-v4", network="tpu-v4").rows
        found[kind] = sum(s for row in rows for s in row.links_s.values())
    # a quarter of all bytes crosses the bisection each way: two cuts with 256 links; the page states 24 TB/s
    crossing = n * 4 * numbers / 4 / found["all_to_all"]
    assert crossing == pytest.approx(2 * 16 * 16 * 45e9, rel=1e-6)
    assert crossing == pytest.approx(24e12, rel=0.05)
    # bytes sent by all devices
    sent = n * 2 * (n - 1) / n * 4 * numbers / found["all_reduce"]
    assert sent == pytest.approx(1.1e15, rel=0.01)


def test_four_v5e_devices_in_a_row_have_no_ring():
    # scaling-book, sharding.md, quiz 2: 3 hops of 8.4 MB at 45 GB/s, 560 us; measured 680 us
    (row,) = cg.roofline(declared("all_gather", 4, 2048 * 8192 // 8), "tpu-v5e", network="tpu-v5e").rows
    (spent,) = row.links_s.values()
    assert spent == pytest.approx(3 * (1e-6 + 2048 * 8192 * 2 / 4 / 45e9), rel=1e-12)
    assert spent == pytest.approx(560e-6, rel=0.01)
    assert spent < 680e-6


# -- axis placement ------------------------------------------------------------------------------------------------


def test_inner_axes_fill_first_dimensions():
    sizes = {"B": 1, "D": 7, "F": 105}
    (tp, dp) = (
        cg.communication(sharded(dp=15, tp=7), hardware=torus(7, 3, 5), **sizes).filter(axis=axis).rows[0]
        for axis in ("tp", "dp")
    )
    assert (tp.link, dp.link) == ("x", "y+z")
    assert tp.seconds == taken("all_reduce", 7, 7, torus(7))
    assert dp.seconds == taken("all_reduce", 15, 7, torus(3, 5))
    assert taken("send", 2, 1_000_003, torus(7, 3)) == pytest.approx(HOP + 4 * 1_000_003 / LINK)


def test_estimate_is_not_below_lower_bound():
    for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"):
        for ranks in (1, 2, 3, 7, 14, 21, 42, 105):
            bound, found = (taken(kind, ranks, 210 * 10007, torus(7, 3, 5), w) for w in ("lower", "estimate"))
            assert bound <= found, (kind, ranks)


def test_sizes_may_be_symbolic_but_not_degrees():
    n, o = cg.dims("n o")
    s, sizes = sharded(o=3, n=7), {"D": 11, "F": 2520}
    formula = cg.seconds(s, torus(7, 3), **sizes)
    assert cg.evaluate(formula, B=5) == pytest.approx(cg.seconds(s, torus(7, 3), B=5, **sizes), rel=1e-12)
    with pytest.raises(cg.UnsupportedError, match="o ranks that are n apart in a torus; expected bound sizes"):
        cg.seconds(sharded(o=o, n=n), torus(7, 3), B=5, **sizes)


def test_degrees_without_rings_are_refused():
    text = r"2 ranks that are 3 apart.*2 of the 8 devices along x, 3 apart"
    with pytest.raises(cg.SpecError, match=text):
        cg.seconds(sharded(dp=2, tp=3), torus(8, 3), B=1, D=7, F=6)
    with pytest.raises(cg.SpecError, match=r"10 ranks that are 1 apart.*1.42857 of the 3 devices along y, 1 apart"):
        taken("all_gather", 10, 7, torus(7, 3))
    with pytest.raises(cg.SpecError, match="but the torus joins at most 21 devices"):
        taken("all_gather", 42, 7, torus(7, 3))
    own = torus(7)
    levels = {"x": {key: q for key, q in own.cluster.levels["x"].items() if key != "latency"}}
    lacking = replace(own, tables={**own.tables, "interconnect": {}}, cluster=replace(own.cluster, levels=levels))
    with pytest.raises(cg.SpecError, match=r"h100-sxm: interconnect\.latency is missing"):
        taken("all_gather", 7, 7, lacking)
    with pytest.raises(cg.SpecError, match="network own is a torus, expected levels of switches"):
        _between(own, 2)


@pytest.mark.parametrize(
    ("level", "says"),
    [
        ("devices = {q5}", "y: per_link_per_direction is missing; expected it in all levels of a torus"),
        ("devices = {q5}\nper_link_per_direction = {rate}", "y: devices is 5, expected a multiple of 3 in a torus"),
        (
            "devices = {q6}\nper_link_per_direction = {rate}\nring = {q1}",
            "y: ring is 1, expected an integer of at least 2",
        ),
        (
            "devices = {q6}\nper_link_per_direction = {rate}\nper_direction = {rate}",
            "y: per_direction together with per_link_per_direction; expected no switches in a torus",
        ),
    ],
)
def test_incomplete_torus_file_is_refused(tmp_path, level, says):
    def number(value, unit):
        return f'{{ value = {value}, unit = "{unit}", source = ["OWN"] }}'

    rate = number(7, "GB/s")
    filled = (
        level.replace("{q5}", number(5, "1"))
        .replace("{q6}", number(6, "1"))
        .replace("{q1}", number(1, "1"))
        .replace("{rate}", rate)
    )
    text = 'name = "own"\ntopology = "torus"\n[sources]\nOWN = "this test"\n[levels.x]\n'
    path = tmp_path / "own.toml"
    path.write_text(f"{text}devices = {number(3, '1')}\nper_link_per_direction = {rate}\n[levels.y]\n{filled}\n")
    with pytest.raises(cg.SpecError, match=says):
        cg.load_network(path)
