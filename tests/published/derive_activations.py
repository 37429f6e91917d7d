"""Activations that a step keeps: Korthikanti et al. 2022, with a rank's share of the sizes, and the scaling book."""

from fractions import Fraction
from functools import cache

import sympy
from derive_training import bytes_each, matmuls
from published_rows import derives
from shared import load, training_step

import costgraph as cg

B, S, D, H, L, V, T = cg.dims("B S D H L V T")


@cache
def gpt(t=1):
    """Layers of section 4.1; a rank of t has its share of the heads and of the width between the two products."""

    def block(x):
        y = cg.layer_norm(x, name="attention/norm")
        kqv = cg.linear(y, "b s d -> b s n h k", n=3, h=H / t, k=D / H, bias=True, name="attention/kqv")
        q, k, v = (cg.rearrange(part, "b s 1 h k -> b h s k") for part in cg.ops.split(kqv, (1, 1, 1), 2))
        y = cg.rearrange(cg.attention(q, k, v, kernel="eager", p=0.1, name="core"), "b h s k -> b s (h k)")
        x = x + cg.dropout(cg.linear(y, "b s e -> b s d", d=D, bias=True, name="attention/proj"), 0.1)
        y = cg.layer_norm(x, name="mlp/norm")
        y = cg.gelu(cg.linear(y, "b s d -> b s f", f=4 * D / t, bias=True, name="mlp/up"))
        return x + cg.dropout(cg.linear(y, "b s f -> b s d", d=D, bias=True, name="mlp/down"), 0.1)

    with cg.Graph("gpt", dtype="bf16") as g:
        table = g.param("table", (V, D))
        x = cg.embedding(g.input("tokens", (B, S), dtype="int64"), table)
        x = cg.layer_norm(cg.repeat(L, block, x, name="layers"), name="norm")
        g.output(cg.einsum(x, table, "b s d, v d -> b s v", name="head"))
        g.loss = "cross_entropy"
    return g


POLICIES = {"none": None, "core": cg.selective("core"), "layers": cg.every_block()}


@cache
def saved(again="none", t=1):
    """Bytes of a layer; mean and scale of its norms, in fp32, are left out as in the source."""
    step = training_step(gpt(t), checkpoint=POLICIES[again])
    statistics = 0 if again == "layers" else 2 * 2 * 4 * B * S
    return sympy.expand(cg.saved_bytes(step)["layers"] - statistics)


@derives("kor-eq1")
def equation_1(row):
    return saved(), B * S * D * (34 + 5 * H * S / D)


@derives("kor-selective")
def selective(row):
    return saved("core", T), B * S * D * (10 + 24 / T)


@derives("kor-full")
def full(row):
    return saved("layers"), 2 * B * S * D


def of_layer(row, again="none"):
    n = row["inputs"]
    sizes = {B: n["b"], S: n["s"], D: n["h"], H: n["a"]}
    return Fraction(int(saved(again, n["t"]).subs(sizes)))


@derives("kor-fig1-act-tp-22B")
def activations_of_a_device(row):
    return of_layer(row) * row["inputs"]["L"] / 2**30


@derives("kor-fig7-sel-22B", "kor-fig7-sel-175B", "kor-fig7-full-22B", "kor-fig7-full-175B")
def percent_of_all(row):
    again = "core" if "sel" in row["id"] else "layers"
    return 100 * of_layer(row, again) / of_layer(row)


@derives("kor-fig1-params-22B", "kor-fig1-params-175B")
def state_of_a_device(row):
    # the matrices of the layers of a rank alone: no table, no biases, no gains
    n = row["inputs"]
    found = [t for t in gpt(n["t"]).params if t.name.startswith("layers") and t.name.endswith("weight")]
    matrices = sum(sympy.prod(t.shape) for t in found if t.ndim > 1).subs({D: n["h"], H: n["a"]})
    each = bytes_each("megatron-bf16", "param", "gradient", "state")
    return Fraction(int(matrices) * n["L"] // n["p"] * each, 2**30)


@cache
def work(again="none"):
    return cg.matmul_flops(training_step(gpt(), checkpoint=POLICIES[again]), count="full")


@derives("kor-flops-model")
def equation_7(row):
    return work(), 72 * B * L * S * D**2 * (1 + S / (6 * D) + V / (12 * D * L))


@derives("kor-flops-hw")
def equation_8(row):
    return work("core"), 72 * B * L * S * D**2 * (1 + S / (3 * D) + V / (12 * D * L))


@derives("kor-tab5-mfu-22B", "kor-tab5-hfu-22B", "kor-tab5-mfu-175B", "kor-tab5-hfu-175B")
def utilisation(row):
    n = row["inputs"]
    sizes = {B: n["B"], S: n["s"], D: n["h"], H: n["a"], L: n["L"], V: n["v"]}
    done = work("core" if "hfu" in row["id"] else "none").subs(sizes)
    return Fraction(int(done)) / (n["gpus"] * Fraction(str(n["t_iter"])) * Fraction(n["peak"]))


@derives("nar-eq3")
def equation_3(row):
    # its layers run again to their end, also the last product, which nothing reads
    step = training_step(gpt())
    both = matmuls(step) + matmuls(step, phase="forward", scope="layers")
    return both, 96 * B * S * L * D**2 * (1 + S / (6 * D) + V / (16 * L * D))


# -- the scaling book ----------------------------------------------------------------------------------------------


def llama(checkpoint=None):
    return training_step(load("llama-3-8b", symbolic=True), checkpoint=checkpoint)


def inputs_of_layers(tokens, **sizes):
    """Bytes of the inputs of all layers."""
    each = cg.saved_bytes(llama(cg.every_block()))["layers"]
    return Fraction(int(each.subs({B: 1, S: int(tokens), D: sizes["D"]}))) * sizes["L"]


@derives("sb-tf-remat-block")
def blocks_again(row):
    n = row["inputs"]
    return inputs_of_layers(n["BT"], D=n["D"], L=n["L"]) / 10**12


@derives("sb-train-q2-act", "sb-train-q3-act")
def results_of_three_products(row):
    n, sizes = row["inputs"], load("llama-2-13b").defaults
    kept = [f"layers/mlp/{part}/matmul[0]" for part in ("gate", "up", "down")]
    made = {life.tensor: life.bytes for life in cg.lifetimes(llama())}
    each = sum(made[name] for name in kept).subs({B: 1, S: int(n["B"]), D: sizes["D"]})
    each = Fraction(int(each.subs(cg.dims("F"), sizes["F"]))) * sizes["L"]
    return each / 10**12 if row["unit"] == "TB" else each


@derives("sb-at-ckpt")
def three_checkpoints(row):
    n = row["inputs"]
    return n["ckpt"] * inputs_of_layers(n["B"], D=n["D"], L=n["L"]) / 10**12


@derives("sb-at-chips")
def chips_for_all(row):
    n = row["inputs"]
    kept = n["ckpt"] * inputs_of_layers(n["B"], D=n["D"], L=n["L"])
    return (kept + bytes_each("bf16", "param", "state") * Fraction(n["N"])) / Fraction(n["hbm"])
