"""Training precision: named and user-defined policies, unaffected graph parts, scoped overrides, and errors."""

import pickle
from collections import Counter

import pytest
from autocast_models import SIZES, gpt2_graph, llama_graph
from each import each
from shared import load

import costgraph as cg
from costgraph.transforms.backward import backward
from costgraph.transforms.precision import (
    POLICIES,
    Policy,
    apply_precision,
    find_policy,
    word,
)

B, D, F = cg.dims("B D F")

# -- policies ----------------------------------------------------------------------------------------------------

#: Bytes for weight, gradient, master copy, and the two Adam moments.
ADAM = {
    None: (4, 4, 0, 8),
    "fp32": (4, 4, 0, 8),
    "bf16": (2, 2, 0, 8),
    "bf16-master": (2, 2, 4, 8),
    "bf16-mixed": (4, 4, 0, 8),
    "fp16-mixed": (4, 4, 0, 8),
    "megatron-bf16": (2, 4, 4, 8),
    "fp8": (2, 2, 0, 8),
}
LEAN = Policy("lean", params="fp32", grads="bf16", moments="fp32")


def adam_bytes(graph, policy):
    policy = find_policy(policy)
    rewritten = apply_precision(graph, policy)
    found = set()
    for t in rewritten.params:
        f = policy.formats_of(t)
        assert f.param == t.dtype
        found.add((f.param.bytes, f.grad.bytes, f.master.bytes if f.master else 0, 2 * f.moments.bytes))
    (out,) = found
    return out


@pytest.mark.parametrize("policy", [None, *POLICIES])
def test_adam_bytes_per_parameter(policy):
    assert adam_bytes(gpt2_graph(), policy) == ADAM[policy]
    count = cg.param_count(gpt2_graph())
    assert cg.param_bytes(apply_precision(gpt2_graph(), policy)) == ADAM[policy][0] * count


def test_policies_give_16_12_18_and_14_bytes():
    totals = {policy: sum(adam_bytes(gpt2_graph(), policy)) for policy in POLICIES}
    assert totals == {
        "fp32": 16, "bf16": 12, "bf16-master": 16, "bf16-mixed": 16, "fp16-mixed": 16, "megatron-bf16": 18, "fp8": 12,
    }  # fmt: skip
    assert sum(adam_bytes(gpt2_graph(), LEAN)) == 4 + 2 + 8


def test_parameter_in_master_dtype_has_no_master_copy():
    g = apply_precision(
        gpt2_graph(), Policy("p", params="bf16", compute="bf16", master="fp32", scopes={"norm": "fp32"})
    )
    policy = Policy("p", params="bf16", compute="bf16", master="fp32", grads="bf16")
    kept = {t.name: policy.formats_of(t) for t in g.params}
    assert [f and f.name for f in kept["norm/weight"]] == ["fp32", "fp32", None, "fp32"]
    assert [f and f.name for f in kept["table"]] == ["bf16", "bf16", "fp32", "fp32"]


def test_only_fp16_scales_the_loss():
    assert [p for p in POLICIES if find_policy(p).loss_scaling] == ["fp16-mixed"]


def test_policies_can_be_pickled():
    policy = find_policy("bf16-mixed")
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert hash(policy) == hash(find_policy("bf16-mixed"))


# -- unaffected parts --------------------------------------------------------------------------------------------


def formats(graph):
    return [
        (op.kind.name, word(op), [t.dtype.name for t in op.operands], [t.dtype.name for t in op.results])
        for op in graph.walk()
    ]


@pytest.mark.parametrize(
    ("make", "before", "after"),
    # fp32 tables in an fp32 Llama have the graph's default dtype, and would be converted with it
    [(gpt2_graph, before, after) for before in ("fp32", "bf16", "fp16") for after in ("fp32", "bf16")]
    + [(llama_graph, "bf16", "fp32"), (llama_graph, "fp16", "bf16"), (llama_graph, "bf16", "bf16")],
)
def test_rewritten_graph_matches_declaration_in_that_dtype(make, before, after):
    rewritten = apply_precision(make(before), after)
    assert formats(rewritten) == formats(make(after))
    assert rewritten.dtype.name == after
    assert cg.bytes_moved(rewritten) == cg.bytes_moved(make(after))
    assert cg.peak_memory(rewritten, **SIZES) == cg.peak_memory(make(after), **SIZES)


