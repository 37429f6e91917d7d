"""Multi-level networks, against simulated message passing, and invalid network files."""

from dataclasses import replace

import pytest
from test_links import FAR, NEAR, declared, deliver, device, ring, sharded

import costgraph as cg

#: seconds and B/s of a higher level, oversubscribed; a leaf joins three domains of five, a spine seven leaves
TOP = (53e-6, 7e9)
LEAF, ALL = 15, 105
TEXT = f"""
name = "two levels"
topology = "tree"
[sources]
OWN = "this test"
[levels.leaf]
devices = {{ value = {LEAF}, unit = "1", source = ["OWN"] }}
[levels.spine]
devices = {{ value = {ALL}, unit = "1", source = ["OWN"] }}
per_direction = {{ value = 21, unit = "GB/s", source = ["OWN"] }}
latency = {{ value = 53, unit = "us", source = ["OWN"] }}
oversubscription = {{ value = 3, unit = "1", source = ["OWN"] }}
"""


def written(folder, text):
    path = folder / "own.toml"
    path.write_text(text)
    return path


@pytest.fixture
def network(tmp_path):
    return cg.load_network(written(tmp_path, TEXT))


def taken(kind, ranks, numbers, network, which="estimate"):
    return cg.seconds(declared(kind, ranks, numbers), device(), which, network=network)


