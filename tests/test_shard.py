"""Per-rank graphs against published formulas, torch's collectives, and computed values."""

from fractions import Fraction
from functools import cache

import pytest
import sympy
from each import each
from shared import load

import costgraph as cg
from costgraph import testing

B, S, D, F, H, G, K, L, V, T, N = cg.dims("B S D F H G K L V T N")
#: Small sizes that two ranks on both axes divide.
SIZES = {"B": 2, "S": 4, "D": 4, "F": 6, "H": 4, "G": 2, "K": 2, "L": 2, "V": 8}
DATA = {"tokens": "(b dp) s", "targets": "(b dp) s"}
TENSOR = {
    "tokens/table": "(v tp) d",
    "*attention/[qkv]/weight": "d (h tp) k",
    "*attention/proj/weight": "(e tp) d",
    "*/gate/weight": "d (f tp)",
    "*/up/weight": "d (f tp)",
    "*/down/weight": "(f tp) d",
    "head/weight": "d (v tp)",
}
SEQUENCE = {"layers.carry0": "b (s tp) d"}


@cache
def step(optimizer="foreach", **options):
    model = load("llama-3-8b", symbolic=True, dtype="fp32")
    return cg.training_step(model, optimizer=cg.AdamW(implementation=optimizer), **options)


def with_states(placements):
    """Give optimizer states the placements of their parameters."""
    return {f"{name}{state}": text for name, text in placements.items() for state in ("", ".exp_avg", ".exp_avg_sq")}


def over(axis, graph, roles=("param", "state")):
    """Shard the first axis of every parameter or state over a mesh axis, inside any existing sharding."""
    out = {}
    for t in graph.tensors:
        rank = t.ndim - t.storage.pieces
        if t.producer is None and t.role in roles and rank:
            out[t.name] = f"(a0 {axis}) {' '.join(f'a{i}' for i in range(1, rank))}".strip()
    return out


def both(first, second):
    """Combine two placements on different mesh axes."""
    return first | {name: text.replace(")", " dp)") if text.startswith("(") else f"({text.replace(' ', ' dp) ', 1)}"
                    for name, text in second.items()}  # fmt: skip


def kinds(sharded, phase):
    """Return collectives of a phase by kind: the number per layer, and outside the layers."""
    found = {}
    for m in cg.communication(sharded).filter(phase=phase):
        inside, outside = found.get(m.collective, (0, 0))
        found[m.collective] = (inside + (m.times == L), outside + (m.times == 1))
    return found


# -- derived placements ------------------------------------------------------------------------------------------


def test_tensor_parallel_layers_all_reduce_twice_per_direction():
    sharded = cg.shard(step(), cg.mesh(tp=T), with_states(TENSOR), strict=True)
    # besides 2 per layer, Megatron reduces the embedding; the loss adds a maximum, a sum, and the mean
    assert kinds(sharded, "forward") == {"all_reduce": (2, 4)}
    assert kinds(sharded, "backward") == {"all_reduce": (2, 1)}
    assert kinds(sharded, "optimizer") == {}
    layer = [m for m in cg.communication(sharded) if m.times == L]
    assert {m.bytes for m in layer} == {4 * B * S * D}
    assert {sympy.expand(m.ring_bytes - 8 * B * S * D * L * (T - 1) / T) for m in layer} == {0}


def test_logits_and_their_gradients_are_sharded():
    sharded = cg.shard(step(), cg.mesh(tp=T), with_states(TENSOR), strict=True)
    vocabulary = [t for g in sharded.bodies() for t in g.tensors if t.ndim == 3 and t.sizes[2].names() & {"V"}]
    assert {str(t.sizes[2]) for t in vocabulary} == {"V/T"}
    # the scatter-add in the loss gradient is local to the rank that has the target's logit
    assert not [m for m in cg.communication(sharded).filter(phase="backward") if "cross_entropy" in m.op]


