"""What one rank of many keeps and sends: sequence parallelism of Korthikanti et al. 2022, ZeRO's volumes and states."""

from fractions import Fraction
from functools import cache

import sympy
from derive_activations import POLICIES, gpt
from published_rows import derives

import costgraph as cg

B, S, D, H, L, T, N = cg.dims("B S D H L T N")
#: Where Megatron-LM has parameters, and what its layers hand on under sequence parallelism.
MEGATRON = {
    "*/kqv/weight": "d n (h tp) k", "*/kqv/bias": "n (h tp) k", "*/proj/weight": "(e tp) d",
    "*/up/weight": "d (f tp)", "*/up/bias": "(f tp)", "*/down/weight": "(f tp) d",
}  # fmt: skip
SEQUENCE = {"layers.carry0": "b (s tp) d"}


@cache
def kept(again="none", *, sequence=True):
    """Bytes of a layer on one rank; mean and scale of its norms, in fp32, are left out as in the source."""
    step = cg.training_step(gpt(), checkpoint=POLICIES[again], optimizer=cg.SGD())
    rank = cg.shard(step, cg.mesh(tp=T), {**MEGATRON, **(SEQUENCE if sequence else {})}, strict=True)
    return sympy.expand(cg.saved_bytes(rank)["layers"] - 16 * B * S / (T if sequence else 1))


@derives("kor-eq2")
def equation_2(row):
    return kept(sequence=False), B * S * D * (10 + 24 / T + 5 * H * S / (D * T))


@derives("kor-eq4")
def equation_4(row):
    return kept(), B * S * D / T * (34 + 5 * H * S / D)


@derives("kor-eq5")
def equation_5(row):
    return kept() * L, B * S * D * L / T * (34 + 5 * H * S / D)


@derives("kor-eq6")
def equation_6(row):
    return kept("core"), 34 * B * S * D / T


def of_rank(row, again="none", *, sequence=True):
    n = row["inputs"]
    sizes = {B: n["b"], S: n["s"], D: n["h"], H: n["a"], T: n["t"]}
    return Fraction(int(kept(again, sequence=sequence).subs(sizes)))


@derives("kor-fig1-act-seqsel-22B")
def activations_of_a_device(row):
    return of_rank(row, "core") * row["inputs"]["L"] / 2**30


@derives("kor-fig1-act-tp-175B", "kor-fig1-act-seqsel-175B")
def activations_of_the_first_stage(row):
    # a rank has m groups of layers, and micro-batches of as many groups as the schedule lets wait
    n, sequence = row["inputs"], "seqsel" in row["id"]
    waiting = cg.plan.in_flight("interleaved", n["p"], n["B"] // n["b"], n["m"], 0)
    each = of_rank(row, "core" if sequence else "none", sequence=sequence) * n["L"] / (n["p"] * n["m"])
    return each * waiting / 2**30


@derives("kor-fig7-seq-22B", "kor-fig7-seqsel-22B", "kor-fig7-seq-175B", "kor-fig7-seqsel-175B")
def percent_of_tensor_parallelism(row):
    again = "core" if "seqsel" in row["id"] else "none"
    return 100 * of_rank(row, again) / of_rank(row, sequence=False)


# -- ZeRO ----------------------------------------------------------------------------------------------------------


@cache
def sent(stage):
    """Elements of layers that a rank sends in a step, of N ranks and in the limit of many, by parameter."""
    with cg.Graph("layers", dtype="fp32") as g:
        x = g.input("x", (B, D), grad=True)
        y = cg.repeat(L, lambda y: cg.gelu(cg.linear(y, "b d -> b e", e=D)), x, name="layers")
        g.output(cg.reduce(y, "b d -> ", "mean"))
    step = cg.training_step(g, optimizer=cg.AdamW(implementation="fused"))
    (weight,) = step.params
    states = {f"{weight.name}.{kind}": "(d dp) e" for kind in ("exp_avg", "exp_avg_sq")}
    own = {weight.name: "(d dp) e"}
    places = {"x": "(b dp) d", **(states if stage else {}), **(own if stage == 3 else {})}
    gradients = own if stage == 2 else None
    rank = cg.shard(step, cg.mesh(dp=N), places, gradients=gradients, gather="dp" if stage == 3 else (), strict=True)
    of_weights = sympy.expand(cg.communication(rank).total() / 4).coeff(D, 2)  # beside it, the loss
    return sympy.limit(of_weights / L, N, sympy.oo)


P = sympy.Symbol("Psi", positive=True)


@derives("zero-comm-1")
def gradients_alone(row):
    return sent(0) * P, 2 * P


@derives("zero-comm-2")
def gradients_and_parameters(row):
    return sent(2) * P, 2 * P


@derives("zero-comm-3")
def parameters_twice(row):
    return sent(3) * P, 3 * P


# -- DeepSpeed's estimates of what a rank holds --------------------------------------------------------------------


@cache
def stack():
    """89 layers of 32e6 parameters, and one of 3e6: a model of the size and of the largest layer that are stated."""
    with cg.Graph("stack", dtype="bf16") as g:
        x = g.input("x", (B, D))
        first = cg.reduce(cg.linear(x, "b d -> b e", e=375, name="first"), "b e -> b", "mean")

        def layer(y):
            return y + cg.reduce(cg.linear(x, "b d -> b e", e=4000), "b e -> b", "mean")

        g.output(cg.reduce(cg.repeat(L, layer, first, name="layers"), "b -> ", "mean"))
    return g


@cache
def held(zero, precision="bf16-master"):
    """What a rank of 8 holds of weights, gradients and states, in bytes."""
    rank = cg.parallelize(cg.training_step(stack(), precision=precision), dp=8, zero=zero, strict=True)
    return cg.state_bytes(rank, B=8, D=8000, L=89)


def largest_layer():
    """Bytes of the largest layer that is gathered, and of its gradient, both in bf16."""
    one, two = (cg.param_bytes(stack(), D=8000, L=n) for n in (1, 2))
    return 2 * (two - one)


@derives("deepspeed-z2")
def states_of_zero_2(row):
    # the update's part of the gradients in fp32 is that of a rank that keeps them so
    return Fraction(held(1).total + held(2, "megatron-bf16").gradients, 2**30)


@derives("deepspeed-z2-offload")
def weights_alone(row):
    return Fraction(held(2).params, 2**30)


@derives("deepspeed-z3")
def states_of_zero_3(row):
    # gradients of its part are in fp32
    return Fraction(held(3, "megatron-bf16").total + largest_layer(), 2**30)


@derives("deepspeed-z3-opt")
def weights_of_zero_3(row):
    return Fraction(held(3).params + largest_layer(), 2**30)


@derives("deepspeed-z3-all")
def one_layer(row):
    return Fraction(largest_layer(), 2**30)


#: What the source adds to memory of the host, "to be conservative" (additional_buffer_factor).
CAREFUL = Fraction(3, 2)


@derives("deepspeed-z2-cpu")
def a_model_in_each_process(row):
    # 4 bytes in each of 8 processes are more than the 16 that all have of states
    whole, later = 2 * cg.param_bytes(stack(), D=8000, L=89), held(2, "megatron-bf16")
    return 8 * max(Fraction(whole), Fraction(later.state + later.gradients)) * CAREFUL / 2**30


@derives("deepspeed-z3-cpu")
def all_on_the_host(row):
    return 8 * Fraction(held(3, "megatron-bf16").total) * CAREFUL / 2**30
