"""Training steps of transformers' default attention: explicit masks or a causal kernel, as in a real run."""

import pytest
import torch
from lazy import lazy_import
from torch import nn
from traced import adamw, differences

import costgraph as cg
from costgraph.ops.loops import Kernel
from costgraph.torch import trace

transformers = lazy_import("transformers")

SCALARS = 4096  # bytes that a real run allocates besides its tensors, as in test_trace_models
HEADS, WIDTH, LAYERS = 5, 12, 1
SMALL = {
    "hidden_size": HEADS * WIDTH, "intermediate_size": 112, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": 1, "head_dim": WIDTH, "vocab_size": 61, "max_position_embeddings": 512,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


class Loss(nn.Module):
    def __init__(self, family):
        super().__init__()
        config = getattr(transformers, f"{family}Config")(**SMALL)
        self.model = getattr(transformers, f"{family}ForCausalLM")(config)

    def forward(self, ids, y, attention_mask=None):
        logits = self.model(ids, attention_mask=attention_mask, use_cache=False).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), y.flatten())


def data(B, S, mask):
    out = torch.randint(0, 61, (B, S)), torch.randint(0, 61, (B, S))
    return (*out, torch.ones(B, S, dtype=torch.int64)) if mask else out


def attention_flops(g, count, **size):
    rows = cg.costs(g, count=count, **size).filter(kind="matmul", direction="compute")
    return sum(r.amount for r in rows.rows if "attention" in r.op)


@pytest.mark.parametrize("mask", [False, True], ids=["no mask", "a mask of ones"])
@pytest.mark.parametrize("family", ["Llama", *(pytest.param(f, marks=pytest.mark.long) for f in ("Gemma", "Qwen3"))])
def test_default_attention_step_matches_a_real_run(family, mask):
    inputs = data(3, 17, mask)
    g = trace(Loss(family), *inputs, dims=[("B", "S")] * len(inputs), train=True, optimizer=adamw)
    assert g.relations.relations == ()
    kernels = [op for op in g.ops if "attention" in op.name and isinstance(op.kind, Kernel)]
    assert len(kernels) == 2 * LAYERS  # forward and backward
    for size in ({"B": 2, "S": 41}, {"B": 5, "S": 67}):
        pairs = size["B"] * HEADS * size["S"] * (size["S"] + 1) // 2  # a query and a key at or before its position
        # scores and values in the forward pass; scores again, and four gradients, in the backward pass
        products = LAYERS * (2 + 5) * 2 * WIDTH * pairs
        assert attention_flops(g, "executed", **size) == products
        module = Loss(family)
        peak, flops = differences(g, module, data(**size, mask=mask), adamw(module.parameters()), **size)
        assert abs(peak) <= SCALARS
        # the counter has no formula for the CPU's kernel: all else is equal
        assert -flops == attention_flops(g, "full", **size)


def test_partial_mask_is_passed_to_the_kernel():
    inputs = data(3, 17, mask=True)
    inputs[2][1, :4] = 0
    g = trace(Loss("Llama"), *inputs, dims=[("B", "S")] * 3, train=True, optimizer=adamw)
    module, size = Loss("Llama"), {"B": 3, "S": 17}
    assert abs(differences(g, module, inputs, adamw(module.parameters()), **size)[0]) <= SCALARS
    B, S = cg.dims("B S")
    assert any(t.shape == (B, 1, S, S) for t in g.tensors)