def test_sharded_carry_gives_sequence_parallelism():
    sharded = cg.shard(step(), cg.mesh(tp=T), {**with_states(TENSOR), **SEQUENCE}, strict=True)
    # torch 2.13.0 on four ranks of a fake group, fp32, L=4, B=2, S=32, D=64: 2L + 1 of each in the forward pass, and as
    # many reduce-scatters in the backward pass, 110,592 bytes each
    sizes = {**SIZES, "B": 2, "S": 32, "D": 64, "H": 4, "G": 4, "K": 16, "F": 128, "L": 4, "V": 512, "T": 4}
    sent = cg.communication(sharded, **sizes)
    for phase, collective in (("forward", "all_gather"), ("forward", "reduce_scatter"), ("backward", "reduce_scatter")):
        rows = sent.filter(phase=phase, collective=collective)
        assert (sum(m.times for m in rows), rows.total()) == (9, 110_592)
    # the backward pass gathers inputs again, as Megatron does, and gathers the gradient as well
    assert kinds(sharded, "backward")["all_gather"] == (4, 2)
    # norm gains see a shard of the sequence on each rank
    assert kinds(sharded, "backward")["all_reduce"] == (2, 1)


def test_logits_gradient_is_written_once():
    # the zeros that a kernel starts from belong to the fragment that writes into them, wherever sharding splits the
    # kernel
    sharded = cg.shard(step(), cg.mesh(dp=N, tp=T), {**with_states(TENSOR), **DATA}, strict=True)
    made = [t for op in sharded.walk() if "nll" in op.name and not op.graph.fused for t in op.results]
    assert len([t for t in made if t.ndim and t.sizes[-1].names() >= {"V"}]) == 1


def test_sharded_batch_all_reduces_every_gradient():
    sharded = cg.shard(step(), cg.mesh(dp=N), DATA, strict=True)
    sent = cg.communication(sharded).filter(phase="backward")
    assert {m.collective for m in sent} == {"all_reduce"}
    whole = sum(m.bytes * m.times for m in sent)
    assert sympy.expand(whole - cg.param_bytes(step())) == 0
    assert cg.param_count(sharded) == cg.param_count(step())
    assert sympy.expand(cg.matmul_flops(sharded) * N - cg.matmul_flops(step())) == 0


def test_zero_3_sends_three_times_parameter_bytes():
    """Rajbhandari et al. 2020 (arXiv 1910.02054), section 7.2.2: 3P elements for stage 3, and 2P for stages 1 and 2."""
    graph = step()
    sharded = cg.shard(graph, cg.mesh(dp=N), {**DATA, **over("dp", graph)}, gather="dp", strict=True)
    sizes = {"B": 8, "S": 32, "D": 64, "H": 4, "G": 4, "K": 16, "F": 128, "L": 4, "V": 512, "N": 4}
    sent = cg.communication(sharded, **sizes)
    # torch 2.13.0, fully_shard on four ranks: 689,856 bytes for the forward gathers and for the reduce-scatters
    assert sent.filter(phase="forward", collective="all_gather").total() == 689_856
    assert sent.filter(phase="backward", collective="reduce_scatter").total() == 689_856
    assert cg.param_bytes(sharded, **sizes) * 4 == cg.param_bytes(graph, **{k: n for k, n in sizes.items() if k != "N"})


@pytest.mark.parametrize("stage", [1, 2])
def test_sharded_states_gather_parameters_after_update(stage):
    graph = step()
    split = over("dp", graph, roles=("state",))
    gradients = over("dp", graph, roles=("param",)) if stage == 2 else None
    sharded = cg.shard(graph, cg.mesh(dp=N), {**DATA, **split}, gradients=gradients, strict=True)
    whole, sent = cg.param_bytes(graph), cg.communication(sharded)
    assert sympy.expand(sent.filter(phase="optimizer").total() - whole * (N - 1) / N) == 0
    reduced = 2 if stage == 1 else 1
    assert sympy.expand(sent.filter(phase="backward").total() - reduced * whole * (N - 1) / N) == 0
    assert {m.collective for m in sent.filter(phase="optimizer")} == {"all_gather"}