def test_tables_with_explicit_dtype_are_kept():
    rewritten = apply_precision(llama_graph("bf16"), "fp16-mixed")
    assert {t.name: t.dtype.name for t in rewritten.tensors if t.role in ("buffer", "input")} == {
        "ids": "int64", "cos": "fp32", "sin": "fp32",
    }  # fmt: skip


@pytest.mark.parametrize("policy", [None, *POLICIES])
@pytest.mark.parametrize(("name", "attention"), [("gpt2", "eager"), ("llama-3-8b", "flash"), ("mlp", "flash")])
def test_precision_preserves_flops(policy, name, attention):
    g = load(name, symbolic=True, attention=attention, dropout=0.1)
    rewritten = apply_precision(g, policy)
    assert cg.matmul_flops(rewritten) == cg.matmul_flops(g)
    if policy != "fp8":  # fp8 also computes and applies scales
        assert cg.flops(rewritten) == cg.flops(g)
    assert cg.param_count(rewritten) == cg.param_count(g)
    assert apply_precision(rewritten, None).dtype == rewritten.dtype


@pytest.mark.parametrize("policy", ["bf16-mixed", "fp16-mixed", "fp8", {"matmul": "fp16", "sum": "fp32"}])
def test_rewritten_graphs_survive_save_and_load(policy, tmp_path):
    rewritten = apply_precision(gpt2_graph(), policy)
    cg.save(rewritten, tmp_path / "g.json")
    back = cg.load(tmp_path / "g.json")
    assert formats(back) == formats(rewritten)
    assert cg.bytes_moved(back) == cg.bytes_moved(rewritten)


def test_input_graph_is_unchanged():
    g = gpt2_graph()
    before = formats(g)
    apply_precision(g, "bf16-mixed")
    assert formats(g) == before


# -- scopes ------------------------------------------------------------------------------------------------------


def test_scope_can_use_another_dtype():
    """The tied table belongs to the head's outer scope: it is cast once, and so is the normalized stream."""
    policy = Policy("p", params="bf16", compute="bf16", scopes={"head": "fp32"})
    rewritten = apply_precision(gpt2_graph("bf16"), policy)
    head = [op for op in rewritten.ops if op.name.startswith("head") or op.name == "table.cast"]
    assert [op.name for op in head] == ["head/cast", "table.cast", "head/matmul"]
    assert head[-1].results[0].dtype.name == "fp32"
    log_p = next(op for op in rewritten.walk() if word(op) == "cross_entropy")
    assert log_p.operands[0].dtype.name == "bf16"  # cast back at the end of the scope


def test_autocast_can_be_disabled_in_a_scope():
    policy = find_policy("bf16-mixed")
    kept = Policy("p", params="fp32", compute="fp32", autocast=policy.autocast, scopes={"head": "fp32"})
    rewritten = apply_precision(gpt2_graph(), kept)
    assert {op.results[0].dtype.name for op in rewritten.ops if op.name == "head/matmul"} == {"fp32"}
    assert {op.results[0].dtype.name for op in rewritten.walk() if word(op) == "addmm" and op.body is not None} == {
        "bf16"
    }


def test_scope_parameters_use_scope_dtype():
    policy = Policy("p", params="bf16", compute="bf16", scopes={"layers/norm1": "fp32", "layers": "bf16"})
    rewritten = apply_precision(gpt2_graph("bf16"), policy)
    wide = {t.name for t in rewritten.params if t.dtype.name == "fp32"}
    assert wide == {"layers/norm1/weight", "layers/norm1/bias"}
    assert {op.results[0].dtype.name for op in rewritten.walk() if op.name == "layers/kqv/addmm"} == {"bf16"}


# -- fp8 ---------------------------------------------------------------------------------------------------------


