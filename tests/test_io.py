import copy
import json
import random

import pytest

import costgraph as cg
from costgraph import CostGraphError, FormatError

B, S, D, H, F, V, L, T = cg.dims("B S D H F V L T")
SIZES = {"B": 2, "S": 7, "D": 12, "H": 3, "F": 11, "V": 13, "L": 3, "T": 5}


def everything() -> cg.Graph:
    """One graph with every op kind, nested bodies, a domain, an assumption and defaults."""
    with cg.Graph("everything", dtype="bf16") as g:
        ids = g.input("ids", (B, S), dtype="int64")
        x = cg.embedding(ids, g.param("table", (V, D), dtype="mxfp4"))
        x = cg.cast(x, "bf16") + g.param("frozen", (D,), grad=False)

        def layer(x):
            q, k, v = (cg.linear(x, "b s d -> b s e", e=D, name=n) for n in "qkv")
            q, k, v = (cg.rearrange(t, "b s (h k) -> b h s k", h=H) for t in (q, k, v))
            y = cg.attention(q, k, v, window=4, p=0.1)
            y = cg.rearrange(y, "b h s k -> b s (h k)")
            return cg.layer_norm(x + cg.mlp(y, F, bias=True))

        x = cg.repeat(L, layer, x, name="layers")
        image = cg.conv(
            g.input("image", (B, 3, T, T)), "b c h w -> b o h w", window=3, stride=2, padding=1, o=D, bias=True
        )
        pooled = cg.pool(cg.relu(image, inplace=True), "max", window=2, stride=1)

        def step(state, x):
            new = cg.tanh(state + x)
            return new, new

        last, states = cg.scan(S, step, x[:, 0], cg.rearrange(x, "b s d -> s b d"))
        joined = cg.concat([last, cg.reduce(pooled, "b c h w -> b c", "mean")])
        wide = cg.expand(joined, "b d -> t b d", t=T)
        moved = cg.transfer(cg.collective(wide, "all_gather", 4))
        (out,) = cg.opaque("sort", [moved], [((T,), "int32")], flops=T, workspace=8 * T)
        cache = g.buffer("cache", (V, D), role="cache")
        cg.scatter(cache, ids, x)
        loss = cg.cross_entropy(cg.einsum(x, cg.cast(g.param("head", (V, D)), "bf16"), "b s d, v d -> b s v"), ids)
        g.output(out, states, loss)
    g.assume("F <= D", "D >= H")
    g.defaults = {"V": 13}
    g.loss = "cross_entropy"
    return g


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    g = everything()
    path = tmp_path_factory.mktemp("graphs") / "everything.json"
    cg.save(g, path)
    return g, path


@pytest.mark.parametrize(
    "question",
    [cg.flops, cg.matmul_flops, cg.bytes_moved, cg.param_count, cg.param_bytes, cg.peak_memory, cg.lifetimes],
    ids=lambda f: f.__name__,
)
def test_loading_gives_the_same_formulas_and_numbers(saved, question):
    g, path = saved
    loaded = cg.load(path)
    assert question(loaded) == question(g)
    assert question(loaded, **SIZES) == question(g, **SIZES)


