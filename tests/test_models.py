import os
import subprocess
import sys

import pytest
import sympy
from each import each
from limits import PROCESS
from shared import load

import costgraph as cg
from costgraph import models

GPT2_SMALL = {"D": 15, "H": 3, "F": 22, "L": 3, "V": 19, "P": 11}
# H*K differs from D, and two query heads share a key head
LLAMA_SMALL = {"D": 18, "H": 6, "G": 3, "K": 4, "F": 10, "L": 3, "V": 17}
MLP_SMALL = {"D": 7, "F": 11, "L": 3, "C": 5}
#: Models with detailed checks in this file; test_models_zoo.py checks properties common to all models.
NAMES = [n for n in models.names() if n == "mlp" or n.startswith(("gpt2", "gpt3", "llama"))]
SMALL = {"gpt2": GPT2_SMALL, "llama-3-8b": LLAMA_SMALL, "mlp": MLP_SMALL}


def point(name, **dims):
    return {"B": 2, **({} if name == "mlp" else {"S": 5}), **dims}


# -- parameters ----------------------------------------------------------------------------------------------


PARAMETERS = [
    ("gpt2", 124_439_808),
    ("gpt2-medium", 354_823_168),
    ("gpt2-large", 774_030_080),
    ("gpt2-xl", 1_557_611_200),
    # 96*(12*D**2 + 13*D) + (50257 + 2048)*D + 2*D with D = 12288; printed as 174,600 M
    ("gpt3-175b", 174_604_259_328),
    ("llama-2-7b", 6_738_415_616),
    ("llama-2-13b", 13_015_864_320),
    ("llama-2-70b", 68_976_648_192),
    ("llama-3-8b", 8_030_261_248),
    ("llama-3-70b", 70_553_706_496),
    ("llama-3.1-8b", 8_030_261_248),
    ("llama-3.1-70b", 70_553_706_496),
    ("llama-3.1-405b", 405_853_388_800),
    ("llama-3.2-1b", 1_235_814_400),
    ("llama-3.2-3b", 3_212_749_824),
    ("llama-3.3-70b", 70_553_706_496),
    ("mlp", 669_706),  # 784*512 + 512 + 512*512 + 512 + 512*10 + 10
]


@each(("name", "expected"), PARAMETERS)
def test_parameters_match_published_counts(name, expected):
    g = load(name)
    assert cg.param_count(g) == expected
    assert cg.param_bytes(g) == 2 * expected


def test_published_counts_cover_every_model():
    assert sorted(NAMES) == sorted(name for name, _ in PARAMETERS)


# -- default bindings ----------------------------------------------------------------------------------------


@each("name", NAMES)
def test_defaults_bind_all_but_batch_and_length(name):
    free = {s.name for s in cg.flops(load(name)).free_symbols}
    assert free == ({"B"} if name == "mlp" else {"B", "S"})


def test_default_sizes_can_be_overridden():
    g = load("llama-3-8b")
    per_layer = cg.flops(g, L=41, B=1, S=8) - cg.flops(g, L=40, B=1, S=8)
    assert cg.flops(g, L=40, B=1, S=8) == cg.flops(g, L=1, B=1, S=8) + 39 * per_layer
    assert g.defaults["L"] == 32


@pytest.mark.parametrize("name", NAMES)
def test_symbolic_drops_the_defaults(name):
    g = load(name, symbolic=True)
    assert g.defaults == {}
    free = {s.name for s in cg.flops(g).free_symbols | cg.param_count(g).free_symbols}
    assert free == set(load(name).defaults) | ({"B"} if name == "mlp" else {"B", "S"})


@pytest.mark.parametrize("name", NAMES)
def test_preset_equals_symbolic_graph_at_its_sizes(name):
    preset, symbolic = load(name), load(name, symbolic=True)
    bound = {**preset.defaults, **point(name)}
    for question in (cg.flops, cg.matmul_flops, cg.bytes_moved, cg.peak_memory):
        assert question(preset, **point(name)) == question(symbolic, **bound)


def test_length_beyond_position_table_is_refused():
    g = load("gpt2")
    assert cg.flops(g, B=1, S=1024) > cg.flops(g, B=1, S=1023)
    with pytest.raises(cg.BindingError, match="S <= P"):
        cg.flops(g, B=1, S=1025)
    with pytest.raises(cg.BindingError, match="whole number"):
        cg.flops(g, B=1, S=8, H=7)  # a head of 768/7
    with pytest.raises(cg.BindingError, match="whole number"):
        cg.flops(load("llama-3-8b"), B=1, S=8, G=3)  # 32 heads in groups of 32/3


# -- refusals ------------------------------------------------------------------------------------------------


def test_unknown_model_suggests_similar_names():
    with pytest.raises(cg.GraphError, match="llama-3-8b"):
        models.load("LLaMA-3-8B")
    with pytest.raises(cg.GraphError, match="gpt2-xl"):
        models.load("gpt2xl")
    with pytest.raises(cg.GraphError, match="mlp"):
        models.load("x" * 10_000)
    with pytest.raises(cg.GraphError, match="expected one of"):
        models.load(None)


