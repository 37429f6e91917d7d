"""Small modules, traced and run: the peak is the allocator's, matmul FLOPs are those of torch's counter."""

import pytest
import torch
from torch import nn
from traced import differences, held_by, real_peak, stepper

import costgraph as cg
from costgraph.torch import lower, trace

B, S, D, H = 7, 31, 52, 4
#: Scalars, statistics of a channel, masks that a program holds: every other tensor here is far larger.
NEAR = 4096


class Program(nn.Module):
    """A function of tensors and of modules; with `train` a scalar, whose gradients are dropped after each run."""

    def __init__(self, function, *modules):
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(modules)

    def forward(self, *tensors):
        return self.function(*tensors, *self.parts)


class Loss(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *tensors):
        return self.module(*tensors).sum()


def rand(*sizes, grad=False):
    return torch.randn(sizes).requires_grad_(grad)


def missing(module, inputs, train=False):
    """Bytes of the real run's peak that the trace does not have."""
    module.train(train)
    if not train:
        return real_peak(stepper(module, inputs), *held_by(module, inputs)) - cg.peak_memory(trace(module, *inputs))
    module = Loss(module)

    def step():
        module(*inputs).backward()
        for t in (*module.parameters(), *inputs):
            t.grad = None

    graph = trace(module, *inputs, train=True)
    return real_peak(step, *held_by(module, inputs)) - cg.peak_memory(graph)


# -- layers that torch runs as one op in inference ------------------------------------------------------------------

HIDDEN = torch.arange(S).expand(B, S) > 23
CAUSAL = torch.ones(S, S).triu(1).bool()


def attention(heads=H, bias=True, batch_first=True, **options):
    return Program(
        lambda x, m: m(x, x, x, **options)[0], nn.MultiheadAttention(D, heads, 0.0, bias, batch_first=batch_first)
    )


def layer(inner=97, **options):
    return nn.TransformerEncoderLayer(D, H, inner, **{"batch_first": True} | options)


def masked(function, module):
    return Program(lambda x, mask, m: function(x, mask, m), module)


ATTENTION = nn.MultiheadAttention(D, H, batch_first=True)
WHOLE = {
    "attention and its weights": lambda: (attention(),),
    "attention and the weights of each head": lambda: (attention(average_attn_weights=False),),
    "attention without weights": lambda: (attention(need_weights=False),),
    "attention, padded": lambda: (masked(lambda x, k, m: m(x, x, x, k)[0], ATTENTION), HIDDEN),
    "attention, causal": lambda: (masked(lambda x, k, m: m(x, x, x, None, False, k)[0], ATTENTION), CAUSAL),
    "attention, padded and causal": lambda: (
        Program(lambda x, k, c, m: m(x, x, x, k, attn_mask=c)[0], ATTENTION), HIDDEN, CAUSAL
    ),
    "attention, a mask of numbers": lambda: (
        masked(lambda x, k, m: m(x, x, x, attn_mask=k)[0], ATTENTION), torch.zeros(S, S)
    ),
    "attention of an odd number of heads": lambda: (attention(13),),
    "attention, positions first": lambda: (attention(batch_first=False),),
    "attention without biases": lambda: (attention(bias=False),),
    "attention to something else": lambda: (Program(lambda x, m: m(x, x[:, :23], x[:, :23])[0], ATTENTION),),
    "layer": lambda: (layer(),),
    "layer of wide products": lambda: (layer(1009, activation="gelu"),),
    "layer, norms first": lambda: (layer(norm_first=True),),
    "layer, padded": lambda: (masked(lambda x, k, m: m(x, src_key_padding_mask=k), layer()), HIDDEN),
    "encoder": lambda: (nn.TransformerEncoder(layer(), 3, norm=nn.LayerNorm(D)),),
    "encoder, causal": lambda: (
        masked(lambda x, k, m: m(x, mask=k, is_causal=True), nn.TransformerEncoder(layer(), 2)), CAUSAL
    ),
    "decoder": lambda: (
        Program(lambda x, m: m(x, x), nn.TransformerDecoder(nn.TransformerDecoderLayer(D, H, 97, batch_first=True), 2)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_layers_that_run_as_one_op(name):
    module, *masks = WHOLE[name]()
    assert abs(missing(module, (rand(B, S, D), *masks))) <= NEAR


def test_a_layer_that_runs_as_one_op_makes_the_numbers_of_its_parts_and_their_products():
    module, x = layer().eval(), rand(B, S, D)
    g = trace(module, x, dims=[("B", "S", None)])
    run = lower(g, B=B, S=S)
    run.load_state_dict(module.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(run(x), module(x))
    b, s = cg.dims("B S")
    # four projections, two products of attention, two of the layers behind it
    assert cg.matmul_flops(g) == 2 * (4 * D * D + 2 * D * 97) * b * s + 2 * 2 * D * b * s**2
    assert differences(g, module, (x,), B=B, S=S)[0] == 0