def test_zero_state_bytes_match_paper_for_7_5b_parameters():
    """ZeRO (arXiv 1910.02054), figure 1: 120, 31.4, 16.6 and 1.9 GB for 16P, 4P + 12P/N, 2P + 14P/N and 16P/N."""
    with cg.Graph("linear", dtype="fp32") as g:
        w = g.param("w", (N * 64,))
        g.output(cg.reduce(g.input("x", (64, N * 64)) * w, "b n -> ", "sum"))
    graph = cg.training_step(g, precision="bf16-master", optimizer=cg.AdamW(implementation="fused"))
    states = {t.name: "(n dp)" for t in graph.tensors if t.role == "state" and t.ndim}
    data = {"x": "(b dp) n"}
    cases = {
        0: ({}, None, ()),
        1: (states, None, ()),
        2: (states, {"w": "(n dp)"}, ()),
        3: ({**states, "w": "(n dp)"}, None, "dp"),
    }
    found = {}
    for stage, (placements, gradients, gathered) in cases.items():
        s = cg.shard(graph, cg.mesh(dp=64), {**data, **placements}, gradients=gradients, gather=gathered)
        roles = ("param", "state")
        kept = sum(t.storage.bytes.expr for t in s.tensors if t.producer is None and t.role in roles and t.ndim)
        kept += sum(t.storage.bytes.expr for t in s.gradients.values())
        found[stage] = kept / (64 * N)
    assert found == {0: 16, 1: 4 + Fraction(12, 64), 2: 2 + Fraction(14, 64), 3: Fraction(16, 64)}
    gigabytes = [round(float(found[stage] * Fraction(15, 2)), 1) for stage in range(4)]
    assert gigabytes == [120.0, 31.4, 16.6, 1.9]


# -- activations of a layer: Korthikanti et al. 2022 (arXiv 2205.05198) ------------------------------------------


def layer(x):
    y = cg.layer_norm(x, name="attention/norm")
    qkv = cg.linear(y, "b s d -> b s n h k", n=3, h=H, k=D / H, bias=True, name="attention/kqv")
    q, k, v = (cg.rearrange(part, "b s 1 h k -> b h s k") for part in cg.ops.split(qkv, (1, 1, 1), 2))
    y = cg.rearrange(cg.attention(q, k, v, kernel="eager", p=0.1, name="core"), "b h s k -> b s (h k)")
    x = x + cg.dropout(cg.linear(y, "b s e -> b s d", d=D, bias=True, name="attention/proj"), 0.1)
    y = cg.layer_norm(x, name="mlp/norm")
    y = cg.gelu(cg.linear(y, "b s d -> b s f", f=4 * D, bias=True, name="mlp/up"))
    return x + cg.dropout(cg.linear(y, "b s f -> b s d", d=D, bias=True, name="mlp/down"), 0.1)


def gpt():
    with cg.Graph("gpt", dtype="bf16") as g:
        x = cg.embedding(g.input("tokens", (B, S), dtype="int64"), g.param("table", (V, D)))
        x = cg.layer_norm(cg.repeat(L, layer, x, name="layers"), name="norm")
        g.output(cg.reduce(x, "b s d -> ", "mean"))
    return g


MEGATRON = {
    "*/kqv/weight": "d n (h tp) k", "*/kqv/bias": "n (h tp) k", "*/proj/weight": "(e tp) d",
    "*/up/weight": "d (f tp)", "*/up/bias": "(f tp)", "*/down/weight": "(f tp) d",
}  # fmt: skip


@pytest.mark.parametrize(
    ("sequence", "checkpoint", "form"),
    [
        (False, None, 10 + 24 / T + 5 * H * S / (D * T)),  # equation 2
        (True, None, (34 + 5 * H * S / D) / T),  # equation 4
        (True, cg.selective("core"), 34 / T),  # equation 6
        (False, cg.selective("core"), 10 + 24 / T),
    ],
)
def test_layer_activations_match_equations_2_to_6(sequence, checkpoint, form):
    whole = cg.training_step(gpt(), checkpoint=checkpoint, optimizer=cg.SGD())
    split = {**MEGATRON, **(SEQUENCE if sequence else {})}
    sharded = cg.shard(whole, cg.mesh(tp=T), split, strict=True)
    # mean and scale of two norms in fp32, which the paper neglects
    statistics = 16 * B * S / (T if sequence else 1)
    assert sympy.expand(cg.saved_bytes(sharded)["layers"] - B * S * D * form - statistics) == 0