@each("options", [{"attention": "sdpa"}, {"attention": None}, {"attention": ["flash"]}])
@each("name", sorted(SMALL))
def test_unknown_attention_is_refused(name, options):
    with pytest.raises(cg.GraphError, match="expected 'flash' or 'eager'"):
        models.load(name, **options)


@each("dropout", [1, -0.1, True, "0.1", None, float("nan"), 1j])
@each("name", sorted(SMALL))
def test_dropout_must_be_a_probability(name, dropout):
    with pytest.raises(cg.GraphError, match="dropout"):
        models.load(name, dropout=dropout)


@each("dtype", ["bf17", "int8", "bool", None, 16])
@each("name", sorted(SMALL))
def test_dtype_must_be_floating_point(name, dtype):
    with pytest.raises(cg.FormatError):
        models.load(name, dtype=dtype)


# -- every option --------------------------------------------------------------------------------------------


WAYS = [("flash", 0), ("eager", 0), ("flash", 0.1)]


@pytest.mark.parametrize(
    ("name", "attention", "dropout", "dtype"),
    [  # a plain run covers every option in one dtype, and every dtype with one option
        pytest.param(name, *way, dtype, marks=() if way == WAYS[0] or dtype == "bf16" else pytest.mark.long)
        for name in sorted(SMALL)
        for way in WAYS
        for dtype in ("fp32", "bf16", "fp16", "fp8_e4m3", "mxfp8")
    ],
)
def test_every_option_builds_and_binds(name, attention, dropout, dtype):
    g = load(name, attention=attention, dropout=dropout, dtype=dtype)
    assert name in repr(g)
    assert g.loss == "cross_entropy"
    (logits,) = g.outputs
    assert logits.dtype.name == dtype
    assert "B" in str(cg.peak_memory(g))
    answers = [q(g, **point(name)) for q in (cg.flops, cg.matmul_flops, cg.bytes_moved, cg.peak_memory)]
    assert all(isinstance(a, int) and a > 0 for a in answers)


@each("name", sorted(SMALL))
def test_dropout_flops_match_reference(name):
    # 2 per element: in the embedding or first activation, and in each layer for probabilities and residuals
    B, S, D, H, L, F = cg.dims("B S D H L F")
    drops = {
        "gpt2": B * S * D + L * (B * H * S**2 + 2 * B * S * D),
        "llama-3-8b": L * B * H * S**2,
        "mlp": B * F * (L + 1),
    }[name]
    plain, dropped = (load(name, symbolic=True, attention="eager", dropout=p, dtype="fp32") for p in (0, 0.1))
    assert sympy.expand(cg.flops(dropped) - cg.flops(plain)) == sympy.expand(2 * drops)
    assert cg.param_count(dropped) == cg.param_count(plain)


# -- formulas ------------------------------------------------------------------------------------------------


def test_gpt2_forward_flops_are_2nd_plus_remainder():
    B, S, D, F, L, P = cg.dims("B S D F L P")
    g = load("gpt2", symbolic=True)
    vectors = L * (4 * D + 3 * D + D + F + D) + 2 * D  # norms and biases have no matmul
    expected = 2 * B * S * (cg.param_count(g) - P * D - vectors) + 4 * B * S**2 * D * L
    assert sympy.expand(cg.matmul_flops(g, count="full") - expected) == 0


def test_llama_forward_flops_are_2nd_plus_remainder():
    B, S, D, H, K, L, V = cg.dims("B S D H K L V")
    g = load("llama-3-8b", symbolic=True)
    expected = 2 * B * S * (cg.param_count(g) - V * D - (2 * L + 1) * D) + 4 * B * S**2 * H * K * L
    assert sympy.expand(cg.matmul_flops(g, count="full") - expected) == 0


@each("name", ["gpt2", "llama-3-8b"])
def test_2nd_is_leading_term_in_width(name):
    B, S, D, H, F, K = cg.dims("B S D H F K")
    g = load(name, symbolic=True)
    # scale within a family: a fixed head size, F in proportion to D
    wide = {F: 4 * D, H: D / K} if name == "llama-3-8b" else {F: 4 * D}
    flops, params = cg.matmul_flops(g).subs(wide), cg.param_count(g).subs(wide)
    assert sympy.Poly(flops, D).LC() == sympy.Poly(2 * B * S * params, D).LC()
    assert sympy.Poly(flops, D).degree() == 2


@pytest.mark.parametrize("name", sorted(SMALL))
def test_symbolic_depth_matches_bound_depth(name):
    L = cg.dims("L")
    symbolic = load(name, symbolic=True)
    for depth in (1, 2, 3, 97):
        for question in (cg.flops, cg.bytes_moved, cg.param_count):
            assert sympy.expand(question(symbolic).subs(L, depth)) == question(symbolic, L=depth)


