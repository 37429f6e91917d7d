"""Copies of operands and results in torch's kernels, for every memory format: one call each against the allocator."""

from itertools import product

import pytest
import torch
from aten_calls import Calls, number
from workspaces import workspaces

from costgraph.torch.tracing.rules import workspaces as rules

aten = torch.ops.aten
IMAGE, VOLUME, ROWS = (2, 6, 8, 10), (2, 6, 4, 8, 10), (2, 6, 8)


def scaled(shape, factor):
    return (*shape[:2], *(int(n * factor) for n in shape[2:]))


def channels_last(shape):
    return torch.rand(shape[0], *shape[2:], shape[1]).movedim(-1, 1)


#: Memory layouts of an operand, by name.
LAYOUTS = {
    "contiguous": torch.rand,
    "channels last": channels_last,
    "part of channels last": lambda shape: channels_last((*shape[:-1], shape[-1] + 3))[..., : shape[-1]],
    "heads last but one": lambda shape: torch.rand(shape[0], *shape[2:-1], shape[1], shape[-1]).movedim(-2, 1),
    "transposed": lambda shape: torch.rand(*shape[:-2], shape[-1], shape[-2]).mT,
    "expanded": lambda shape: torch.rand(()).expand(shape),
}


def pools(name, shape):
    rank = len(shape) - 2
    facts = [2] * rank, [2] * rank, [0] * rank
    yield name, [shape], lambda x: getattr(aten, name)(x, *facts)
    if name.startswith("max"):
        back = lambda g, x, i: getattr(aten, f"{name}_backward")(g, x, *facts, [1] * rank, False, i)  # noqa: E731
        yield f"{name}_backward", [scaled(shape, 0.5), shape], (lambda x: getattr(aten, name)(x, *facts)[1], back)
    else:
        back = lambda g, x: getattr(aten, f"{name}_backward")(g, x, *facts, False, True, None)  # noqa: E731
        yield f"{name}_backward", [scaled(shape, 0.5), shape], back


def adaptive(name, shape):
    sizes = scaled(shape, 0.5)
    yield name, [shape], lambda x: getattr(aten, name)(x, sizes[2:])
    if "max" in name:
        back = lambda g, x, i: getattr(aten, f"{name}_backward")(g, x, i)  # noqa: E731
        yield f"{name}_backward", [sizes, shape], (lambda x: getattr(aten, name)(x, sizes[2:])[1], back)
    else:
        yield f"{name}_backward", [sizes, shape], lambda g, x: getattr(aten, f"{name}_backward")(g, x)


def padding(name, shape):
    rank = len(shape) - 2
    grown = (*shape[:2], *(n + 2 for n in shape[2:]))
    yield name, [shape], lambda x: getattr(aten, name)(x, [1] * (2 * rank))
    yield f"{name}_backward", [grown, shape], lambda g, x: getattr(aten, f"{name}_backward")(g, x, [1] * (2 * rank))


def upsampled(name, shape, *more):
    large = scaled(shape, 2)
    yield f"{name}_backward", [large], lambda g: getattr(aten, f"{name}_backward")(g, large[2:], shape, *more)