# -- degrees ---------------------------------------------------------------------------------------------------------


def test_degree_one_gives_unsharded_graph():
    graph = step()
    sharded = cg.shard(graph, cg.mesh(dp=1, tp=1), {**DATA, **with_states(TENSOR)}, gather="dp")
    assert cg.flops(sharded) == cg.flops(graph)
    assert cg.bytes_moved(sharded) == cg.bytes_moved(graph)
    assert cg.peak_memory(sharded) == cg.peak_memory(graph)
    assert not cg.communication(sharded).rows


def test_peak_closed_form_matches_unrolled_graph():
    graph = step("fused")
    placements = {**DATA, **both(over("dp", graph), with_states(matched(graph, TENSOR)))}
    sharded = cg.shard(graph, cg.mesh(dp=N, tp=T), placements, gather="dp", strict=True)
    sizes = {**SIZES, "B": 6, "S": 5, "D": 12, "F": 18, "V": 24, "G": 4, "K": 6, "N": 3, "T": 2, "L": 5}
    unrolled = cg.unroll(sharded, L=5)
    left = {name: n for name, n in sizes.items() if name != "L"}
    assert cg.peak_memory(sharded, **sizes) == cg.peak_memory(unrolled, **left)
    assert cg.communication(sharded, **sizes).total() == cg.communication(unrolled, **left).total()


def matched(graph, placements):
    """Expand placements by pattern into placements by name."""
    from fnmatch import fnmatchcase

    names = [t.name for t in graph.tensors if t.producer is None and t.role == "param"]
    return {name: text for name in names for pattern, text in placements.items() if fnmatchcase(name, pattern)}


# -- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["for-loop", "foreach", "fused"])
def test_tensor_and_sequence_parallel_step_computes_same_values(optimizer):
    graph = step(optimizer)
    sharded = cg.shard(graph, cg.mesh(tp=T), {**with_states(TENSOR), **SEQUENCE}, strict=True)
    testing.check_sharded(graph, sharded, **SIZES, T=2)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), 2, 3])
def test_zero_step_computes_same_values(stage):
    graph = step()
    roles = ("param", "state") if stage == 3 else ("state",)
    gradients = over("dp", graph, roles=("param",)) if stage == 2 else None
    gathered = "dp" if stage == 3 else ()
    split = {**DATA, **over("dp", graph, roles)}
    sharded = cg.shard(graph, cg.mesh(dp=N), split, gradients=gradients, gather=gathered, strict=True)
    testing.check_sharded(graph, sharded, **SIZES, N=2)


def test_two_axis_mesh_step_computes_same_values():
    graph = step()
    placements = {**DATA, **both(over("dp", graph), with_states(matched(graph, TENSOR)))}
    placements["layers.carry0"] = "(b dp) (s tp) d"
    sharded = cg.shard(graph, cg.mesh(dp=N, tp=T), placements, gather="dp", strict=True)
    testing.check_sharded(graph, sharded, **{**SIZES, "D": 8, "V": 8, "F": 8, "G": 4}, N=2, T=2)


def test_micro_batches_and_checkpoints_compute_same_values():
    graph = step(accumulate=2, checkpoint=cg.every_block())
    split = {"tokens": "(b dp) s", "targets": "(b dp) s", **with_states(TENSOR)}
    sharded = cg.shard(
        graph, cg.mesh(dp=N, tp=T), {k: f"m {v}" if k in DATA else v for k, v in split.items()}, strict=True
    )
    testing.check_sharded(graph, sharded, **SIZES, N=2, T=2)


@pytest.mark.parametrize("pass_", [cg.prefill, cg.decode])
def test_two_rank_inference_computes_same_values(pass_):
    graph = pass_(load("llama-3-8b", symbolic=True, dtype="fp32"))
    caches = {t.name: "b (g tp) t k" for g in graph.bodies() for t in g.tensors if t.role == "cache"}
    sharded = cg.shard(graph, cg.mesh(tp=2), {**TENSOR, **caches}, strict=True)
    testing.check_sharded(graph, sharded, {"tp": 2}, **SIZES, T=3)


