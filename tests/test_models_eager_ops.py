"""Models declared as eager code runs them: parameters and products as by default, and what can be asked of them.

What they compute, and their peaks beside the reference modules, is in tests/with_torch/test_zoo_traced.py.
"""

from itertools import product

import pytest
from budget import in_part

import costgraph as cg
from costgraph import models
from costgraph.errors import CostGraphError, GraphError, UnsupportedError
from costgraph.files.graphs import (
    load,
    save,
)
from costgraph.models.registry import FAMILIES

#: Models of which it is stated how eager code composes them.
NAMES = [name for family in FAMILIES if family.eager_ops for name in family.presets]
SMALL = {
    "gpt2": {"D": 12, "H": 3, "F": 20, "P": 13, "V": 11},
    "llama-2-7b": {"D": 12, "H": 3, "K": 4, "F": 20, "V": 11},
    "llama-3-8b": {"D": 12, "H": 6, "G": 3, "K": 4, "F": 20, "V": 11},
}


@pytest.mark.parametrize(("name", "attention"), in_part(product(NAMES, ["eager", "flash"]), 0, 3))
def test_parameters_and_products_are_those_of_the_declaration_of_kernels(name, attention):
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
def test_another_structure_is_composed_as_the_published_one(name, structure):
    plain, composed = (models.load(name, attention="eager", eager_ops=c, **structure) for c in (False, True))
    assert cg.param_count(composed) == cg.param_count(plain)
    assert cg.matmul_flops(composed, count="full", B=3, S=257) == cg.matmul_flops(plain, count="full", B=3, S=257)


def test_nothing_is_composed_in_the_mlp():
    a, b = (models.load("mlp", eager_ops=c) for c in (False, True))
    assert [op.name for op in a.ops] == [op.name for op in b.ops]


def test_the_default_holds_nothing():
    assert not any(op.kind.name == "keep" for name in NAMES for op in models.load(name).walk())


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
def test_the_peak_is_that_of_the_layers_one_by_one(name, step):
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
def test_a_file_says_the_same(name, tmp_path):
    g = models.load(name, attention="eager", eager_ops=True)
    save(g, tmp_path / "g.json")
    again = load(tmp_path / "g.json")
    assert cg.peak_memory(again) == cg.peak_memory(g)
    assert cg.flops(again) == cg.flops(g)


def test_heads_that_share_none_repeat_none():
    # transformers repeats keys and values only where there are fewer of them
    own, shared = (models.load(n, attention="eager", eager_ops=True) for n in ("llama-2-7b", "llama-3-8b"))
    assert not any(op.kind.name == "expand" and "attention" in op.scope for op in own.walk())
    assert sum(op.kind.name == "expand" and "attention" in op.scope for op in shared.walk()) == 2
    alone = models.load("llama-3-8b", attention="eager", eager_ops=True, shared=False)
    assert not any(op.kind.name == "expand" and "attention" in op.scope for op in alone.walk())
    with pytest.raises(CostGraphError, match="H > G"):
        cg.peak_memory(shared, B=2, S=7, G=32)


def test_what_is_composed_is_yes_or_no():
    with pytest.raises(GraphError, match="model 'gpt2': eager_ops is int, expected True or False"):
        models.load("gpt2", eager_ops=1)


def test_of_other_models_nothing_is_stated():
    with pytest.raises(UnsupportedError, match="model 'mistral-7b': eager_ops=True, expected a model that supports it"):
        models.load("mistral-7b", eager_ops=True)