def test_saving_what_was_loaded_gives_the_same_file(saved, tmp_path):
    _, path = saved
    cg.save(cg.load(path), tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == path.read_text()


def test_assumptions_defaults_and_loss_come_back(saved):
    g, path = saved
    loaded = cg.load(path)
    assert loaded.defaults == {"V": 13}
    assert loaded.loss == "cross_entropy"
    assert [p.requires_grad for p in loaded.params] == [p.requires_grad for p in g.params]
    with pytest.raises(cg.BindingError, match="against the assumption 'F <= D'"):
        cg.flops(loaded, F=100, D=3)


def test_every_op_kind_is_in_the_graph_that_is_saved(saved):
    from costgraph.ops.registry import KINDS

    g, _ = saved
    used = {op.kind.name for op in g.walk()}
    # arange and empty have no operands and stand in the tests of models and of unroll
    assert set(KINDS) - used <= {"arange", "empty"}


def test_the_file_is_networkx_node_link_form(saved):
    import networkx as nx

    g, path = saved
    plain = nx.node_link_graph(json.loads(path.read_text()), edges="edges")
    assert len(plain) == len(g)
    assert nx.is_directed_acyclic_graph(plain)


def test_symbols_with_atoms_come_back(tmp_path):
    with cg.Graph("atoms") as g:
        q, k, v = (g.input(n, (B, H, S, D)) for n in "qkv")
        g.output(cg.attention(q, k, v, window=T))
        g.output(cg.pool(g.input("x", (B, 3, S)), "mean", window=3, stride=2))
    cg.save(g, tmp_path / "g.json")
    assert cg.flops(cg.load(tmp_path / "g.json")) == cg.flops(g)


def damaged(saved, change):
    data = json.loads(saved[1].read_text())
    change(data)
    return data


def first(data, **wanted):
    return next(n for n in data["nodes"] if all(n.get(k) == v for k, v in wanted.items()))


def set_in(**wanted):
    def setter(key, value):
        return lambda data: first(data, **wanted).__setitem__(key, value)

    return setter


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda d: d["graph"].update(schema="other"), "schema 'other', expected 'costgraph/graph/1'"),
        (lambda d: d["graph"].update(dtype="fp33"), "fp33"),
        (lambda d: d["graph"].update(assumptions=["F <="]), "assumption"),
        (
            lambda d: d["graph"].update(assumptions=["F > D"]) or d["graph"]["assumptions"].append("F < D"),
            "contradicts",
        ),
        (lambda d: d["graph"].update(defaults={"V": -1}), "default 'V' is -1, expected a positive integer"),
        (lambda d: d["graph"].update(outputs=["nobody"]), "tensor 'nobody' is not there"),
        (lambda d: d.pop("nodes"), "'nodes' is None, expected list"),
        (lambda d: d.pop("edges"), "'edges' is None, expected list"),
        (lambda d: d["edges"].pop(), "does not agree with the operands"),
        (lambda d: d["nodes"].insert(0, d["nodes"][0]), "a second time, expected unique names"),
        (lambda d: d["nodes"].insert(0, {"id": "x"}), "node 1: 'type' is None, expected str"),
        (lambda d: d["nodes"].reverse(), "is not there, expected one made before"),
        (set_in(kind="gather")("kind", "__import__"), "op kind '__import__', expected one of"),
        (set_in(kind="gather")("operands", ["ids"]), "are malformed"),
        (set_in(kind="gather")("results", []), "has 1 results, the file names 0"),
        (set_in(kind="gather")("attrs", {}), "are malformed"),
        (set_in(kind="pointwise")("attrs", {"function": {"function": "system"}}), "are malformed"),
        (set_in(kind="pointwise")("attrs", {"function": {"eval": "1"}}), "tag 'eval', expected one of"),
        (set_in(id="table")("shape", ["__import__('os')", "D"]), "character"),
        (set_in(id="table")("shape", ["V", "D", "D"]), "expected"),
        (set_in(id="table")("role", "god"), "role 'god', expected one of"),
        (set_in(type="tensor", role="result")("shape", ["7"]), "has shape"),
    ],
)
def test_a_damaged_file_is_refused(saved, tmp_path, change, text):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(damaged(saved, change)))
    with pytest.raises(FormatError) as caught:
        cg.load(path)
    assert text in str(caught.value)
    assert "bad.json" in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"graph": 1}',
        b"[" * 100_000,
        b'{"graph": {"schema": NaN}}',
        b"1" * 5000,
    ],
)
def test_what_is_no_graph_is_refused(tmp_path, content):
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=r"bad\.json"):
        cg.load(path)


def test_a_file_that_is_not_there_or_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(FormatError, match="no JSON that can be read"):
        cg.load(tmp_path / "none.json")
    with pytest.raises(FormatError, match="cannot be written"):
        cg.save(everything(), tmp_path / "no" / "folder.json")


def places(data, path=()):
    yield path
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield from places(value, (*path, key))


def test_random_damage_is_refused_or_harmless(saved, tmp_path):
    rng = random.Random(7)
    original = json.loads(saved[1].read_text())
    spots = [p for p in places(original) if p]
    path = tmp_path / "fuzz.json"
    for _ in range(150):
        data = copy.deepcopy(original)
        *route, key = rng.choice(spots)
        inner = data
        for k in route:
            inner = inner[k]
        inner[key] = rng.choice(
            [None, -1, 0, 1.5, "", "D", "x y", [], {}, True, [None], {"size": "2**9**9"}, "1/0", 10**30]
        )
        path.write_text(json.dumps(data))
        try:
            g = cg.load(path)
            for question in (cg.flops, cg.bytes_moved, cg.peak_memory, cg.param_count):
                question(g)
        except CostGraphError:
            pass