MATRIX = (12, 10)
HEADS, SUMS = (5, 2, 3, 8), torch.zeros(5, 3, 2).transpose(1, 2)
KEYS = torch.rand(HEADS)
LABELS = torch.zeros(12, dtype=torch.int64)
CASES = [
    *pools("avg_pool2d", IMAGE), *pools("avg_pool3d", VOLUME),
    *pools("max_pool2d_with_indices", IMAGE), *pools("max_pool3d_with_indices", VOLUME),
    *(case for kind in ("avg", "max") for rank, shape in ((2, IMAGE), (3, VOLUME))
      for case in adaptive(f"{'_' * (kind == 'avg')}adaptive_{kind}_pool{rank}d", shape)),
    *(case for kind in ("reflection", "replication") for rank, shape in ((1, ROWS), (2, IMAGE), (3, VOLUME))
      for case in padding(f"{kind}_pad{rank}d", shape)),
    *(case for kind in ("upsample_nearest", "_upsample_nearest_exact")
      for rank, shape in ((1, ROWS), (2, IMAGE), (3, VOLUME)) for case in upsampled(f"{kind}{rank}d", shape)),
    *(case for name, shape in (
        ("upsample_linear1d", ROWS), ("upsample_bilinear2d", IMAGE), ("upsample_trilinear3d", VOLUME),
        ("upsample_bicubic2d", IMAGE), ("_upsample_bilinear2d_aa", IMAGE), ("_upsample_bicubic2d_aa", IMAGE),
    ) for case in upsampled(name, shape, False)),
    ("pixel_shuffle", [(2, 8, 6, 5)], lambda x: aten.pixel_shuffle(x, 2)),
    ("pixel_unshuffle", [IMAGE], lambda x: aten.pixel_unshuffle(x, 2)),
    ("im2col", [IMAGE], lambda x: aten.im2col(x, [2, 2], [1, 1], [0, 0], [2, 2])),
    ("col2im", [(2, 24, 20)], lambda x: aten.col2im(x, [8, 10], [2, 2], [1, 1], [0, 0], [2, 2])),
    *((name, [MATRIX], lambda x, name=name: getattr(aten, name)(x, 1, False)) for name in ("_softmax", "_log_softmax")),
    *((f"{name}_backward_data", [MATRIX, MATRIX],
       lambda g, y, name=name: getattr(aten, f"{name}_backward_data")(g, y, 1, torch.float32))
      for name in ("_softmax", "_log_softmax")),
    ("native_layer_norm", [MATRIX], lambda x: aten.native_layer_norm(x, [10], None, None, 1e-5)),
    ("native_layer_norm_backward", [MATRIX, MATRIX], lambda g, x: aten.native_layer_norm_backward(
        g, x, [10], torch.ones(12, 1), torch.ones(12, 1), None, None, [True, False, False])),
    ("nll_loss_forward", [MATRIX], lambda x: aten.nll_loss_forward(x, LABELS, None, 1, -100)),
    ("embedding_dense_backward", [(4, 6, 10)],
     lambda g: aten.embedding_dense_backward(g, LABELS[:6].expand(4, 6), 7, -1, False)),
    ("_cdist_forward", [(2, 12, 10), (2, 8, 10)], lambda x, y: aten._cdist_forward(x, y, 1.0, None)),
    ("_scaled_dot_product_flash_attention_for_cpu_backward", [HEADS], lambda g: (
        aten._scaled_dot_product_flash_attention_for_cpu_backward(g, *[KEYS] * 4, SUMS, 0.0, False))),
    ("log_sigmoid_forward", [MATRIX], aten.log_sigmoid_forward),
    ("max", [MATRIX], aten.max.default), ("min", [MATRIX], aten.min.default),
    ("gelu_backward", [MATRIX, MATRIX], lambda g, x: aten.gelu_backward(g, x)),
    ("binary_cross_entropy_with_logits", [MATRIX, MATRIX], lambda x, y: aten.binary_cross_entropy_with_logits(x, y)),
]  # fmt: skip
#: Autograd makes the first one's operands contiguous; only the gradient of `cdist` calls the second.
ELSEWHERE = {"native_group_norm_backward", "_cdist_backward"}


def test_every_copying_kernel_is_tested():
    tables = (
        rules._DENSE, rules._IN_OWN_FORMAT, rules._IN_FORMAT_OF, rules._CHANNELS_LAST_OR_DENSE, rules._BSHD,
        rules._DENSE_ON_CPU,
    )  # fmt: skip
    copying = {name.partition(".")[0] for table in tables for name in table}
    assert copying - {name for name, _, _ in CASES} == ELSEWHERE


@pytest.mark.parametrize(("name", "shapes", "call"), CASES, ids=[name for name, _, _ in CASES])
def test_kernel_copies_match_the_rules(name, shapes, call):
    layouts = [list(LAYOUTS) if len(shape) > 2 else ["contiguous", "transposed", "expanded"] for shape in shapes]
    calls, predicted = [], []
    combinations = list(product(*layouts))
    for chosen in combinations:
        operands = [LAYOUTS[layout](shape) for layout, shape in zip(chosen, shapes, strict=True)]
        function = call
        if isinstance(call, tuple):  # for the indices of a forward max pooling
            places, function = call
            operands.append(places(operands[-1]))
        calls.append(lambda function=function, operands=operands: function(*operands))
        with Calls() as seen:
            calls[-1]()
        predicted.append(sum(number(s.counts.workspace) for s in seen.seen if s.call.name == name))
    assert dict(zip(combinations, workspaces(calls), strict=True)) == pytest.approx(
        dict(zip(combinations, predicted, strict=True)), abs=192
    )