# -- refusals --------------------------------------------------------------------------------------------------------


def mlp():
    with cg.Graph("mlp") as g:
        h = cg.relu(cg.einsum(g.input("x", (B, D)), g.param("up", (D, 6)), "b d, d f -> b f"))
        g.output(cg.einsum(h, g.param("down", (6, D)), "b f, f d -> b d"))
    return g


EACH = "expected one name and axes of mesh(tp=4), each at most once"
TEXTS = "expected a mapping of names to placements such as 'd (f tp)'"
REFUSED = {
    "a name that is no tensor": (
        {"upp": "d f"}, {}, cg.GraphError, "'upp' matches no tensor of graph 'mlp'; expected a name or a pattern"
    ),
    "two names in brackets": (
        {"up": "(d f) tp"}, {}, cg.PatternError, f"'(d f) tp' of up(D, 6; fp32): (d f), {EACH}"
    ),
    "an axis alone": ({"up": "d tp"}, {}, cg.PatternError, f"'d tp' of up(D, 6; fp32): tp, {EACH}"),
    "an axis twice": (
        {"up": "(d tp) (f tp)"}, {}, cg.PatternError, f"'(d tp) (f tp)' of up(D, 6; fp32): (f tp), {EACH}"
    ),
    "axes that are too many": (
        {"up": "d f g"}, {}, cg.PatternError, "'d f g' of up(D, 6; fp32): expected an entry for each of 2 axes"
    ),
    "a size that the ranks do not divide": (
        {"up": "d (f tp)"}, {}, cg.ShapeError,
        "'d (f tp)' of up(D, 6; fp32): (f tp) splits size 6 into parts of 3/2; expected a size that the ranks divide",
    ),
    "no text": ({"up": 3}, {}, cg.GraphError, f"placements is {{'up': 3}}, {TEXTS}"),
    "no mapping": (["up"], {}, cg.GraphError, f"placements is ['up'], {TEXTS}"),
    "an axis that the mesh does not have": (
        {}, {"gather": "dp"}, cg.GraphError, "gather: unknown axis 'dp', expected axes of mesh(tp=4)"
    ),
    "no mesh": ({}, {"mesh": 4}, cg.GraphError, "mesh is 4, expected a mesh"),
}  # fmt: skip


@each("what", REFUSED)
def test_invalid_placements_are_refused(what):
    placements, options, error, text = REFUSED[what]
    with pytest.raises(error) as refused:
        cg.shard(mlp(), placements=placements, **{"mesh": cg.mesh(tp=4), **options})
    assert str(refused.value) == f"shard: {text}"


def test_mesh_without_axes_or_with_bad_degrees_is_refused():
    with pytest.raises(cg.GraphError, match=r"mesh: axes \[\], expected at least one name with a number of ranks"):
        cg.mesh()
    with pytest.raises(cg.ShapeError, match="mesh: tp: 0, expected a positive integer"):
        cg.mesh(tp=0)


def test_indivisible_degree_is_refused_at_binding():
    sharded = cg.shard(mlp(), cg.mesh(tp=T), {"up": "d (f tp)", "down": "(f tp) d"})
    # two matmuls and an activation over a third of six columns, and 2/3 of an addition per element of the sum
    assert cg.flops(sharded, B=2, D=5, T=3) == pytest.approx(2 * (2 * 2 * 5 * 2) + 2 * 2 + 2 * 5 * 2 / 3)
    with pytest.raises(cg.BindingError, match="T=4: axis 1 of 'up' has size 6/T = 3/2, expected a positive integer"):
        cg.flops(sharded, B=2, D=5, T=4)