@pytest.mark.parametrize(("ranks", "m", "k", "j"), [(5, 5, 1, 1), (15, 5, 3, 1), (30, 5, 3, 2), (105, 5, 3, 7)])
def test_hierarchical_rings_match_formula(network, ranks, m, k, j):
    part = 30_030
    size = 4 * part * ranks
    expected = ring(j, size / m / k, TOP) + ring(k, size / m, FAR) + ring(m, size, NEAR)
    assert taken("all_gather", ranks, part, network) == pytest.approx(expected, rel=1e-12)
    assert taken("reduce_scatter", ranks, part * ranks, network) == pytest.approx(expected, rel=1e-12)
    large = 4 * 10**8 * ranks
    rings = 2 * (ring(j, large / m / k, TOP) + ring(k, large / m, FAR) + ring(m, large, NEAR))
    assert taken("all_reduce", ranks, large // 4, network) == pytest.approx(rings, rel=1e-12)


def test_all_to_all_uses_nearest_common_level(network):
    size = 4 * 30 * 1_000_003
    order = [NEAR] * 4 + [FAR] * 10 + [TOP] * 15

    def sends(rank, done):
        return [(rank, done + 1, size / 30, order[done])] if done < len(order) else []

    expected = deliver(sends, [(rank, 0) for rank in range(30)])
    assert taken("all_to_all", 30, size // 4, network) == pytest.approx(expected, rel=1e-12)
    for ranks, (latency, bandwidth) in ((5, NEAR), (15, FAR), (30, TOP)):
        assert taken("send", ranks, 1_000_003, network) == pytest.approx(latency + 4 * 1_000_003 / bandwidth)


def test_lower_bound_is_traffic_of_each_level(network):
    numbers = 30 * 1_000_003
    size = 4 * numbers
    # five cards receive the shards of ten ranks in their leaf; fifteen receive shards from another leaf
    least = max(10 / 30 * size / 5 / 11e9, 15 / 30 * size / LEAF / 7e9)
    assert taken("all_gather", 30, numbers // 30, network, "lower") == pytest.approx(least)
    assert taken("all_to_all", 30, numbers, network, "lower") == pytest.approx(size / 2 / 7e9)
    assert taken("all_reduce", 30, numbers, network, "lower") == pytest.approx(size / LEAF / 7e9)
    for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"):
        for ranks in (2, 5, 10, 30, 105):
            bound, found = (taken(kind, ranks, 210 * 10007, network, which) for which in ("lower", "estimate"))
            assert bound <= found, (kind, ranks)


def test_single_level_equals_device_network(tmp_path):
    alone = TEXT[: TEXT.index("[levels.spine]")].replace(f"value = {LEAF}", "value = 10000")
    network = cg.load_network(written(tmp_path, alone))
    for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"):
        for ranks in (3, 15, 1000):
            numbers = 3000 * 1009
            assert taken(kind, ranks, numbers, network) == cg.seconds(declared(kind, ranks, numbers), device())


@pytest.mark.parametrize("which", ["estimate", "lower"])
def test_symbolic_degrees_match_numeric_ones(network, which):
    n, o = cg.dims("n o")
    s = sharded(o=o, n=n)
    sizes = {"B": 7, "D": 11, "F": 2520}
    formula = cg.seconds(s, device(), which, network=network, **sizes)
    for outer, inner in ((1, 1), (3, 2), (1, 5), (3, 5), (7, 5), (2, 15), (7, 15)):
        exact = cg.seconds(s, device(), which, network=network, n=inner, o=outer, **sizes)
        assert cg.evaluate(formula, n=inner, o=outer) == pytest.approx(exact, rel=1e-12), (outer, inner)


def test_rows_name_network_level(network):
    s, sizes = sharded(pp=7, dp=3, tp=5), {"B": 1, "D": 7, "F": 105}
    found = {m.axis: m.link for m in cg.communication(s, hardware=device(), network=network, **sizes)}
    assert found == {"pp": "spine", "dp": "leaf", "tp": "interconnect"}
    (row,) = cg.roofline(declared("all_reduce", 30, 7), device(), network=network).rows
    assert row.bound == "spine"


def test_network_names_and_objects_are_equivalent():
    assert cg.list_networks() == ["dgx-superpod", "meta-24k", "tpu-v4", "tpu-v5e", "tpu-v5p"]
    for name in cg.list_networks():
        found = cg.load_network(name)
        assert all(q.source for _, q in found.rows)
        assert found.name in str(found)
        both = [cg.seconds(declared("all_reduce", 256, 7), "h100-sxm", network=n) for n in (name, found)]
        assert both[0] == both[1]
    # an aggregation switch gives each device a seventh of 50 GB/s for sends to another pod
    far, near = (cg.seconds(declared("send", n, 10**10), "h100-sxm", network="meta-24k") for n in (24576, 3072))
    assert far / near == pytest.approx(7, rel=1e-3)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("value = 105", "value = 11", "spine: devices is 11, expected an integer of at least 15"),
        ("value = 15,", "value = 2.5,", "leaf: devices is 5/2, expected an integer of at least 1"),
        ("value = 3,", "value = 0.5,", "spine: oversubscription is 1/2, expected 1 or more"),
        ('"GB/s"', '"GB"', "spine: per_direction: unit 'GB', expected a unit of B/s"),
        ('"us", source = ["OWN"]', '"us", source = ["X"]', r"latency: source 'X', expected keys of \[sources\]"),
        ("latency", "lag", "lag"),
        ("levels.leaf", "levels.network", "'network', expected a lower-case name other than that of a link"),
        ('topology = "tree"', "", "topology"),
        ("devices", "device", "devices"),
    ],
)
def test_invalid_network_files_are_refused(tmp_path, old, new, says):
    assert old in TEXT
    with pytest.raises(cg.SpecError, match=says):
        cg.load_network(written(tmp_path, TEXT.replace(old, new)))


def test_mismatched_networks_are_refused(network):
    with pytest.raises(cg.SpecError, match=r"network 'x' is unknown: expected the path of a \.toml"):
        cg.seconds(declared("all_reduce", 5, 7), device(), network="x")
    with pytest.raises(cg.SpecError, match="106 ranks that are 1 apart, expected the 105 devices that the spine joins"):
        taken("all_reduce", 106, 7, network)
    wide = replace(device(domain=(17, "1")))
    with pytest.raises(cg.SpecError, match=r"network own: leaf\.devices is 15, expected at least the 17 of h100-sxm"):
        cg.seconds(declared("all_reduce", 5, 7), wide, network=network)
    less = {k: q for k, q in device().tables["network"].items() if k != "latency"}
    lacking = replace(device(), tables={**device().tables, "network": less})
    with pytest.raises(cg.SpecError, match=r"h100-sxm: network\.latency is missing"):
        cg.seconds(declared("all_reduce", 15, 7), lacking, network=network)
