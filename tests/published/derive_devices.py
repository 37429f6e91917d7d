"""Caches and steps of decoding of the zoo, and times on a device."""

import tempfile
from fractions import Fraction
from pathlib import Path

from published_rows import derives
from shared import load

import costgraph as cg

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


def cache_of(name, **dims):
    """Bytes of the cache of one token."""
    return cg.cache_bytes(cg.decode(load(name)), B=1, S=1, **dims)


@derives("kv-llama2-7b", "kv-llama3-8b", "kv-llama3-70b")
def cache_of_a_token(row):
    n, name = row["inputs"], row["id"].removeprefix("kv-").replace("llama", "llama-")
    assert {"L": n["layers"], "G": n["kv_heads"], "K": n["head_dim"]}.items() <= load(name).defaults.items()
    return Fraction(cache_of(name), 2**10)


@derives("sb-tf-q1-kv")
def byte_cache_of_a_token(row):
    # a byte each: in floats, which have no scales beside them
    n, kept = row["inputs"], cg.quantize(cg.decode(load("llama-2-7b")), cache="fp8_e4m3")
    return Fraction(cg.cache_bytes(kept, B=1, S=1, L=n["L"], G=n["NH"] // 128, K=128), 2**10)


@derives("mla-dsv2")
def latent_cache_of_a_token(row):
    n = row["inputs"]
    assert {"L": n["layers"], "C": n["d_c"], "Kr": n["d_rope"]}.items() <= load("deepseek-v2").defaults.items()
    return Fraction(cache_of("deepseek-v2"), 2)  # of two bytes: elements


# -- one decode step of Llama -----------------------------------------------------------------------------------


def llama_70b():
    """A byte for each weight and each element of the cache; products in bf16."""
    step = cg.decode(load("llama-3-70b"))
    return cg.quantize(step, "int8", cache="fp8_e4m3", skip=[], embeddings=True)


def seconds(row, g):
    """Seconds of a step: bytes that have to move over the bandwidth of all chips, the larger of the two bounds."""
    n = row["inputs"]
    chips = device(n["chips"] * 197e12, n["chips"] * n["bw"])
    return cg.roofline(g, chips, B=n["B"], S=n["S"]).lower_bound


@derives("sb-inf-13b-kv")
def cache_of_a_sequence(row):
    n, g = row["inputs"], cg.decode(load("llama-2-13b"))
    assert {"L": n["L"], "G": n["K"], "K": n["H"]}.items() <= g.defaults.items()
    return Fraction(cg.cache_bytes(g, B=1, S=n["T"]), 10**9)


@derives("sb-inf-13b-step-b16", "sb-inf-13b-step-b240")
def step_of_13b(row):
    return Fraction(seconds(row, cg.decode(load("llama-2-13b")))) * 1000  # ms


@derives("sb-inf-13b-gmqa-step-b64")
def step_of_13b_with_fewer_heads_in_its_cache(row):
    # the source leaves the weights as they were: of the bytes of all heads those of the others are taken off
    n, g = row["inputs"], cg.decode(load("llama-2-13b"))
    kept = [cg.cache_bytes(g, B=n["B"], S=n["S"], G=heads) for heads in (g.defaults["G"], n["C"])]
    return (Fraction(seconds(row, g)) - Fraction(kept[0] - kept[1]) / int(n["chips"] * n["bw"])) * 1000  # ms


@derives("sb-ai-step")
def step_of_70b(row):
    return Fraction(seconds(row, llama_70b())) * 1000  # ms


@derives("sb-ai-tput")
def tokens_each_second(row):
    n = row["inputs"]
    return n["B"] / Fraction(seconds(row, llama_70b())) / n["chips"]


@derives("sb-ai-mem")
def memory_of_70b(row):
    n, g = row["inputs"], llama_70b()
    return Fraction(cg.cache_bytes(g, B=n["B"], S=n["S"]) + cg.param_bytes(g), 10**9)


@derives("sb-ai-minchips-int8")
def chips_for_the_weights(row):
    return Fraction(cg.param_bytes(llama_70b())) / Fraction(row["inputs"]["hbm"])


# -- 52 billion parameters, as kipply has them -------------------------------------------------------------------


def plain():
    """Attention and a feed-forward layer of width 4*D, no gains, no biases, one table for both ends."""
    B, S, D, L, V = cg.dims("B S D L V")

    def block(x):
        # of the size of a head nothing here depends
        x = x + cg.nn.self_attention(x, 1, D)
        return x + cg.nn.mlp(x, 4 * D)

    with cg.Graph("plain", dtype="bf16") as g:
        table = g.param("table", (V, D))
        x = cg.embedding(g.input("tokens", (B, S), dtype="int64"), table)
        g.output(cg.nn.tied_head(cg.repeat(L, block, x, name="layers"), table))
    return g


@derives("kipply-weights")
def weights_of_52b(row):
    return cg.param_bytes(plain(), **row["inputs"])


@derives("kipply-capacity3", "kipply-capacity4")
def tokens_beside_the_weights(row):
    n = dict(row["inputs"])
    return cg.largest(cg.decode(plain()), "S", memory=n.pop("gpus") * 40e9, B=1, **n)


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
