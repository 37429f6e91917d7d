"""Models composed as eager code: their parameters and matmuls equal the defaults, and they support the same questions.

tests/with_torch/test_zoo_traced.py checks their values and peaks against the reference modules.
"""

from itertools import product

import pytest

import costgraph as cg
from costgraph import models
from costgraph.errors import CostGraphError, GraphError, UnsupportedError
from costgraph.files.graphs import (
    load,
    save,
)
from costgraph.models.registry import FAMILIES

#: Models that declare an eager composition.
NAMES = [name for family in FAMILIES if family.eager_ops for name in family.presets]
SMALL = {
    "gpt2": {"D": 12, "H": 3, "F": 20, "P": 13, "V": 11},
    "llama-2-7b": {"D": 12, "H": 3, "K": 4, "F": 20, "V": 11},
    "llama-3-8b": {"D": 12, "H": 6, "G": 3, "K": 4, "F": 20, "V": 11},
}


@pytest.mark.parametrize(("name", "attention"), list(product(NAMES, ["eager", "flash"])))
def test_eager_models_have_same_parameters_and_matmuls_as_kernels(name, attention):
    plain, composed = (models.load(name, attention=attention, eager_ops=c) for c in (False, True))
    assert cg.param_count(composed) == cg.param_count(plain)
    sizes = {"B": 3} if name == "mlp" else {"B": 3, "S": 257}
    assert cg.matmul_flops(composed, count="full", **sizes) == cg.matmul_flops(plain, count="full", **sizes)
    assert cg.bytes_moved(composed, **sizes) >= cg.bytes_moved(plain, **sizes)
    assert cg.peak_memory(composed, **sizes) >= cg.peak_memory(plain, **sizes)


@pytest.mark.parametrize(
    ("name", "structure"),
    [
        ("gpt2", {"tied": False}),
        ("gpt2", {"activation": "relu"}),
        ("llama-3-8b", {"bias": True}),
        ("llama-3-8b", {"mlp_bias": True, "tied": True}),
        ("llama-2-7b", {"bias": True, "activation": "gelu"}),
    ],
)
def test_eager_composition_supports_other_structures(name, structure):
    plain, composed = (models.load(name, attention="eager", eager_ops=c, **structure) for c in (False, True))
    assert cg.param_count(composed) == cg.param_count(plain)
    assert cg.matmul_flops(composed, count="full", B=3, S=257) == cg.matmul_flops(plain, count="full", B=3, S=257)


def test_mlp_has_no_eager_composition():
    a, b = (models.load("mlp", eager_ops=c) for c in (False, True))
    assert [op.name for op in a.ops] == [op.name for op in b.ops]


def test_default_is_not_composed():
    assert not any(op.kind.name == "keep_alive" for name in NAMES for op in models.load(name).walk())


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "fp8_e4m3", "mxfp8"])
@pytest.mark.parametrize("dropout", [0, 0.1])
@pytest.mark.parametrize("name", sorted(SMALL))
def test_every_option_builds_and_binds(name, dropout, dtype):
    g = models.load(name, attention="eager", dropout=dropout, dtype=dtype, eager_ops=True)
    assert g.outputs[0].dtype.name == dtype
    assert all(q(g, B=2, S=7) > 0 for q in (cg.flops, cg.bytes_moved, cg.peak_memory))


@pytest.mark.parametrize(
    ("name", "step"),
    [
        *((n, "forward") for n in sorted(SMALL)),
        ("gpt2", "training"),
        ("llama-3-8b", "training"),
        ("gpt2", "every_block"),
    ],
)
def test_peak_matches_unrolled_layers(name, step):
    g = models.load(name, symbolic=True, attention="eager", eager_ops=True)
    if step != "forward":
        checkpoint = cg.every_block() if step == "every_block" else None
        g = cg.training_step(g, optimizer=cg.AdamW(), checkpoint=checkpoint)
    for L in (1, 3):
        sizes = {**SMALL[name], "B": 2, "S": 7, "L": L}
        alone = cg.unroll(g, **sizes)
        assert cg.peak_memory(alone) == cg.peak_memory(g, **sizes)
        assert cg.flops(alone) == cg.flops(g, **sizes)


@pytest.mark.parametrize("name", sorted(SMALL))
def test_costs_survive_save_and_load(name, tmp_path):
    g = models.load(name, attention="eager", eager_ops=True)
    save(g, tmp_path / "g.json")
    again = load(tmp_path / "g.json")
    assert cg.peak_memory(again) == cg.peak_memory(g)
    assert cg.flops(again) == cg.flops(g)


def test_multi_head_attention_repeats_no_keys():
    # transformers repeats keys and values only if there are fewer of them
    own, shared = (models.load(n, attention="eager", eager_ops=True) for n in ("llama-2-7b", "llama-3-8b"))
    assert not any(op.kind.name == "expand" and "attention" in op.scope for op in own.walk())
    assert sum(op.kind.name == "expand" and "attention" in op.scope for op in shared.walk()) == 2
    alone = models.load("llama-3-8b", attention="eager", eager_ops=True, shared=False)
    assert not any(op.kind.name == "expand" and "attention" in op.scope for op in alone.walk())
    with pytest.raises(CostGraphError, match="H > G"):
        cg.peak_memory(shared, B=2, S=7, G=32)


def test_composed_option_must_be_boolean():
    with pytest.raises(GraphError, match="model 'gpt2': eager_ops is int, expected True or False"):
        models.load("gpt2", eager_ops=1)


def test_models_without_eager_composition_are_refused():
    with pytest.raises(UnsupportedError, match="model 'mistral-7b': eager_ops=True, expected a model that supports it"):
        models.load("mistral-7b", eager_ops=True)
