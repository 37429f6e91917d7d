"""FLOPs of a step: backward pass, 6ND and what is beside it, and how much of a peak rate that is."""

from decimal import Decimal
from fractions import Fraction
from functools import cache

import sympy
from derive_transformers import NANOGPT, nanogpt, params_of
from published_rows import derives
from shared import load, training_step

import costgraph as cg

DAY = 24 * 60 * 60


def matmuls(step, B=None, **where):
    """FLOPs of products as torch counts them, of a step or of a part of it."""
    dims = {} if B is None else {"B": B}
    return cg.costs(step, count="full", **dims).filter(kind="matmul", **where).total().matmul


@cache
def per_weight(passes=("forward", "backward")):
    """FLOPs for each weight and token of a linear layer, whose input has a gradient too."""
    B, D, F = cg.dims("B D F")
    with cg.Graph("layer") as g:
        x = g.input("x", (B, D), grad=True)
        g.output(cg.reduce(cg.linear(x, "b d -> b f", f=F), "b f -> ", "sum"))
    step = cg.training_step(g)
    return int(sum(matmuls(step, phase=p) for p in passes) / (B * D * F))


def everything_again():
    """The same where all of it is computed once more."""
    return per_weight() + per_weight(("forward",))


# -- torch's tests ---------------------------------------------------------------------------------------------


@derives("pt-backward")
def chain(row):
    with cg.Graph("g") as g:
        x, others = g.param("x", (4, 5)), [g.input(f"x{i}", shape) for i, shape in enumerate([(5, 6), (7, 6, 7)])]
        y = cg.ops.expand(cg.einsum(x, others[0], "m k, k n -> m n"), "m n -> b m n", b=7)
        y = cg.einsum(y, others[1], "b m n, b n o -> b m o")
        g.output(cg.reduce(y, "b m o -> ", "sum"))
    return cg.matmul_flops(cg.backward(g))


@cache
def resnet18():
    g = cg.models.load("resnet18")  # its own, as its input is changed
    (images,) = (t for t in g.tensors if t.role == "input")
    images.requires_grad = True
    return cg.training_step(g)


@derives("pt-resnet18-fwdbwd")
def resnet18_both(row):
    return cg.matmul_flops(resnet18(), count="full", B=1)


@derives("pt-resnet18-layer1-conv-bwd")
def resnet18_layer(row):
    return matmuls(resnet18(), phase="backward", scope="stage1", B=1)


@derives("pt-sdpa-fwdbwd-math", "pt-sdpa-fwdbwd-flash")
def sdpa_both(row):
    n, kernel = row["inputs"], "eager" if row["id"].endswith("math") else "flash"
    with cg.Graph("g") as g:
        q = g.param("q", (n["b"], n["h"], n["sq"], n["d"]))
        k, v = (g.param(name, (n["b"], n["h"], n["sk"], n["d"])) for name in "kv")
        g.output(cg.reduce(cg.attention(q, k, v, kernel=kernel, causal=False), "b h s d -> ", "sum"))
    return cg.matmul_flops(cg.backward(g), count="full")


# -- nanoGPT -----------------------------------------------------------------------------------------------------


def nanogpt_step(**more):
    # biases are no product, so that the zoo's GPT-2 answers
    return training_step(load("gpt2", attention="eager"), **more)


def bound(formula, **sizes):
    return cg.evaluate(formula, **{s.name: sizes[s.name] for s in formula.free_symbols})


@derives("nanogpt-flops-backward_total")
def nanogpt_backward(row):
    return cg.costs(nanogpt_step(), count="full", B=1, S=1024).filter(kind="matmul", phase="backward").total().matmul


@derives("nanogpt-flops-total")
def nanogpt_total(row):
    return cg.matmul_flops(nanogpt_step(), count="full", B=1, S=1024)


def attention_of(step, **sizes):
    """FLOPs of both products of attention, forward and backward."""
    parts = ("layers/attention/scores", "layers/attention/reduce")
    return bound(sum(matmuls(step, scope=part) for part in parts), **sizes)


@derives("nanogpt-palm")
def nanogpt_palm(row):
    # the rule charges gains as weights
    weights = cg.param_count(nanogpt(), **NANOGPT, L=12) - params_of(nanogpt(), "position", **NANOGPT)
    sizes = {**load("gpt2").defaults, "B": 1, "S": 1024}
    return per_weight() * weights * 1024 + attention_of(nanogpt_step(), **sizes)


@derives("nanogpt-mfu")
def nanogpt_mfu(row):
    n = row["inputs"]
    work = cg.matmul_flops(nanogpt_step(), count="full", B=n["batch"], S=n["block_size"])
    return Fraction(work) / Fraction(str(n["step_s"])) / Fraction(n["peak"])


@derives("nanogpt-days")
def nanogpt_days(row):
    n = row["inputs"]
    weights = cg.param_count(nanogpt(), **NANOGPT, L=12)
    rate = n["gpus"] * Fraction(n["peak"]) * Fraction(str(n["mfu"]))
    return per_weight() * weights * Fraction(n["D"]) / rate / DAY


# -- 6ND -----------------------------------------------------------------------------------------------------------


@derives("gpt3-d1-t5-11b", "gpt3-d1-bert-base", "gpt3-d1-gpt-3-175b")
def gpt3_table(row):
    n = row["inputs"]
    seen = Fraction(str(n["active_fraction"])) * n["params_M"] * 10**6
    return per_weight() * seen * n["tokens_B"] * 10**9