def test_fp8_linear_layers_read_quantized_operands():
    """For y = x @ w, scaling costs |x|, max, multiply and 2 for clamp per operand element, one per result element."""
    with cg.Graph("g", dtype="bf16") as g:
        g.output(cg.linear(g.input("x", (B, D)), "b d -> b f", f=F))
    rewritten = apply_precision(g, "fp8")
    assert cg.matmul_flops(rewritten) == 2 * B * D * F
    # one division per operand scale, and one multiplication for the product of both
    assert cg.flops(rewritten) == (2 * B * D * F + 5 * (B * D + D * F) + B * F + 3).expand()
    (product,) = [op for op in rewritten.walk() if word(op) == "matmul"]
    assert [t.dtype.name for t in product.operands] == ["fp8_e4m3", "fp8_e4m3"]
    assert rewritten.outputs[0].dtype.name == "bf16"
    # bf16 x and w are read twice, fp8 x and w written and read, bf16 y written; in fp32, each of two amax is written
    # and read, and each scale written and read twice
    assert cg.bytes_moved(rewritten) == ((2 * 2 + 1 + 1) * (B * D + D * F) + 2 * B * F + 2 * 4 * (2 + 3)).expand()
    assert find_policy("fp8").grad_matmul == "fp8_e5m2"


def test_weights_are_quantized_once_and_activation_matmuls_never():
    rewritten = apply_precision(gpt2_graph("bf16"), "fp8")
    layers = 4
    by_name = Counter(op.body.name for op in rewritten.walk() if op.body is not None and op.loop is None)
    assert by_name["quantize"] == by_name["amax"] == 2 * layers + 2  # plus the head
    assert by_name["scaled_mm"] == 1
    eager = [op for op in rewritten.walk() if word(op) == "matmul" and op.operands[0].ndim > 3]
    assert {t.dtype.name for op in eager for t in op.operands} == {"bf16"}
    outside = apply_precision(gpt2_graph("bf16"), Policy("p", matmul="fp8_e4m3", scopes={"head": "bf16"}))
    assert not [op for op in outside.walk() if op.body is not None and op.body.name == "scaled_mm"]


def test_fp32_weights_are_quantized_directly_and_biases_cast():
    with cg.Graph("g") as g:
        g.output(cg.linear(g.input("x", (B, D)), "b d -> b f", f=F, bias=True))
    mixed = apply_precision(g, Policy("p", params="fp32", compute="bf16", matmul="fp8_e4m3"))
    assert [(op.name, op.operands[0].dtype.name) for op in mixed.ops if op.kind.name == "pointwise"] == [
        ("linear/addmm/scale", "fp32"), ("linear/weight/scale", "fp32"), ("linear/bias.cast", "fp32"),
    ]  # fmt: skip
    assert [op.operands[0].dtype.name for op in mixed.ops if op.body is not None and op.body.name == "quantize"] == [
        "bf16", "fp32",
    ]  # fmt: skip
    assert mixed.outputs[0].dtype.name == "bf16"


def test_fp8_backward_matmuls_read_quantized_copies():
    """dx = dy @ w.T and dw = x.T @ dy cost 2*B*D*F each, with dy in E5M2 and the fp8 copies of x and w from the
    forward.

    dy is scaled and cast once for both: 5 FLOPs per element and one division; each matmul multiplies two scales and
    divides its result.
    """
    with cg.Graph("g", dtype="bf16") as g:
        y = cg.linear(g.input("x", (B, D), grad=True), "b d -> b f", f=F, bias=True)
        g.output(cg.reduce(y, "b f -> ", "sum"))
    rewritten = apply_precision(g, "fp8")
    trained = backward(rewritten)
    products = [op for op in trained.walk() if word(op) == "matmul" and op.body is None]
    assert [[t.dtype.name for t in op.operands] for op in products] == [
        ["fp8_e4m3", "fp8_e4m3"], ["fp8_e5m2", "fp8_e4m3"], ["fp8_e5m2", "fp8_e4m3"],
    ]  # fmt: skip
    assert cg.matmul_flops(trained) == 3 * cg.matmul_flops(rewritten)
    pointwise = cg.flops(trained) - cg.flops(rewritten) - 2 * cg.matmul_flops(rewritten)
    # B*F additions for the bias
    assert pointwise.expand() == (5 * B * F + 1 + (B * D + 1) + (D * F + 1) + B * F).expand()
    assert {t.name: d.dtype.name for t, d in trained.gradients.items()} == {
        "x": "bf16", "linear/weight": "bf16", "linear/bias": "bf16",
    }  # fmt: skip


# -- errors ------------------------------------------------------------------------------------------------------