def test_op_that_cannot_keep_placement_is_named():
    with cg.Graph("rolled") as g:
        g.output(cg.ops.roll(g.input("x", (B, D)), 1))
    sharded = cg.shard(g, cg.mesh(tp=T), {"x": "b (d tp)"})
    assert sharded.sharding.resharded[0] == "'roll_parts': 'x' is redistributed along tp: the op cannot shard this axis"
    assert [m.collective for m in cg.communication(sharded)] == ["all_gather"]
    with pytest.raises(
        cg.UnsupportedError, match="'roll_parts': 'x' is redistributed along tp: the op cannot shard this axis, ex"
    ):
        cg.shard(g, cg.mesh(tp=T), {"x": "b (d tp)"}, strict=True)


@each(
    "build",
    [
        lambda x: -cg.reduce(x, "b d -> b", "max"),
        lambda x: cg.reduce(x, "b d -> b", "max") + cg.reduce(-x, "b d -> b", "max"),
        lambda x: cg.reduce(x, "b d -> b", "min") * -2.0,
        lambda x: cg.reduce(cg.reduce(x, "b (e f) -> b f", "max", f=2), "b f -> b", "sum"),
        lambda x: cg.reduce(x, "b d -> b", "mean") + cg.reduce(x, "b d -> b", "sum"),
    ],
)  # fmt: skip
def test_maxima_are_not_partial_sums(build):
    with cg.Graph("most") as g:
        g.output(build(g.input("x", (B, D))))
    rank = cg.shard(g, cg.mesh(tp=2), {"x": "b (d tp)"}, strict=True)
    testing.check_sharded(g, rank, B=3, D=4)


def test_rounded_partial_sums_are_reduced_first():
    with cg.Graph("rounded") as g:
        g.output(cg.ops.cast(cg.reduce(g.input("x", (B, D)), "b d -> b", "sum"), "int32"))
    rank = cg.shard(g, cg.mesh(tp=2), {"x": "b (d tp)"})
    assert [t.operands[0].dtype.name for t in rank.ops if t.kind.name == "collective"] == ["fp32"]


def test_scatter_add_keeps_partial_sums():
    with cg.Graph("added") as g:
        base = cg.reduce(g.input("x", (B, D)), "b d -> b", "mean")
        g.output(cg.ops.scatter(base, g.input("ids", (D,), dtype="int64"), g.input("new", (D,))))
    rank = cg.shard(g, cg.mesh(tp=2), {"x": "b (d tp)", "ids": "(d tp)", "new": "(d tp)"})
    testing.check_sharded(g, rank, B=3, D=4)


def test_lookup_restores_sharded_row_order():
    with cg.Graph("looked up") as g:
        y = cg.einsum(g.input("x", (B, D)), g.param("w", (D, D)), "b d, d e -> b e")
        g.output(cg.ops.gather(y, g.input("ids", (F,), dtype="int64")))
    # the matmul leaves every second half of a half on a rank
    rank = cg.shard(g, cg.mesh(dp=2, ep=2), {"x": "(b dp ep) d", "w": "(d dp) e"})
    testing.check_sharded(g, rank, B=8, D=2, F=8)


@pytest.mark.parametrize("ranks", [1, 2])
def test_split_kernel_preserves_result_layout(ranks):
    with cg.Graph("turned") as g:
        y = cg.tanh(cg.relu(cg.rearrange(g.input("x", (B, D)), "b d -> d b")))
        g.output(cg.rearrange(y, "d b -> (b d)"))
    fused = cg.fuse(g)
    rank = cg.shard(fused, cg.mesh(dp=ranks), {"x": "(b dp) d"}, strict=True)
    # read and written once; the result is a view without a copy
    assert cg.bytes_moved(rank) == cg.bytes_moved(fused) / ranks == 8 * B * D / ranks
    testing.check_sharded(fused, rank, {"dp": ranks}, B=4, D=3)


def test_unused_ops_are_dropped_from_split_kernel():
    with cg.Graph("cut") as g:
        x = g.input("x", (B, D))
        with cg.kernel("both") as body:
            most, all_ = (cg.reduce(x, "b d -> b", how) for how in ("max", "sum"))
            cg.relu(cg.tanh(most), inplace=True)  # between two collectives, and unused
            y = cg.tanh(all_)
        g.output(body.export(y))
    rank = cg.shard(g, cg.mesh(tp=2), {"x": "b (d tp)"}, strict=True)
    assert [m.collective for m in cg.communication(rank)] == ["all_reduce", "all_reduce"]
    testing.check_sharded(g, rank, B=3, D=4)


