"""GPT-2 as nanoGPT has it, without biases, and the zoo."""

from decimal import Decimal

import sympy
from published_rows import ROWS, derives
from shared import load

import costgraph as cg


def nanogpt():
    B, S, D, H, L, V, P = cg.dims("B S D H L V P")

    def block(x):
        y = cg.layer_norm(x, bias=False, name="attention/norm")
        kqv = cg.linear(y, "b s d -> b s n h k", n=3, h=H, k=D / H, name="attention/kqv")
        q, k, v = (cg.rearrange(kqv[:, :, i], "b s h k -> b h s k") for i in range(3))
        y = cg.rearrange(cg.attention(q, k, v, name="attention"), "b h s k -> b s (h k)")
        x = x + cg.linear(y, "b s e -> b s d", d=D, name="attention/proj")
        return x + cg.nn.mlp(cg.layer_norm(x, bias=False, name="mlp/norm"), 4 * D, name="mlp")

    with cg.Graph("nanogpt") as g:
        tokens = g.input("tokens", (B, S), dtype="int64")
        table = g.param("token", (V, D))
        x = cg.embedding(tokens, table) + cg.embedding(cg.ops.arange(S), g.param("position", (P, D)))
        x = cg.layer_norm(cg.repeat(L, block, x, name="layers"), bias=False)
        with cg.scope("head"):
            g.output(cg.einsum(x, table, "b s d, v d -> b s v"))
    return g


def params_of(g, scope, *, vectors=True, **dims):
    """Count the parameters whose names begin so, of a single layer where they are inside one."""
    found = [t for t in g.params if t.name.startswith(scope) and (vectors or t.ndim > 1)]
    formula = sum(sympy.prod(t.shape) for t in found)
    return cg.evaluate(formula, **{s.name: dims[s.name] for s in formula.free_symbols})


NANOGPT = {"D": 768, "H": 12, "V": 50257, "P": 1024}


@derives("nanogpt-total-124337664")
def nanogpt_total(row):
    return cg.param_count(nanogpt(), **NANOGPT, L=12)


@derives(
    "nanogpt-position-786432",
    "nanogpt-token-38597376",
    "nanogpt-attention-2360064",
    "nanogpt-mlp-4719360",
    "nanogpt-params-7079424",
)
def nanogpt_part(row):
    part = row["id"].split("-")[1]
    scope = {"attention": "layers/attention", "mlp": "layers/mlp", "params": "layers"}.get(part, part)
    return params_of(nanogpt(), scope, **NANOGPT)


@derives("nanogpt-12-84953088")
def nanogpt_blocks(row):
    g = nanogpt()
    return cg.param_count(g, **NANOGPT, L=13) - cg.param_count(g, **NANOGPT, L=1)


@derives(*(i for i in ROWS if i.startswith("nanogpt-flops-") and not i.endswith(("-total", "-backward_total"))))
def nanogpt_flops(row):
    # biases are no matmul, so that the zoo's GPT-2 answers
    part = row["id"].removeprefix("nanogpt-flops-")
    scope = {
        "block": "layers",
        "12-blocks": "layers",
        "dense-(lm-head)": "head",
        "forward_total": None,
    }.get(part, f"layers/{part.replace('attention-', 'attention/')}")
    depth = 12 if part in ("12-blocks", "forward_total") else 1
    table = cg.costs(load("gpt2"), count="full", B=1, S=1024, L=depth).filter(kind="matmul")
    return (table if scope is None else table.filter(scope=scope)).total().matmul


@derives("params-llama2-7b", "params-llama3-8b", "params-llama3-70b", "params-gpt2", "params-gpt2-xl")
def zoo_params(row):
    name = row["id"].removeprefix("params-").replace("llama", "llama-")
    g = load(name)
    renamed = {"Hkv": "G", "dh": "K", "ctx": "P"}
    sizes = {renamed.get(k, k): v for k, v in row["inputs"].items() if k not in ("biases", "tied")}
    assert sizes.items() <= g.defaults.items()
    return cg.param_count(g)


@derives("nar-params-1.7B", "nar-params-145.6B")
def megatron_params(row):
    n = row["inputs"]
    sizes = {"D": n["h"], "H": n["heads"], "F": 4 * n["h"], "L": n["l"], "V": n["V"], "P": n["s"]}
    return Decimal(cg.param_count(load("gpt2", symbolic=True), **sizes)) / 10**9


def llama():
    return load("llama-3-8b", symbolic=True)


@derives("sb-tf-q1-attn")
def attention_share(row):
    # as many heads of keys as of queries, D = H*K, F = 4*D
    sizes = {"D": 4096, "H": 32, "G": 32, "K": 128, "F": 4 * 4096}
    attention, whole = (params_of(llama(), scope, vectors=False, **sizes) for scope in ("layers/attention", "layers"))
    return Decimal(attention) / whole


@derives("sb-tf-frac")
def attention_to_the_rest(row):
    S, D, H, G, K, F = cg.dims("S D H G K F")
    layers = cg.costs(llama(), count="full").filter(kind="matmul", scope="layers")
    pairs = [layers.filter(scope=f"layers/attention/{part}").total().matmul for part in ("scores", "reduce")]
    rest = layers.total().matmul - sum(pairs)
    ratio = (sum(pairs) / rest).subs({F: 4 * D, G: H}).subs(H, D / K)
    return ratio, S / (8 * D)


@derives("sb-train-q1-ffw", "sb-train-q1-attn")
def llama_13b_part(row):
    g = load("llama-2-13b")
    scope = "layers/mlp" if row["id"].endswith("ffw") else "layers/attention"
    return g.defaults["L"] * params_of(g, scope, vectors=False, **g.defaults)


@derives("sb-train-q1-vocab")
def llama_13b_vocabulary(row):
    g = load("llama-2-13b")
    return params_of(g, "tokens", **g.defaults) + params_of(g, "head", **g.defaults)


@derives("sb-at-attn")
def llama_70b_attention(row):
    g = load("llama-3-70b")
    return g.defaults["L"] * params_of(g, "layers/attention", vectors=False, **g.defaults)


@derives("sb-inf-q1")
def tied_llama(row):
    n = row["inputs"]
    sizes = {"L": n["L"], "D": n["D"], "F": n["F"], "H": n["N"], "G": n["K"], "K": n["H"], "V": n["V"]}
    return cg.param_count(llama(), **sizes) - n["V"] * n["D"]  # one table for both ends
