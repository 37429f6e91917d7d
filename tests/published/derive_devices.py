"""Caches as plain tensors, a decode step declared by hand, and times on a device."""

import tempfile
from fractions import Fraction
from pathlib import Path

from published_rows import derives

import costgraph as cg
from costgraph import models

DEVICE = """
name = "as printed"
vendor = "any"
disagreements = []
[sources]
ROW = "the rates that the source takes"
[peak]
{dtype} = {{ value = {peak}, unit = "FLOP/s", source = ["ROW"] }}
[vector]
fp32 = {{ value = {peak}, unit = "FLOP/s", source = ["ROW"] }}
[memory]
type = "any"
capacity = {{ value = 1, unit = "GB", source = ["ROW"] }}
bandwidth = {{ value = {bandwidth}, unit = "B/s", source = ["ROW"] }}
"""


def device(peak, bandwidth, dtype="bf16"):
    """A device, or several as one, with the rates of a row."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "as_printed.toml")
        path.write_text(DEVICE.format(dtype=dtype, peak=int(peak), bandwidth=int(bandwidth)))
        return cg.load_hardware(path)


# -- caches of keys and values ---------------------------------------------------------------------------------


def caches(g, **dims):
    return sum(life.bytes for life in cg.lifetimes(g, **dims) if life.role == "cache")


def cache_of(count, *widths, dtype="bf16"):
    """Layers that keep so many elements of each token."""
    B, S = cg.dims("B S")

    def layer(x):
        for i, width in enumerate(widths):
            kept = x.graph.buffer(f"kept{i}", (B, S, width), dtype=dtype, role="cache")
            x = x + cg.reduce(cg.cast(kept, "fp32"), "b s d -> b", "sum")
        return x

    with cg.Graph("cache") as g:
        g.output(cg.repeat(count, layer, g.input("x", (B,)), name="layers"))
    return caches(g, B=1, S=1)


@derives("kv-llama2-7b", "kv-llama3-8b", "kv-llama3-70b")
def cache_of_a_token(row):
    n = row["inputs"]
    width = n["kv_heads"] * n["head_dim"]  # of keys, and as much of values
    return Fraction(cache_of(n["layers"], width, width), 2**10)


@derives("sb-tf-q1-kv")
def int8_cache_of_a_token(row):
    n = row["inputs"]
    return Fraction(cache_of(n["L"], n["NH"], n["NH"], dtype="int8"), 2**10)


@derives("mla-dsv2")
def latent_cache_of_a_token(row):
    n = row["inputs"]
    return cache_of(n["layers"], n["d_c"], n["d_rope"], dtype="int8")  # a byte each: elements


# -- one decode step of Llama -----------------------------------------------------------------------------------


def decode(dtype="bf16"):
    """One new token of each sequence; S keys and values of C heads in the cache."""
    B, S, D, H, G, C, K, F, L, V = cg.dims("B S D H G C K F L V")

    with cg.Graph("decode", dtype="bf16") as g:

        def linear(x, pattern, name, **sizes):
            before, after = (side.split() for side in pattern.split("->"))
            known = dict(zip(before, x.shape, strict=True))
            shape = [known[a] for a in before if a not in after] + [sizes[a] for a in after if a not in before]
            return cg.linear(x, pattern, weight=g.param(name, shape, dtype=dtype), name=name, **sizes)

        def block(x):
            y = cg.rms_norm(x, name="attention/norm")
            q = linear(y, "b d -> b h k", "q", h=H, k=K)
            for name in "kv":
                linear(y, "b d -> b h k", name, h=G, k=K)  # the new ones, a row of the cache
            kept = [g.buffer(name, (B, C, S, K), dtype=dtype, role="cache") for name in ("keys", "values")]
            keys, values = (cg.cast(t, "bf16") for t in kept)
            y = cg.attention(cg.rearrange(q, "b h k -> b h 1 k"), keys, values, causal=False)
            x = x + linear(cg.rearrange(y, "b h 1 k -> b (h k)"), "b e -> b d", "proj", d=D)
            y = cg.rms_norm(x, name="mlp/norm")
            y = cg.silu(linear(y, "b d -> b f", "gate", f=F)) * linear(y, "b d -> b f", "up", f=F)
            return x + linear(y, "b f -> b d", "down", d=D)

        rows = cg.embedding(g.input("tokens", (B,), dtype="int64"), g.param("table", (V, D), dtype=dtype))
        x = cg.repeat(L, block, cg.cast(rows, "bf16"), name="layers")
        g.output(linear(cg.rms_norm(x, name="norm"), "b d -> b v", "head", v=V))
    return g


def step(row, model, dtype):
    """Seconds of a step: bytes that have to move over the bandwidth of all chips, the larger of the two bounds."""
    n = row["inputs"]
    sizes = dict(models.load(model).defaults)
    chips = device(n["chips"] * 197e12, n["chips"] * n["bw"])
    return cg.roofline(decode(dtype), chips, B=n["B"], S=n["S"], C=n.get("C", sizes["G"]), **sizes).lower_bound


@derives("sb-inf-13b-kv")
def cache_of_a_sequence(row):
    n = row["inputs"]
    sizes = {**models.load("llama-2-13b").defaults, "G": n["K"]}
    return Fraction(caches(decode(), B=1, S=n["T"], C=n["K"], **sizes), 10**9)


@derives("sb-inf-13b-step-b16", "sb-inf-13b-step-b240", "sb-inf-13b-gmqa-step-b64")
def step_of_13b(row):
    return Fraction(step(row, "llama-2-13b", "bf16")) * 1000  # ms


@derives("sb-ai-step")
def step_of_70b(row):
    return Fraction(step(row, "llama-3-70b", "int8")) * 1000  # ms


@derives("sb-ai-tput")
def tokens_each_second(row):
    n = row["inputs"]
    return n["B"] / Fraction(step(row, "llama-3-70b", "int8")) / n["chips"]


@derives("sb-ai-mem")
def memory_of_70b(row):
    n, sizes, g = row["inputs"], models.load("llama-3-70b").defaults, decode("int8")
    kept = caches(g, B=n["B"], S=n["S"], C=sizes["G"], **sizes)
    return Fraction(kept + cg.param_bytes(g, **sizes), 10**9)


@derives("sb-ai-minchips-int8")
def chips_for_the_weights(row):
    weights = cg.param_bytes(decode("int8"), **models.load("llama-3-70b").defaults)
    return Fraction(weights) / Fraction(row["inputs"]["hbm"])


# -- 52 billion parameters, as kipply has them -------------------------------------------------------------------


def plain_decode():
    """Attention and a feed-forward layer of width 4*D, no gains, no biases, one table for both ends."""
    B, S, D, L, V = cg.dims("B S D L V")

    def block(x):
        q, k, v = (cg.linear(x, "b d -> b e", e=D, name=name) for name in "qkv")
        kept = [x.graph.buffer(name, (B, 1, S, D), role="cache") for name in ("keys", "values")]
        # of the size of a head nothing here depends
        y = cg.attention(cg.rearrange(q + k + v, "b d -> b 1 1 d"), *kept, causal=False)
        x = x + cg.linear(cg.rearrange(y, "b 1 1 d -> b d"), "b e -> b d", d=D, name="proj")
        return x + cg.mlp(x, 4 * D, name="mlp")

    with cg.Graph("plain", dtype="bf16") as g:
        table = g.param("table", (V, D))
        x = cg.embedding(g.input("tokens", (B,), dtype="int64"), table)
        g.output(cg.einsum(cg.repeat(L, block, x, name="layers"), table, "b d, v d -> b v"))
    return g


@derives("kipply-weights")
def weights_of_52b(row):
    return cg.param_bytes(plain_decode(), **row["inputs"])


@derives("kipply-capacity3", "kipply-capacity4")
def tokens_beside_the_weights(row):
    n = dict(row["inputs"])
    return cg.largest(plain_decode(), "S", memory=n.pop("gpus") * 40e9, B=1, **n)


# -- times and ridge points --------------------------------------------------------------------------------------


def product(weights="bf16", dtype="bf16"):
    B, D, F = cg.dims("B D F")
    with cg.Graph("g", dtype=dtype) as g:
        w = g.param("w", (D, F), dtype=weights)
        g.output(cg.einsum(g.input("x", (B, D)), w, "b d, d f -> b f"))
    return g


def vast(row):
    """Sizes of the weights beside which those of the activations vanish."""
    D, F = row["inputs"].get("W", (10**7, 10**7))
    return {"D": D, "F": F}


@derives("sb-h100-1e12", "sb-v6e-1e12")
def time_of_1e12(row):
    chip = "h100-sxm" if "h100" in row["id"] else "tpu-v6e"
    sizes = {"B": 10**4, "D": 10**4, "F": 5000}
    assert cg.flops(product(), **sizes) == row["inputs"]["flops"]
    return Fraction(cg.roofline(product(), chip, **sizes).lower_bound) * 1000  # ms


@derives("sb-gpu-mm-512")
def time_of_a_product(row):
    n = row["inputs"]
    (work,) = cg.roofline(product(), device(n["peak"], 8e12), B=n["B"], D=n["D"], F=n["F"]).rows
    return Fraction(work.compute_s) * 10**6  # us


@derives("h200-mm-random", "h200-mm-zeros")
def rate_of_a_product(row):
    n = row["inputs"]["n"]
    sizes = {"B": n, "D": n, "F": n}
    least = cg.roofline(product(), "h200-sxm", **sizes).lower_bound
    return Fraction(cg.matmul_flops(product(), **sizes)) / Fraction(least) / 10**12  # TFLOP/s


@derives("h200-copy")
def rate_of_a_copy(row):
    n = row["inputs"]["bytes"]
    with cg.Graph("copy", dtype="int8") as g:
        g.output(cg.opaque("copy", [g.input("x", (n,))], (n,), flops=0))
    return cg.bytes_moved(g) / Fraction(cg.roofline(g, "h200-sxm").lower_bound) / 10**12  # TB/s


@derives("kipply-gopher-large-compute", "kipply-52b-4gpu-b256-compute")
def time_of_all_weights(row):
    # each of P weights is multiplied with B tokens, on N devices as one
    n = row["inputs"]
    rate = cg.load_hardware("a100-40-sxm").rate("bf16").value
    sizes = {"B": n["B"], "D": 1000, "F": int(n["P"]) // 1000}
    (work,) = cg.roofline(product(), device(n["N"] * rate, n["N"] * 1.5e12), **sizes).rows
    return Fraction(work.compute_s) * 1000  # ms


@derives("kipply-ratio")
def tokens_for_which_weights_come_free(row):
    # 2 FLOPs and 2 bytes for each weight and token
    n = row["inputs"]
    return Fraction(cg.crossover(product(), device(n["flops"], n["bw"]), "B", **vast(row)))


@derives("sb-v5e-ridge", "sb-q1-int8-ridge")
def ridge_point(row):
    n = row["inputs"]
    return device(n["peak"], n["bw"], n["dtype"]).ridge(n["dtype"])


@derives("sb-gpu-ridge-h100")
def ridge_point_of_h100(row):
    return cg.load_hardware("h100-sxm").ridge("fp16")


@derives("sb-q1-int8-B", "sb-q2-mixed", "sb-q5-h100", "sb-tpu-q4-vmem")
def batch_that_is_bound_by_compute(row):
    n = row["inputs"]
    g = product(n.get("weights", n["dtype"]), n["dtype"])
    return Fraction(cg.crossover(g, device(n["peak"], n["bw"], n["dtype"]), "B", **vast(row)))


@derives("sb-tpu-q6-hbm", "sb-ai-fullhbm")
def time_to_read_the_memory(row):
    # weights of int8 that fill it, for one token
    n = row["inputs"]
    full = n.get("bytes", n.get("hbm"))
    g, chip = product("int8", "int8"), device(394e12, n["bw"], "int8")
    return Fraction(cg.roofline(g, chip, B=1, D=10**5, F=int(full) // 10**5).lower_bound) * 1000  # ms


@derives("sb-gpu-add-64k", "sb-gpu-add-1g")
def time_of_an_addition(row):
    n = row["inputs"]
    with cg.Graph("g", dtype="fp32") as g:
        x, y = (g.input(name, (n["N"],)) for name in "xy")
        g.output(x + y)
    seconds = cg.roofline(g, device(66.9e12, n["bw"])).lower_bound
    return Fraction(seconds) * (10**6 if row["unit"] == "us" else 10**3)