@derives("llama3-405b-flops")
def llama_405b(row):
    return per_weight() * cg.param_count(load("llama-3.1-405b")) * Fraction(row["inputs"]["D"])


@derives("sb-tf-q7-used")
def deepseek_v3(row):
    n = row["inputs"]
    return per_weight() * Fraction(n["active"]) * Fraction(n["tokens"])


@derives("sb-tf-q7-util")
def deepseek_v3_utilisation(row):
    n = row["inputs"]
    work = per_weight() * Fraction(n["active"]) * Fraction(n["tokens"])
    return work / (Fraction(n["hours"]) * 3600 * Fraction(n["peak"]))


@derives("sb-at-days")
def days_on_a_pod(row):
    n = row["inputs"]
    rate = n["chips"] * Fraction(n["peak"]) * Fraction(str(n["mfu"]))
    return per_weight() * Fraction(n["N"]) * Fraction(n["D"]) / rate / DAY


@derives("nar-time-gpt3")
def days_of_gpt3(row):
    n = row["inputs"]
    return everything_again() * Fraction(n["T"]) * Fraction(n["P"]) / (n["n"] * Fraction(n["X"])) / DAY


# -- PaLM ----------------------------------------------------------------------------------------------------------


def weights_of(g):
    """Parameters that tokens are multiplied with, as a formula."""
    (loop,) = [op for op in g.ops if op.loop is not None]
    found = [t for t in g.params if t.ndim > 1 and not t.name.endswith("bias") and t.name != "positions/table"]
    return sum(sympy.prod(t.shape) * (loop.kind.count.expr if t.graph is loop.body else 1) for t in found)


@derives("palm-formula")
def palm(row):
    B, S, D, L = cg.dims("B S D L")
    model = load("gpt2", attention="eager", symbolic=True)
    each = sympy.expand(cg.matmul_flops(training_step(model), count="full") / (B * S))
    return each, 6 * weights_of(model) + 12 * L * D * S  # D = H*Q, and S is its T


def palm_token(n):
    step = training_step(load("llama-3-8b", attention="eager", symbolic=True))
    sizes = {"B": 1, "S": n["T"], "L": n["L"], "H": n["H"], "K": n["Q"]}
    return per_weight() * Fraction(n["N"]) + Fraction(attention_of(step, **sizes)) / n["T"]


@derives("palm-flops-token-540B")
def palm_540b(row):
    return palm_token(row["inputs"])


@derives("palm-mfu")
def palm_mfu(row):
    n = row["inputs"]
    return palm_token(n) * Fraction(n["tokens_per_s"]) / (n["chips"] * Fraction(n["peak"]))


@derives("llama3-mfu-8192-8192")
def llama_mfu(row):
    return row["inputs"]["tflops_per_gpu"] * 10**12 / Fraction(cg.load_hardware("h100-sxm").rate("bf16").value)


# -- state of the optimizer ---------------------------------------------------------------------------------------


@cache
def bytes_each(precision, *roles):
    """Bytes for each parameter of what has these roles in a step with AdamW."""
    N = cg.dims("N")
    with cg.Graph("weights") as g:
        g.output(cg.reduce(cg.relu(g.param("w", (N,))), "n -> ", "sum"))
    step = cg.training_step(g, precision=precision)
    return int(sum(life.bytes for life in cg.lifetimes(step) if life.role in roles) / N)


@derives("nanogpt-ckpt")
def nanogpt_checkpoint(row):
    each = bytes_each("fp32", "param", "state")
    return Decimal(each * cg.param_count(nanogpt(), **NANOGPT, L=12)) / 10**9


SHARED = {
    "zero-baseline": (),
    "zero-pos": ("state",),
    "zero-pos+g": ("state", "gradient"),
    "zero-pos+g+p": ("state", "gradient", "param"),
}


@derives(*SHARED)
def zero(row):
    # each rank has all of what is not shared, and its part of what is
    n, shared = row["inputs"], SHARED[row["id"]]
    each = {role: Fraction(bytes_each("bf16-master", role)) for role in ("param", "gradient", "state")}
    total = sum(size / n["Nd"] if role in shared else size for role, size in each.items())
    return total * Fraction(n["psi"]) / 10**9


@derives("sb-train-dp-limit")
def largest_model(row):
    n = row["inputs"]
    assert bytes_each("bf16", "param", "state") == n["bytes_per_param"]
    return Fraction(n["hbm"]) / bytes_each("bf16", "param", "state")


@derives("sb-gpu-l70-mem")
def llama_70b_state(row):
    return Fraction(bytes_each("bf16", "param", "state") * row["inputs"]["N"], 10**9)


# -- bytes that attention moves ---------------------------------------------------------------------------------


@derives("fa-hbm-std", "fa-hbm-flash")
def attention_traffic(row):
    n, kernel = row["inputs"], "eager" if row["id"].endswith("std") else "flash"
    with cg.Graph("g", dtype="fp16") as g:
        q, k, v = (g.param(name, (n["batch"], n["heads"], n["seq"], n["d"])) for name in "qkv")
        g.output(cg.reduce(cg.attention(q, k, v, kernel=kernel), "b h s d -> ", "sum"))
    return Fraction(cg.costs(cg.backward(g)).filter(scope="attention").total().bytes, 10**9)