@each(
    ("policy", "text"),
    [
        ("bf61", "policy 'bf61', expected one of fp32, bf16, bf16-master, bf16-mixed, fp16-mixed, megatron-bf16, fp8"),
        (3, "policy 3, expected one of fp32"),
        ({"matmull": "bf16"}, "policy 'custom': op 'matmull' is unknown, expected one of matmul"),
        ({"matmul": "int8"}, "policy 'custom': autocast 'matmul': 'int8', expected a floating format"),
        ({3: "bf16"}, "policy 'custom': autocast {3: 'bf16'}, expected a mapping of names to formats"),
    ],
)
def test_unknown_policies_are_refused(policy, text):
    with pytest.raises((cg.GraphError, cg.FormatError)) as error:
        apply_precision(gpt2_graph(), policy)
    assert str(error.value).startswith(text)


@each(
    ("arguments", "text"),
    [
        ({"params": "bf61"}, "policy 'p': params: number format 'bf61' is unknown"),
        ({"matmul": "bf16"}, "policy 'p': matmul 'bf16', expected a format of 8 bits or fewer without block scales"),
        ({"moments": "int64"}, "policy 'p': moments: 'int64', expected a floating format"),
        ({"autocast_device": "tpu"}, "policy 'p': autocast_device 'tpu', expected one of cuda, cpu"),
        ({"loss_scaling": 1}, "Policy: loss_scaling is 1, expected True or False"),
        ({"scopes": "head"}, "policy 'p': scopes 'head', expected a mapping of names to formats"),
    ],
)
def test_malformed_policies_are_refused(arguments, text):
    with pytest.raises((cg.GraphError, cg.FormatError)) as error:
        Policy("p", **arguments)
    assert str(error.value).startswith(text)


def test_device_in_policy():
    with pytest.raises(cg.GraphError, match="policy 'lean': autocast_device 'cpu' differs from the policy's own"):
        apply_precision(gpt2_graph(), LEAN, autocast_device="cpu")
    with pytest.raises(cg.GraphError, match=r"policy: autocast_device 'tpu', expected one of cuda, cpu"):
        find_policy("bf16-mixed", autocast_device="tpu")
    assert find_policy(LEAN) is LEAN


def test_empty_scope_is_refused():
    policy = Policy("p", scopes={"haed": "fp32"})
    with pytest.raises(cg.GraphError, match=r"scope 'haed' contains no op or parameter of graph 'gpt2', .* as head"):
        apply_precision(gpt2_graph(), policy)


def test_stated_bytes_in_another_dtype_are_refused():
    with cg.Graph("g") as g:
        g.output(cg.opaque("fft", [g.input("x", (B,))], (B,), flops=5 * B, reads=8 * B))
    with pytest.raises(cg.UnsupportedError, match=r"opaque 'fft': states the bytes that it reads, .* fp32 to bf16"):
        apply_precision(g, "bf16")
    assert cg.bytes_moved(apply_precision(g, "fp32")) == cg.bytes_moved(g)
    assert cg.bytes_moved(apply_precision(g, Policy("p", compute="bf16", scopes={"fft": "fp32"}))) == 18 * B


def test_opaque_ops_return_operand_dtype():
    with cg.Graph("g") as g:
        x = g.input("x", (B, D)) @ g.param("w", (D, D))
        g.output(cg.opaque("fft", [x], (B, D), flops=5 * B * D))
    assert apply_precision(g, "bf16-mixed").outputs[0].dtype.name == "bf16"
    assert apply_precision(g, {"fft": "fp16"}).outputs[0].dtype.name == "fp16"


def test_only_forward_graphs_are_rewritten():
    with pytest.raises(cg.GraphError, match="apply_precision: got int, expected a graph"):
        apply_precision(3, "bf16")
    with cg.Graph("g") as g:
        x = g.input("x", (B, D))
        g.add_op(cg.relu(x).producer.kind, [x], "late", "backward")
    with pytest.raises(cg.GraphError, match="graph 'g' has more than a forward pass, expected only a forward pass"):
        apply_precision(g, "bf16")


def test_dtypes_for_non_parameters_are_refused():
    g = gpt2_graph()
    with pytest.raises(cg.GraphError, match=r"policy 'lean': formats of .*, expected a parameter"):
        LEAN.formats_of(g.tensors[0])