@pytest.mark.parametrize("dropout", [0, 0.1])
@pytest.mark.parametrize("attention", ["flash", "eager"])
@pytest.mark.parametrize("name", sorted(SMALL))
def test_peak_closed_form_matches_unrolled_graph(name, attention, dropout):
    g = load(name, symbolic=True, attention=attention, dropout=dropout)
    closed = cg.peak_memory(g)
    least = cg.timeline(g).holds_from["L"]
    assert least <= 3
    for depth in (1, 2, 3, 8):
        # largest are, in turn, the logits, the feed-forward layer, and attention
        for change in ({}, {"V": 1009} if name != "mlp" else {"C": 1009}, {"F": 1013}, {"B": 31}):
            bound = {**SMALL[name], **point(name), "L": depth, **change}
            played = cg.timeline(g, **bound).peak
            assert cg.peak_memory(g, **bound) == played
            if depth >= least:
                assert cg.evaluate(closed, **only(closed, bound)) == played


def only(formula, sizes):
    names = {s.name for s in formula.free_symbols}
    return {k: v for k, v in sizes.items() if k in names}


def formulas(name):
    g = load(name, symbolic=True)
    return [str(f) for f in (cg.flops(g), cg.bytes_moved(g), cg.peak_memory(g), cg.param_count(g))]


@pytest.mark.parametrize("name", sorted(SMALL))
def test_declaration_is_deterministic(name):
    assert formulas(name) == formulas(name)


def test_formulas_do_not_depend_on_hash_seed():
    code = (
        "import costgraph as cg; from costgraph import models; g = models.load('llama-3-8b', symbolic=True);"
        "peak = cg.peak_memory(g);"
        "print(cg.flops(g), cg.bytes_moved(g), peak, [r.op for r in cg.regimes(peak)])"
    )
    texts = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=PROCESS,
        ).stdout
        for seed in ("1", "2")
    ]
    assert texts[0] == texts[1]


# -- layout --------------------------------------------------------------------------------------------------


def ops_of(g, part):
    return [op for op in g.walk() if part in op.name]


def test_gpt2_splits_qkv_without_a_copy():
    g = load("gpt2", attention="flash")
    (kqv,) = [t for op in ops_of(g, "attention/kqv/addmm") if op.body is not None for t in op.results]
    (kernel,) = [op for op in g.walk() if op.name.endswith("layers/attention")]
    assert all(t.storage is kqv.storage for t in kernel.operands)


@each(("attention", "copies"), [("flash", False), ("eager", True)])
@each("name", ["gpt2", "llama-3-8b"])
def test_only_eager_attention_copies_to_merge_heads(name, attention, copies):
    # flash kernels write (b, s, h, k), eager ones (b, h, s, k)
    g = load(name, attention=attention)
    (merge,) = ops_of(g, "attention/merge")
    assert merge.results[0].is_view is not copies


# -- against torch -------------------------------------------------------------------------------------------


def counted_by_torch(module, shape):
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    device = next(module.parameters()).device
    ids = torch.zeros(shape, dtype=torch.int64, device=device)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module(ids)
    return counter.get_total_flops()


@pytest.mark.parametrize("attention", ["flash", "eager"])
@pytest.mark.parametrize("change", [{}, {"L": 1}, {"S": 1}, {"S": 8, "B": 3}])
@pytest.mark.parametrize("name", ["gpt2", "llama-3-8b"])
def test_matmul_flops_match_plain_torch(name, change, attention):
    torch = pytest.importorskip("torch")
    from benchmarks.plain_torch import GPT2, Llama

    bound = {**SMALL[name], **point(name), **change}
    B, S = bound["B"], bound["S"]
    sizes = {k: v for k, v in bound.items() if k not in "BS"}
    with torch.device("meta"):
        module = (GPT2 if name == "gpt2" else Llama)(**sizes)
    g = load(name, attention=attention)
    assert cg.matmul_flops(g, count="full", **bound) == counted_by_torch(module, (B, S))
    assert cg.param_count(g, **sizes) == sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("name", ["gpt2", "llama-3-8b"])
def test_matmul_flops_match_transformers(name):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    n = SMALL[name]
    common = {"use_cache": False, "attn_implementation": "eager"}
    if name == "gpt2":
        sizes = {
            "n_embd": n["D"],
            "n_head": n["H"],
            "n_inner": n["F"],
            "n_layer": n["L"],
            "n_positions": n["P"],
        }
        build, config = transformers.GPT2LMHeadModel, transformers.GPT2Config
    else:
        sizes = {"hidden_size": n["D"], "num_attention_heads": n["H"], "num_key_value_heads": n["G"]}
        sizes |= {"head_dim": n["K"], "intermediate_size": n["F"], "num_hidden_layers": n["L"]}
        build, config = transformers.LlamaForCausalLM, transformers.LlamaConfig
    # building its mask reads values, which meta tensors lack
    module = build(config(vocab_size=n["V"], bos_token_id=0, eos_token_id=0, **sizes, **common)).eval()
    g = load(name)
    expected = counted_by_torch(module, (2, 5))
    assert cg.matmul_flops(g, count="full", **n, B=2, S=5) == expected
    assert cg.param_count(g, **n) == sum(p.numel() for p in module.parameters())