def test_rank_local_row_order_is_kept():
    """Each rank sorts the routing choices of its own tokens, and results computed from the rows follow that order."""
    with cg.Graph("experts") as g:
        x, ids = g.input("x", (B, D)), g.input("ids", (B, 2), dtype="int64")
        sent = cg.ops.dispatch(ids, 3)
        rows = cg.ops.gather(x, sent.tokens)
        g.output(rows)
    text = "shard: 'gather' is in rank-local order, or holds indices into rows in that order, which are invalid"
    with pytest.raises(cg.UnsupportedError, match=text):
        cg.shard(g, cg.mesh(dp=2), {"x": "(b dp) d", "ids": "(b dp) k"})
    with g:
        made = cg.ops.grouped_matmul(rows, g.param("w", (3, D, D)), sent.ends, 2)
        g.outputs = [cg.ops.gather(made, sent.places)]
    rank = cg.shard(g, cg.mesh(dp=2), {"x": "(b dp) d", "ids": "(b dp) k"}, strict=True)
    assert not cg.communication(rank).rows
    testing.check_sharded(g, rank, B=4, D=3)


def test_per_rank_graph_is_not_sharded_again():
    sharded = cg.shard(mlp(), cg.mesh(tp=T), {"up": "d (f tp)", "down": "(f tp) d"})
    with pytest.raises(
        cg.GraphError, match="shard: graph 'mlp' is already the graph of one rank, expected an unsharded"
    ):
        cg.shard(sharded, cg.mesh(dp=N), {"x": "(b dp) d"})
    with pytest.raises(cg.GraphError, match="run_ranks of graph 'mlp', which is not sharded: expected a graph from"):
        testing.run_ranks(mlp(), {})


def test_value_mismatch_between_ranks_is_detected():
    graph = mlp()
    sharded = cg.shard(graph, cg.mesh(tp=2), {"up": "d (f tp)", "down": "(f tp) d"})
    lacking = cg.Graph("lacking")
    with lacking:  # without the reduction, each rank has a partial sum
        h = cg.relu(cg.einsum(lacking.input("x", (B, D)), lacking.param("up", (D, 3)), "b d, d f -> b f"))
        lacking.output(cg.einsum(h, lacking.param("down", (3, D)), "b f, f d -> b d"))
    lacking.sharding = sharded.sharding
    with pytest.raises(AssertionError, match=r"rank \{'tp': 1\} differs from a replica of the same shard"):
        testing.check_sharded(graph, lacking, B=2, D=3)


def test_per_rank_graph_survives_save_and_load(tmp_path):
    graph = step()
    sharded = cg.shard(graph, cg.mesh(dp=N, tp=T), {**DATA, **with_states(TENSOR), "layers.carry0": "(b dp) (s tp) d"})
    assert {op.kind.name for op in sharded.walk()} >= {"collective", "local_shard"}
    cg.save(sharded, tmp_path / "rank.json")
    loaded = cg.load(tmp_path / "rank.json")
    assert cg.communication(loaded).rows == cg.communication(sharded).rows
    assert cg.peak_memory(loaded) == cg.peak_memory(sharded)
    assert loaded.sharding == sharded.sharding
    with pytest.raises(cg.GraphError, match="is already the graph of one rank"):
        cg.shard(loaded, cg.mesh(dp=N), DATA)


def test_communication_renders_as_table():
    pytest.importorskip("pandas")
    sharded = cg.shard(mlp(), cg.mesh(tp=3), {"up": "d (f tp)", "down": "(f tp) d"})
    sent = cg.communication(sharded, B=2, D=5)
    assert repr(sent) == "Communication(graph mlp: 1 collectives)"
    assert (sent.total(), len(sent.filter(collective="all_gather"))) == (2 * 40 * 2 / 3, 0)
    assert str(sent).splitlines()[-1] == "ring bytes  53.33 B"
    assert list(sent.to_pandas()["bytes"]) == [40]


