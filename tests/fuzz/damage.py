"""Valid files, and every way to damage one node of them."""

import copy
import json

import costgraph as cg

B, S, D, H, F, V, L, T = cg.dims("B S D H F V L T")

REPLACEMENTS = [
    None, True, False, -1, 0, 1, 3, 10**30, 1.5, -0.0, "", "0", "-1", "1/2", "D", "2*D", "0 - D", "x y", "none", "fp8",
    "2**9**9", "(A+B+C)**64", "\ud800", "\x00", "x" * 10**5, [], {}, [None], ["B"], ["B", "S", "D"], {"size": "3"},
    {"size": "0"}, {"size": "-D"}, {"size": "7/2"}, {"tuple": []}, {"dict": {}}, {"dtype": "int4"},
    {"pattern": "b s d -> b"}, {"pattern": "b s d, d f -> b s f"}, {"pattern": "a b c d e ->"},
    {"function": {"function": "add"}}, {"function": "exp"}, {"domain": [True, None]}, {"graph": {}}, {"float": "-inf"},
    {"tuple": [{"size": "B"}, {"size": "S"}, {"size": "D"}]}, {"tuple": [0, 0]}, {"tuple": [1, 0, 2]},
]  # fmt: skip


def dense():
    with cg.Graph("dense", dtype="bf16") as g:
        x = g.input("x", (B, S, D))
        y = cg.rearrange(cg.linear(x, "b s d -> b s f", f=F, bias=True), "b s (h k) -> b h s k", h=H)
        z = cg.reduce(cg.relu(y, inplace=False) * 2.0, "b h s k -> b h s", "mean")
        wide = cg.ops.expand(z, "b h s -> b h s t", t=T)
        g.output(cg.ops.concat([wide, wide]), y[:, :, 1:, 0])
        g.assume("F >= H")
        g.defaults = {"D": 12}
    return g


def looped():
    with cg.Graph("looped") as g:
        scale = g.buffer("scale", (D,))

        def layer(x):
            with cg.kernel("act", workspace=8 * D):
                y = cg.tanh(x * scale)
            return y + cg.linear(y, "b d -> b e", e=D)

        x = cg.repeat(L, layer, g.input("x", (B, D)), name="layers")

        def step(state, item):
            new = cg.ops.pointwise("exp", state + item)
            return new, new

        g.output(*cg.scan(S, step, x, g.input("items", (S, B, D))))
    return g


def varied():
    with cg.Graph("varied", dtype="bf16") as g:
        ids = g.input("ids", (B, S), dtype="int64")
        x = cg.ops.cast(cg.embedding(ids, g.param("table", (V, D), dtype="mxfp4")), "bf16")
        g.output(cg.ops.scatter(g.buffer("cache", (V, D), role="cache"), ids, x, inplace=False))
        g.output(*cg.opaque("sort", [x], [((T,), "int32")], flops=T, workspace=8 * T))
        g.output(cg.ops.transfer(cg.ops.collective(cg.dropout(x, 0.1), "all_gather", 4)), cg.ops.arange(S))
        image = g.input("image", (B, 3, T, T))
        g.output(cg.nn.pool(cg.conv(image, "b c h w -> b o h w", window=3, stride=2, padding=1, o=D), "max", window=2))
        g.output(cg.einsum(g.param("p", (B, S)), g.param("q", (S, T)), g.param("r", (T, V)), "b s, s t, t v -> b v"))
    return g


def attended():
    with cg.Graph("attended") as g:
        q, k, v = (g.input(n, (B, H, S, D)) for n in "qkv")
        g.output(cg.attention(q, k, v, window=W_, p=0.1))
    return g


def trained():
    with cg.Graph("trained") as g:
        w = g.param("w", (D, D))

        def layer(x):
            return x + cg.tanh(cg.linear(x, "b d -> b e", e=D)) @ w

        x = cg.repeat(L, layer, g.input("x", (B, D), grad=True), name="layers")
        g.output(cg.reduce(x, "b d -> ", "mean"))
    return cg.backward(g)


W_ = cg.dims("W")
GRAPHS = {f.__name__: f for f in (dense, looped, varied, attended, trained)}


def saved(name, folder):
    path = folder / f"{name}.json"
    cg.save(GRAPHS[name](), path)
    return json.loads(path.read_text())


def places(data, path=()):
    """Yield paths to every node of a JSON value except the root."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def at(data, route):
    for key in route:
        data = data[key]
    return data


def changed(data, route, how, value=None):
    """Return a copy with one node deleted, replaced, duplicated or swapped with another."""
    out = copy.deepcopy(data)
    *way, key = route
    inner = at(out, way)
    if how == "delete":
        del inner[key]
    elif how == "replace":
        inner[key] = value
    elif how == "twice" and isinstance(inner, list):
        inner.insert(key, copy.deepcopy(inner[key]))
    elif how == "twice":
        inner[f"{key}2"] = copy.deepcopy(inner[key])
    else:
        *its_way, its_key = value
        other = at(out, its_way)
        inner[key], other[its_key] = copy.deepcopy(other[its_key]), copy.deepcopy(inner[key])
    return out
