"""Mixtures of experts and latent attention, declared with what there is: routing, gathered rows, one product."""

from fractions import Fraction

import sympy
from published_rows import derives

import costgraph as cg

B, S, D, F, V = cg.dims("B S D F V")


def routed(g, x, experts, chosen, width):
    """Add to x what the experts make of their tokens; each has the same number of them."""
    tokens = cg.rearrange(x, "b s d -> (b s) d")
    scores = cg.linear(tokens, "t d -> t e", e=experts, name="router")
    share = B * S * chosen / sympy.Integer(experts)
    ids = cg.opaque("top_k", [scores], ((experts, share), "int64"), flops=B * S * experts)
    with cg.scope("experts"):
        rows = cg.gather(tokens, ids)
        up, gate = (
            cg.einsum(rows, g.param(name, (experts, D, width)), "e c d, e d f -> e c f") for name in ("up", "gate")
        )
        y = cg.einsum(up * cg.silu(gate), g.param("down", (experts, width, D)), "e c f, e f d -> e c d")
        y = cg.scatter(tokens, ids, y, inplace=False)
    return cg.rearrange(y, "(b s) d -> b s d", b=B, s=S)


def decoder(groups):
    """Embedding, groups of equal layers (count, block), a head of its own."""
    with cg.Graph("experts", dtype="bf16") as g:
        x = cg.embedding(g.input("tokens", (B, S), dtype="int64"), g.param("tokens/table", (V, D)))
        for name, (count, block) in groups.items():
            x = cg.repeat(count, lambda x, block=block: block(g, x), x, name=name)
        g.output(cg.linear(cg.rms_norm(x), "b s d -> b s v", v=V, name="head"))
    return g


def sizes_of_experts(g, layers, **dims):
    """Parameters of all routed experts of a group of layers."""
    inside = [t for t in g.params if t.name.startswith("moe/experts/")]
    formula = sum(sympy.prod(t.shape) for t in inside)
    return layers * cg.evaluate(formula, **{s.name: dims[s.name] for s in formula.free_symbols})


def active(g, layers, experts, chosen, **dims):
    """Parameters that one token meets."""
    idle = Fraction(experts - chosen, experts) * sizes_of_experts(g, layers, **dims)
    return cg.param_count(g, **dims) - idle


# -- Mixtral ---------------------------------------------------------------------------------------------------


def mixtral(n):
    def block(g, x):
        y = cg.rms_norm(x, name="attention/norm")
        q, k, v = (
            cg.rearrange(cg.linear(y, "b s d -> b s h k", h=heads, k=n["dh"], name=name), "b s h k -> b h s k")
            for name, heads in (("q", n["H"]), ("k", n["Hkv"]), ("v", n["Hkv"]))
        )
        y = cg.rearrange(cg.attention(q, k, v), "b h s k -> b s (h k)")
        x = x + cg.linear(y, "b s e -> b s d", d=D, name="proj")
        return x + routed(g, cg.rms_norm(x, name="norm"), n["experts"], n["topk"], n["Fe"])

    return decoder({"moe": (n["L"], block)})


@derives("params-mixtral-8x7b")
def mixtral_params(row):
    n = row["inputs"]
    return cg.param_count(mixtral(n), D=n["D"], V=n["V"])


@derives("active-mixtral-8x7b")
def mixtral_active(row):
    n = row["inputs"]
    return active(mixtral(n), n["L"], n["experts"], n["topk"], D=n["D"], V=n["V"])


# -- DeepSeek-V2 -----------------------------------------------------------------------------------------------


def latent_attention(g, x, n):
    """Queries through a low rank; keys and values from one latent vector, of which alone there is a cache."""
    H, nope, rope, v = n["n_heads"], n["qk_nope_head_dim"], n["qk_rope_head_dim"], n["v_head_dim"]
    y = cg.rms_norm(x, name="attention/norm")
    q = cg.rms_norm(cg.linear(y, "b s d -> b s r", r=n["q_lora_rank"], name="q_a"), name="q_norm")
    q = cg.linear(q, "b s r -> b h s k", h=H, k=nope + rope, name="q_b")
    both = cg.linear(y, "b s d -> b s r", r=n["kv_lora_rank"] + rope, name="kv_a")
    latent, shared = cg.split(both, [n["kv_lora_rank"], rope], -1)
    latent = cg.rms_norm(latent, name="kv_norm")
    k, v = cg.split(cg.linear(latent, "b s r -> b h s k", h=H, k=nope + v, name="kv_b"), [nope, v], -1)
    shared = cg.expand(shared, "b s k -> b h s k", h=H)
    y = cg.rearrange(cg.attention(q, cg.concat([k, shared], -1), v), "b h s k -> b s (h k)")
    return x + cg.linear(y, "b s e -> b s d", d=D, name="proj")


def deepseek(n):
    def dense(g, x):
        x = latent_attention(g, x, n)
        return x + cg.gated_mlp(cg.rms_norm(x, name="norm"), n["inter_dim"], name="mlp")

    def moe(g, x):
        x = latent_attention(g, x, n)
        y = cg.rms_norm(x, name="norm")
        x = x + cg.gated_mlp(y, n["n_shared_experts"] * n["moe_inter_dim"], name="shared")
        return x + routed(g, y, n["n_routed_experts"], n["n_activated_experts"], n["moe_inter_dim"])

    first = n["n_dense_layers"]
    return decoder({"dense": (first, dense), "moe": (n["n_layers"] - first, moe)})


@derives("dsv2-236b-params")
def deepseek_params(row):
    n = row["inputs"]
    return Fraction(cg.param_count(deepseek(n), D=n["dim"], V=n["vocab_size"]), 10**9)


@derives("dsv2-236b-active")
def deepseek_active(row):
    n = row["inputs"]
    layers = n["n_layers"] - n["n_dense_layers"]
    sizes = {"D": n["dim"], "V": n["vocab_size"]}
    return active(deepseek(n), layers, n["n_routed_experts"], n["n_activated_experts"], **sizes) / 10**9
