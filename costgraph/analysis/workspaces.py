"""Memory that CUDA libraries and kernels allocate in addition to tensors: workspaces and kernel temporaries."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import sympy

from ..algebra.extremum import Min
from ..algebra.polynomial import ZERO, Poly, as_poly
from ..algebra.symbols import shown
from ..errors import GraphError
from ..hardware.specs import (
    DEFAULT,
    Arch,
    arch_of,
)
from ..ir.graph import Graph, Op, need_choice
from ..ir.strides import numel
from ..notation.pattern import Affine
from ..ops.einsum import Einsum
from ..ops.elementwise import Pointwise
from ..ops.index import Sort
from ..ops.loops import Kernel
from ..ops.reduce import Reduce
from .liveness import LiveRange, Program, View

__all__ = ["LT_WORKSPACE", "blas_workspace", "on_device", "temporary"]

#: cuBLASLt workspace in bytes of a matmul with bias, up to torch 2.6: 1024 KiB, which `gemm_and_bias` allocates for
#: each call (aten/src/ATen/cuda/CUDABlas.cpp, `_parseChosenWorkspaceSize`). Newer versions share the cuBLAS workspace
#: (CublasHandlePool.cpp, `unified_cublas_and_lt_workspaces`).
LT_WORKSPACE = 1 << 20

#: Phases that run in autograd's device thread.
_IN_AUTOGRAD = ("backward", "recompute")
_FP32 = 4


def on_device(place: str, device: str | None, arch: str | None, side: str = "device") -> View:
    """Return a view of a program that adds device memory other than tensors, or None if there is nothing to add.

    `side="host"` selects the host memory instead. `arch` is the compute capability in torch's notation, sm_90 by
    default. Raises GraphError for an unknown device or architecture, an architecture without a device, or a device with
    `side="host"`.
    """
    need_choice(f"{place}: side", side, ("device", "host"))
    if side == "host":
        if device is not None:
            raise GraphError(f"{place}: device {shown(device)} with side 'host'; expected only one of them")
        return _of_host
    if device is None:
        if arch is not None:
            raise GraphError(f"{place}: arch {shown(arch)} without a device; add device='cuda'")
        return None
    need_choice(f"{place}: device", device, ("cuda",))
    return _on_cuda(arch_of(DEFAULT if arch is None else arch, place))


def _of_host(graph: Graph, program: Program) -> Program:
    return Program(
        [replace(s, workspace=s.op.workspace if s.op.on_host else ZERO) for s in program.steps], program.away
    )


@cache  # peak formulas are cached by view
def _on_cuda(arch: Arch) -> View:
    workspace = as_poly(blas_workspace(arch))

    def view(graph: Graph, program: Program) -> Program:
        multiplying = (step.op.phase in _IN_AUTOGRAD for step in program.steps if _multiplies(step.op))
        threads = {"cuBLAS (autograd)" if in_autograd else "cuBLAS": None for in_autograd in multiplying}
        libraries = [LiveRange(name, "workspace", workspace, None, None) for name in threads]
        extra = {op: ZERO if op.on_host else temporary(op) for op in {step.op: None for step in program.steps}}
        steps = [replace(s, workspace=s.workspace + extra[s.op]) if extra[s.op] else s for s in program.steps]
        return Program(steps, [*libraries, *program.lives], program.away)

    return view


def blas_workspace(arch: Arch) -> int:
    """Return the bytes of the persistent cuBLAS workspace, one per thread that runs matmuls.

    Source: torch 2.13, aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize: 32 MiB from Hopper on, before
    that `:4096:2:16:8`, two blocks of 4 MiB and eight of 16 KiB. Up to torch 2.7 Blackwell had the smaller workspace.
    """
    return 32 << 20 if arch.major >= 9 else (2 * 4096 + 8 * 16) << 10


def _multiplies(op: Op) -> bool:
    """Whether an op is a single cuBLAS matmul, including its fused epilogue."""
    ops = op.kind.body.ops if isinstance(op.kind, Kernel) else (op,)
    return sum(_is_product(inner) for inner in ops) == 1


def _is_product(op: Op) -> bool:
    kind = op.kind
    if not isinstance(kind, Einsum) or not kind.summed or len(op.operands) < 2:
        return False
    return not any(isinstance(axis, Affine) for axes in (*kind.pattern.operands, kind.pattern.result) for axis in axes)


def temporary(op: Op) -> Poly:
    """Return the temporary bytes that torch's CUDA kernel for an op allocates, unlike the CPU kernel.

    The softmax gradient y * (g - sum(g * y)) materializes g * y (SoftMax.cu, softmax_backward_cuda_out). The group norm
    gradient allocates per-channel sums, and per-channel and per-group factors, in fp32: 3*N*C + 2*N*G elements
    (group_norm_kernel.cu, GroupNormBackwardKernelImplInternal).
    """
    if isinstance(op.kind, Sort):
        return _of_sort(op)
    if not isinstance(op.kind, Kernel):
        return ZERO
    if _is_gradient_of_softmax(op):
        return numel(op.results[0].sizes) * op.operands[0].dtype.bytes
    return _sums_of_groups(op)


def _of_sort(op: Op) -> Poly:
    """Return the temporary bytes of a sort with at least 128 rows of more than 4096 elements; others sort in place.

    Source: torch 2.13, aten/src/ATen/native/cuda/Sort.cpp, should_use_small_sort, and Sort.cu, segmented_sort_pairs:
    int64 indices, and the double buffer of cub's radix sort for elements and indices.
    """
    x = op.operands[0]
    *leading, length = x.sizes
    long = as_poly(Min(1, sympy.floor(length.expr / 4097)))
    batches = as_poly(Min(1, sympy.floor(numel(leading).expr / 128)))
    return long * batches * numel(x.sizes) * (8 + x.dtype.bytes + 8)


def _is_gradient_of_softmax(op: Op) -> bool:
    """Whether a kernel reduces the product of its two operands once, and returns a tensor of their shape."""
    body = op.body
    assert body is not None
    reduced = [inner.operands[0].producer for inner in body.ops if isinstance(inner.kind, Reduce)]
    if len(reduced) != 1 or len(body.formals) != 2 or len(body.outputs) != 1:
        return False
    (product,) = reduced
    if product is None or not isinstance(product.kind, Pointwise) or product.kind.function.name != "mul":
        return False
    shapes = {t.sizes for t in (*body.formals, *body.outputs)}
    return len(shapes) == 1 and {t.storage for t in product.operands} == {t.storage for t in body.formals}


def _sums_of_groups(op: Op) -> Poly:
    """Return the temporary bytes of a group norm gradient with statistics of shape (N, G); zero for other kernels.

    Statistics that match the first two axes belong to a norm over rows, unless there are per-channel gradients.
    """
    if op.phase != "backward":
        return ZERO
    statistics = [t for t in op.operands if t.ndim == 2]
    data = [t for t in op.operands if t.ndim > 2 and any(t.sizes == r.sizes for r in op.results)]
    pairs = [s for s in statistics if sum(s.sizes == other.sizes for other in statistics) == 2]
    if not data or not pairs or pairs[0].sizes[0] != data[0].sizes[0]:
        return ZERO
    rows, channels = data[0].sizes[:2]
    if pairs[0].sizes[1] == channels and all(r.sizes != (channels,) for r in op.results):
        return ZERO
    return _FP32 * (3 * rows * channels + 2 * numel(pairs[0].sizes))
