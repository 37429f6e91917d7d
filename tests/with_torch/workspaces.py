"""Workspaces of CPU kernels: memory besides operands and results.

    python tests/with_torch/workspaces.py > docs/accuracy/workspaces.md

Each listed op runs alone, on one thread, under the profiler; its workspace is its peak less its remaining bytes, the
results. Allocations outside of torch's allocator are invisible.
"""

import datetime
import platform
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from costgraph.torch.measurement import (
    _MARK,
    _events,
    _peak_of,
)

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
NAMES = {FP32: "fp32", BF16: "bf16", FP16: "fp16"}

#: Op name, description of its arguments, and the call.
Case = tuple[str, str, Callable[[], Any]]


def case(op: str, condition: str, *args: Any, **options: Any) -> Case:
    return op, condition, partial(getattr(torch.ops.aten, op), *args, **options)


def rand(*sizes: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.rand(sizes).to(dtype)


def ids(most: int, *sizes: int) -> torch.Tensor:
    return torch.randint(0, most, sizes)


def workspaces(calls: Iterable[Callable[[], Any]]) -> list[int]:
    """Return the peak bytes of each call beyond its results."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for call in calls:
            call()
            with record_function(_MARK):
                pass
            result = call()
            with record_function(_MARK):
                pass
            del result
    runs: list[list[tuple[int, int]]] = [[]]
    for event in _events(profiler.profiler.kineto_results.experimental_event_tree()):
        if event is None:
            runs.append([])
        else:
            runs[-1].append(event)
    # a warm-up call runs before the first mark, and between two cases
    return [peak - rest for peak, rest in map(_peak_of, runs[1::2])]


# -- cases -----------------------------------------------------------------------------------------------------------


def matmuls() -> Iterator[Case]:
    for dtype in NAMES:
        for m, k, n in ((64, 128, 256), (256, 512, 1024)):
            a, b, c = rand(m, k, dtype=dtype), rand(k, n, dtype=dtype), rand(n, dtype=dtype)
            shape = f"{NAMES[dtype]}, ({m}, {k}) x ({k}, {n})"
            yield case("mm", shape, a, b)
            yield case("mm", f"{shape}, second transposed", a, b.t().contiguous().t())
            yield case("addmm", shape, c, a, b)
        for s, k in ((64, 32), (256, 64)):
            q = rand(6, s, k, dtype=dtype)
            yield case("bmm", f"{NAMES[dtype]}, (6, {s}, {k}) x (6, {k}, {s})", q, q.mT)


def convolutions() -> Iterator[Case]:
    for dtype in (FP32, BF16):
        for c, n in ((16, 16), (64, 32)):
            for groups in (1, c):
                x, w = rand(2, c, n, n, dtype=dtype), rand(c, c // groups, 3, 3, dtype=dtype)
                shape = f"{NAMES[dtype]}, (2, {c}, {n}, {n}), window 3 x 3, {groups} group{'s' * (groups > 1)}"
                rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], groups)
                yield case("convolution", shape, x, w, None, *rest)
                yield case("convolution_backward", shape, x, x, w, None, *rest, [True, True, False])


def attentions() -> Iterator[Case]:
    name = "_scaled_dot_product_flash_attention_for_cpu"
    for dtype in (FP32, BF16):
        for s, k in ((64, 32), (256, 64), (1024, 64)):
            q = rand(2, 4, s, k, dtype=dtype)
            for causal in (False, True):
                y, sums = getattr(torch.ops.aten, name)(q, q, q, 0.0, causal)
                shape = f"{NAMES[dtype]}, (2, 4, {s}, {k}){', causal' * causal}"
                yield case(name, shape, q, q, q, 0.0, causal)
                yield case(f"{name}_backward", shape, y, q, q, q, y, sums, 0.0, causal)
        yield case("_safe_softmax", f"{NAMES[dtype]}, (8, 64, 64)", rand(8, 64, 64, dtype=dtype), -1)


def norms() -> Iterator[Case]:
    everything = [True, True, True]
    for dtype in (FP32, BF16):
        for rows, size in ((64, 64), (256, 768), (256, 4096)):
            x, w = rand(rows, size, dtype=dtype), rand(size, dtype=dtype)
            y, mean, scale = torch.ops.aten.native_layer_norm(x, [size], w, w, 1e-5)
            shape = f"{NAMES[dtype]}, ({rows}, {size})"
            yield case("native_layer_norm", shape, x, [size], w, w, 1e-5)
            yield case("native_layer_norm_backward", shape, y, x, [size], mean, scale, w, w, everything)
            yield case("_softmax", shape, x, -1, False)
            yield case("_softmax", f"{shape}, first axis", x, 0, False)
            yield case("_log_softmax", shape, x, -1, False)
            yield case("_softmax_backward_data", shape, x, y, -1, dtype)
            yield case("_log_softmax_backward_data", shape, x, y, -1, dtype)
        x, w, shape = rand(4, 32, 16, 16, dtype=dtype), rand(32, dtype=dtype), f"{NAMES[dtype]}, (4, 32, 16, 16)"
        y, mean, scale = torch.ops.aten.native_group_norm(x, w, w, 4, 32, 256, 8, 1e-5)
        yield case("native_group_norm", f"{shape}, 8 groups", x, w, w, 4, 32, 256, 8, 1e-5)
        given = (y, x, mean, scale, w, 4, 32, 256, 8, everything)
        yield case("native_group_norm_backward", f"{shape}, 8 groups", *given)
        y, mean, scale = torch.ops.aten.native_batch_norm(x, w, w, w.clone(), w.clone(), True, 0.1, 1e-5)
        yield case("native_batch_norm", f"{shape}, training", x, w, w, w.clone(), w.clone(), True, 0.1, 1e-5)
        given = (y, x, w, w, w, mean, scale, True, 1e-5, everything)
        yield case("native_batch_norm_backward", f"{shape}, training", *given)


def reductions() -> Iterator[Case]:
    for dtype in (FP32, BF16):
        x, shape = rand(256, 1024, dtype=dtype), f"{NAMES[dtype]}, (256, 1024)"
        for op in ("sum", "mean", "var", "amax", "logsumexp"):
            yield case(op, f"{shape}, last axis", x, [1])
        for op in ("sum", "mean", "linalg_vector_norm"):
            yield case(op, f"{shape}, all", x)
        for op in ("argmax", "max", "median", "cumsum"):
            yield case(op, f"{shape}, last axis", x, 1)
        yield case("sum", f"{shape}, first axis", x, [0])
        yield case("cumsum", f"{shape}, first axis", x, 0)
        yield case("topk", f"{shape}, 8 of the last axis", x, 8)
        yield case("sort", f"{shape}, last axis", x)
        yield case("sort", f"{shape}, first axis", x, 0)


def elementwise() -> Iterator[Case]:
    x, wide = rand(256, 1024), rand(1024, 256)
    half, mask, shape = x.bfloat16(), x > 0.5, "(256, 1024)"
    for op in ("exp", "tanh", "erf", "gelu", "silu", "sigmoid", "relu", "neg", "mish", "softplus"):
        yield case(op, f"fp32, {shape}", x)
    yield case("add", f"fp32 and bf16, {shape}", x, half)
    yield case("add_", f"fp32 and bf16, {shape}", x.clone(), half)
    yield case("add_", f"bf16 and fp32, {shape}", half.clone(), x)
    yield case("mul", f"fp32 and a number, {shape}", x, 2.0)
    yield case("mul", f"fp32 and a transposed one, {shape}", x, wide.t())
    yield case("where", f"fp32, {shape}", mask, x, x)
    yield case("masked_fill", f"fp32, {shape}", x, mask, 0.0)
    yield case("pow", f"fp32, {shape}, exponent 2", x, 2)
    yield case("pow", f"fp32, {shape}, exponent 1.5", x, 1.5)
    yield case("_to_copy", f"fp32 to bf16, {shape}", x, dtype=BF16)
    yield case("clone", f"fp32, {shape}, transposed", wide.t(), memory_format=torch.contiguous_format)
    yield case("clone", "bf16, (256, 1024), transposed", wide.bfloat16().t(), memory_format=torch.contiguous_format)
    yield case("cat", f"two of {shape}", [x, x])
    yield case("tril", shape, x)
    yield case("bernoulli_", shape, x.clone(), 0.5)
    yield case("native_dropout", shape, x, 0.5, True)
    yield case("rand", shape, [256, 1024])
    yield case("randn", shape, [256, 1024])


def lookups() -> Iterator[Case]:
    for rows, size, count in ((512, 64, 256), (1024, 256, 2048)):
        table, index, grad, wide = rand(rows, size), ids(rows, count), rand(count, size), ids(rows, count, size)
        shape = f"table ({rows}, {size}), {count} indices"
        yield case("embedding", shape, table, index)
        yield case("embedding_dense_backward", shape, grad, index, rows, -1, False)
        yield case("index", shape, table, [index])
        yield case("index_select", shape, table, 0, index)
        yield case("gather", shape, table, 0, wide)
        yield case("index_put_", shape, table.clone(), [index], grad)
        yield case("index_put_", f"{shape}, accumulate", table.clone(), [index], grad, True)
        yield case("index_add_", shape, table.clone(), 0, index, grad)
        yield case("scatter_", shape, table.clone(), 0, wide, grad)
        yield case("scatter_add_", shape, table.clone(), 0, wide, grad)
        yield case("nll_loss_forward", shape, rand(count, rows), index, None, 1, -100)


def images() -> Iterator[Case]:
    for n in (16, 32):
        x, shape = rand(2, 16, n, n), f"(2, 16, {n}, {n})"
        y, places = torch.ops.aten.max_pool2d_with_indices(x, [2, 2])
        window = ([2, 2], [2, 2], [0, 0])
        yield case("max_pool2d_with_indices", shape, x, [2, 2])
        yield case("max_pool2d_with_indices_backward", shape, y, x, *window, [1, 1], False, places)
        yield case("avg_pool2d", shape, x, [2, 2])
        yield case("avg_pool2d_backward", shape, y, x, *window, False, True, None)
        yield case("_adaptive_avg_pool2d", shape, x, [7, 7])
        yield case("upsample_nearest2d", shape, x, [2 * n, 2 * n])
        yield case("upsample_bilinear2d", shape, x, [2 * n, 2 * n], False)
        yield case("upsample_bicubic2d", shape, x, [2 * n, 2 * n], False)
        yield case("_upsample_bilinear2d_aa", shape, x, [n // 2, n // 2], False)
        yield case("grid_sampler_2d", shape, x, rand(2, n, n, 2), 0, 0, False)
        yield case("im2col", shape, x, [3, 3], [1, 1], [1, 1], [1, 1])
        yield case("constant_pad_nd", shape, x, [1, 1, 1, 1])
        yield case("reflection_pad2d", shape, x, [1, 1, 1, 1])


def layers() -> Iterator[Case]:
    for s, d in ((16, 32), (64, 128)):
        weights = [rand(4 * d, d), rand(4 * d, d), rand(4 * d), rand(4 * d)]
        # one direction, 2 for an LSTM, one layer with biases, in inference
        given = (rand(s, 8, d), *weights, rand(1, 8, d), rand(1, 8, d), False, [], 2, d, 1, True, False, False, False)
        yield case("mkldnn_rnn_layer", f"({s}, 8, {d}), LSTM", *given)
        given = (rand(s, 4, d).log_softmax(-1), ids(d - 1, 4, 5) + 1, (s,) * 4, (5,) * 4)
        yield case("_ctc_loss", f"({s}, 4, {d})", *given)


def optimizers() -> Iterator[Case]:
    rates = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.1, "eps": 1e-8}
    for n in (8, 64):
        parts = [[rand(n, n), rand(n)] for _ in range(4)]
        shape, steps = f"({n}, {n}) and ({n})", [torch.ones(()), torch.ones(())]
        yield case("_foreach_add", shape, parts[0], 1.0)
        yield case("_foreach_sqrt", shape, parts[0])
        yield case("_foreach_norm", shape, parts[0])
        yield case("_foreach_lerp_", shape, *parts[:2], 0.1)
        yield case("_foreach_addcdiv_", shape, *parts[:3], 0.1)
        yield case("_fused_adamw_", shape, *parts, [], steps, **rates, amsgrad=False, maximize=False)


FAMILIES = (
    matmuls, convolutions, attentions, norms, reductions, elementwise, lookups, images, layers, optimizers,
)  # fmt: skip


def rows() -> list[tuple[str, str, int]]:
    """Return op, condition and workspace bytes of each case."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with torch.no_grad():
        cases = [found for family in FAMILIES for found in family()]
        amounts = workspaces(call for _, _, call in cases)
    return [(op, condition, n) for (op, condition, _), n in zip(cases, amounts, strict=True)]


_PAGE = """# Workspaces: memory of kernels

A kernel may allocate memory that belongs to no tensor. This page lists such workspaces, so that you can explain the
difference between a predicted peak and a measured one.

## On a GPU

Ask for them with `device="cuda"` and the compute capability. `peak_memory`, `timeline` and `lifetimes` then count, for
declared and traced graphs:

| workspace | bytes |
|---|---|
| cuBLAS, per thread that multiplies (main, autograd), kept | 8,519,680; from sm_90 on 33,554,432 |
| softmax gradient: `grad * output` | as its result |
| sort of at least 128 rows with more than 4096 elements | elements x (16 + element size) |
| group norm gradient, N samples, G groups, C channels | 4 (3 N C + 2 N G) |

The sources, in torch 2.13, are `parseChosenWorkspaceSize` in `CublasHandlePool.cpp`, `softmax_backward_cuda_out` in
`SoftMax.cu`, `should_use_small_sort` in `Sort.cpp` and `segmented_sort_pairs` in `Sort.cu`, and
`GroupNormBackwardKernelImplInternal` in `group_norm_kernel.cu`.

```python
>>> import costgraph as cg
>>> R, D, F = cg.dims("R D F")
>>> with cg.Graph("scores") as g:
...     x, w = g.input("x", (R, D), "bf16"), g.param("w", (D, F), "bf16")
...     y = cg.nn.softmax(cg.einsum(x, w, "r d, d f -> r f"), axis=-1)
...     g.output(cg.reduce(y, "r f -> ", "mean"))
>>> timeline = cg.timeline(cg.backward(g), device="cuda", arch="sm_80")
>>> for name, size in timeline.workspaces.items():
...     print(name, size)
cuBLAS 8519680
cuBLAS (autograd) 8519680
softmax/softmax_backward 2*F*R
>>> report = cg.report(g, "a100-80-sxm", device="cuda", R=16, D=32, F=64)
>>> report.peak.by_role["workspace"]
8519680

```

(R rows, D and F widths.) On the command line, pass `--device cuda` to `report` and `train`.

Up to torch 2.6, a matmul with bias took another 1 MiB through cuBLASLt (`costgraph.analysis.allocator.LT_WORKSPACE`).
Up to torch 2.7, Blackwell had the smaller cuBLAS workspace. Workspaces of cuDNN, cuSOLVER and CUTLASS are not
included. `allocator="cuda"` simulates PyTorch's caching allocator from an empty cache: blocks are multiples of 512 B,
and a large block is not split if at most 1 MiB would remain.

## On a CPU

A traced graph includes [some](../reference/torch_ops.md) of these: copies of strided operands, casts before an
elementwise op or a sum, and the buffers of an LSTM. The table was measured op by op on {date} with torch {torch} on
{machine} with {capability}, one thread; some kernels take as much per thread.
In a training step of `nn.MultiheadAttention`, attention's buffers for two threads raised the peak by 2.0 and 2.4 % at
two sizes (2026-11-28). Memory that libraries allocate without PyTorch's allocator is not visible.

- An elementwise op with two number formats converts an operand into a temporary (`add`), as does a mean of bf16.
- A copy of a transposed matrix uses a block of 60 x 60 elements (`clone`).
- `mse_loss` and `smooth_l1_loss` keep the storage of all elements until the result is freed; a trace has a single
  number.

| op | operands | bytes |
|---|---|---|
{table}

No workspace for any operands tried: {none}.

Regenerate the page with `python tests/with_torch/workspaces.py > docs/accuracy/workspaces.md`.
"""


def page() -> str:
    """Return the page as Markdown."""
    measured = rows()
    some = {op for op, _, n in measured if n}
    return _PAGE.format(
        date=datetime.date.today(),
        torch=torch.__version__,
        machine=platform.machine(),
        capability=torch.backends.cpu.get_cpu_capability(),
        table="\n".join(f"| `{op}` | {condition} | {n:,} |" for op, condition, n in measured if n),
        none=", ".join(f"`{op}`" for op in sorted({op for op, _, _ in measured} - some)),
    )


if __name__ == "__main__":
    print(page(), end="")