# -- recurrences -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gather", [(), "dp"])
def test_recurrent_weight_gradients_are_reduced_once(gather):
    """torch's DDP and fully_shard also reduce after the backward pass, not at each time step."""
    with cg.Graph("rnn") as g:
        x, state = g.input("x", (S, B, D)), g.input("state", (B, D))
        w, u = g.param("w", (D, D)), g.param("u", (D, D))

        def cell(h, x):
            h = cg.tanh(cg.einsum(h, w, "b d, d e -> b e") + cg.einsum(x, u, "b d, d e -> b e"))
            return h, h

        _, states = cg.scan(S, cell, state, x)
        g.output(cg.reduce(states, "s b d -> ", "mean"))
    whole = cg.training_step(g, optimizer=cg.SGD())
    split = {"w": "(d dp) e", "u": "(d dp) e"} if gather else {}
    rank = cg.shard(whole, cg.mesh(dp=N), {"x": "s (b dp) d", "state": "(b dp) d", **split}, gather=gather, strict=True)
    sent = cg.communication(rank).filter(phase="backward")
    assert {(m.collective, m.times) for m in sent} == {("reduce_scatter" if gather else "all_reduce", 1)}
    assert sympy.expand(sum(m.bytes for m in sent) - cg.param_bytes(whole)) == 0
    testing.check_sharded(whole, rank, S=3, B=4, D=2, N=2)


# -- images ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["max", "mean"])
def test_batch_norm_statistics_are_reduced_before_expansion(mode):
    """Batch norm over all ranks all-reduces per-channel statistics; windows slide within an image."""
    with cg.Graph("images") as g:
        x = cg.conv(g.input("x", (B, 2, 4, 4)), "b c h w -> b o h w", window=(3, 3), padding=1, o=D)
        x = cg.nn.pool(cg.relu(cg.nn.batch_norm(x)), mode, window=(2, 2))
        g.output(cg.reduce(x * x, "b c h w -> ", "mean"))
    whole = cg.training_step(g, optimizer=cg.SGD())
    rank = cg.shard(whole, cg.mesh(dp=N), {"x": "(b dp) c h w"}, strict=True)
    sent = cg.communication(rank)
    assert {m.collective for m in sent} == {"all_reduce"}
    assert all(m.bytes in (4, 4 * D, 8 * D, 4 * 18 * D) for m in sent), [m.bytes for m in sent]
    testing.check_sharded(whole, rank, B=2, D=2, N=2)


#: Kinds without a sharding rule, and why.
WHOLE = {
    "arange": "numbers of all positions on each rank, which is handed its part of them",
    "custom_call": "nobody knows what it does",
    "opaque": "it says what it costs, not what it does",
    "kernel": "those of the ops inside",
    "repeat": "those of the ops inside",
    "stacked": "a stack lies as the slices that are written into it",
}
#: Kinds that appear only in per-rank graphs, which are already sharded.
OF_RANKS = {"collective", "local_shard", "merge", "pack", "unshard"}


def test_all_other_kinds_have_sharding_rules():
    from costgraph.ir.graph import OpKind
    from costgraph.ops.registry import KINDS

    without = {name for name, kind in KINDS.items() if kind.placed is OpKind.placed}
    assert without == WHOLE.keys() | OF_RANKS


@pytest.mark.parametrize("strict", [False, True])
def test_ops_without_sharding_rule_gather_operands_and_are_named(strict):
    with cg.Graph("g") as g:
        x = cg.relu(g.input("x", (B, D)))
        g.output(cg.relu(cg.opaque("fft", [x], (B, D), flops=5 * B * D)))
    if strict:
        with pytest.raises(cg.UnsupportedError, match=r"fft.* expected placements that every op can keep"):
            cg.shard(g, cg.mesh(dp=N), {"x": "(b dp) d"}, strict=True)
        return
    rank = cg.shard(g, cg.mesh(dp=N), {"x": "(b dp) d"})
    assert [m.collective for m in cg.communication(rank)] == ["all_gather"]
    (text,) = rank.sharding.resharded
    assert "fft" in text
