"""Matmul FLOPs of a lowered graph: torch's FlopCounterMode against the formula."""

import re

import pytest

torch = pytest.importorskip("torch")
from shared import load, training_step  # noqa: E402  # as above
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import costgraph as cg  # noqa: E402
from costgraph.ir.graph import known_names  # noqa: E402
from costgraph.torch.lowering import lower, random_inputs  # noqa: E402

SIZES = {"B": 3, "S": 7, "D": 12, "H": 4, "G": 2, "K": 6, "F": 13, "L": 3, "V": 23, "P": 11, "C": 5}


def counted_flops(graph, device="cpu", **dims):
    module, inputs = lower(graph, device, **dims), random_inputs(graph, device, **dims)
    with FlopCounterMode(display=False) as counter:
        module(*inputs)
    return counter.get_total_flops()


def sizes_of(graph):
    return {k: v for k, v in SIZES.items() if k in known_names(graph)}


@pytest.mark.parametrize("name", ["mlp", "gpt2", "llama-3-8b"])
@pytest.mark.parametrize("training", [pytest.param(False, marks=pytest.mark.long), True])
def test_models(name, training):
    """Eager attention: the counter has no formula for one of a CPU's kernels."""
    graph = load(name, dtype="fp32", attention="eager")
    graph = cg.training_step(graph) if training else graph
    dims = sizes_of(graph)
    assert counted_flops(graph, **dims) == cg.matmul_flops(graph, count="full", **dims) > 0


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama-3-8b", marks=pytest.mark.long)])
def test_checkpointed_steps_count_recomputed_matmuls(name):
    step = training_step(load(name, dtype="fp32", attention="eager"), checkpoint=cg.every_block())
    dims = sizes_of(step)
    assert counted_flops(step, **dims) == cg.matmul_flops(step, count="full", **dims)


@pytest.mark.parametrize("pattern", [
    "b s d, d f -> b s f", "b s d, d h k -> b s h k", "b h s k, b h t k -> b h s t", "b s f, b s d -> d f",
    "b s f, d f -> b s d", "d, d -> ", "b d, d -> b", "b s d, b s d -> b s", "a b c, c b d -> d a",
    "b g r s k, b g t k -> b g r s t", "(a b) c, b c d -> a d",
])  # fmt: skip
def test_contractions_count_as_matmuls(pattern):
    """2 per index point, whatever the order of the axes; a vector is a matrix with one row."""
    sizes = dict(zip("abcdfghkrst", (2, 3, 5, 7, 11, 2, 3, 5, 2, 7, 11), strict=True))
    left, right = (part.split() for part in pattern.split("->")[0].split(","))
    names = set(re.findall(r"\w", pattern))
    with cg.Graph("g") as g:
        shapes, merged = [], "(a b) c" in pattern
        for part in (["ab", "c"], right) if merged else (left, right):
            shapes.append(tuple(sizes["a"] * sizes["b"] if n == "ab" else sizes[n] for n in part))
        x, y = (g.input(f"x{i}", shape) for i, shape in enumerate(shapes))
        g.output(cg.einsum(x, y, pattern))
    points = 1
    for n in names:
        points *= sizes[n]
    assert counted_flops(g) == cg.matmul_flops(g) == 2 * points


@pytest.mark.parametrize("bias", [False, True])
def test_convolutions_and_their_gradients(bias):
    B, C, N, O = cg.dims("B C N O")
    with cg.Graph("g") as g:
        x = g.input("x", (B, C, N, N), grad=True)
        y = cg.conv(x, "b c h w -> b o h w", window=(3, 3), stride=2, padding=1, bias=bias, o=O)
        g.output(cg.reduce(y, "b o h w -> ", "mean"))
    back = cg.backward(g)
    # the mean's gradient is expanded: three equal-size products
    dims = {"B": 2, "C": 3, "N": 11, "O": 5}
    assert counted_flops(g, **dims) == cg.matmul_flops(g, **dims) == 2 * 2 * 5 * 6 * 6 * 3 * 9
    assert counted_flops(back, **dims) == cg.matmul_flops(back, count="full", **dims) == 3 * cg.matmul_flops(g, **dims)


def test_decomposed_flash_attention_counts_full_squares():
    """On the meta device torch decomposes attention into matmuls, which the counter sees: 4*B*H*K*S**2."""
    B, H, S, K = cg.dims("B H S K")
    with cg.Graph("g") as g:
        g.output(cg.attention(*(g.input(n, (B, H, S, K)) for n in "qkv")))
    dims = {"B": 2, "H": 3, "S": 7, "K": 5}
    assert counted_flops(g, "meta", **dims) == cg.matmul_flops(g, count="full", **dims) == 4 * 2 * 3 * 5 * 7**2
