"""What a GPU's libraries and kernels allocate beside tensors: workspace by architecture, and temporaries of kernels."""

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
from .liveness import Life, Program, View

__all__ = ["LT_WORKSPACE", "blas_workspace", "on_device", "temporary"]

#: Bytes that a product with a bias took while it ran, made by cuBLASLt: up to torch 2.6 `_parseChosenWorkspaceSize` of
#: aten/src/ATen/cuda/CUDABlas.cpp, 1024 KiB, which `gemm_and_bias` takes from the allocator at each call. Today
#: cuBLASLt takes that of cuBLAS (CublasHandlePool.cpp, `unified_cublas_and_lt_workspaces`), and nothing is added.
LT_WORKSPACE = 1 << 20

#: Phases that run in the thread that autograd has for a device.
_IN_AUTOGRAD = ("backward", "recompute")
_FP32 = 4


def on_device(place: str, device: str | None, arch: str | None, side: str = "device") -> View:
    """Return what a program has beside its tensors on a device: a view of it, None where nothing is added.

    What it has on the host is a view of it, too. `arch` is the compute capability as torch names it, by default sm_90.
    GraphError if there is no such device or architecture, an architecture of no device, or a device of the host's side.
    """
    need_choice(f"{place}: side", side, ("device", "host"))
    if side == "host":
        if device is not None:
            raise GraphError(f"{place}: device {shown(device)} beside side 'host', expected one of them")
        return _of_host
    if device is None:
        if arch is not None:
            raise GraphError(f"{place}: arch {shown(arch)} of no device, expected device='cuda' with it")
        return None
    need_choice(f"{place}: device", device, ("cuda",))
    return _on_cuda(arch_of(DEFAULT if arch is None else arch, place))


def _of_host(graph: Graph, program: Program) -> Program:
    return Program(
        [replace(s, workspace=s.op.workspace if s.op.on_host else ZERO) for s in program.steps], program.away
    )


@cache  # formulas are kept by their view
def _on_cuda(arch: Arch) -> View:
    workspace = as_poly(blas_workspace(arch))

    def view(graph: Graph, program: Program) -> Program:
        multiplying = (step.op.phase in _IN_AUTOGRAD for step in program.steps if _multiplies(step.op))
        threads = {"cuBLAS (autograd)" if inside else "cuBLAS": None for inside in multiplying}
        libraries = [Life(name, "workspace", workspace, None, None) for name in threads]
        extra = {op: ZERO if op.on_host else temporary(op) for op in {step.op: None for step in program.steps}}
        steps = [replace(s, workspace=s.workspace + extra[s.op]) if extra[s.op] else s for s in program.steps]
        return Program(steps, [*libraries, *program.lives], program.away)

    return view


def blas_workspace(arch: Arch) -> int:
    """Return the bytes of cuBLAS' workspace, one for each thread that multiplies, which stay.

    Source: torch 2.13, aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize: 32 MiB from Hopper on, before
    it `:4096:2:16:8`, two blocks of 4 MiB and eight of 16 KiB. Up to torch 2.7 Blackwell had the smaller one.
    """
    return 32 << 20 if arch.major >= 9 else (2 * 4096 + 8 * 16) << 10


def _multiplies(op: Op) -> bool:
    """Whether an op is one product of cuBLAS, what is done to its result included."""
    ops = op.kind.body.ops if isinstance(op.kind, Kernel) else (op,)
    return sum(_is_product(inner) for inner in ops) == 1


def _is_product(op: Op) -> bool:
    kind = op.kind
    if not isinstance(kind, Einsum) or not kind.summed or len(op.operands) < 2:
        return False
    return not any(isinstance(axis, Affine) for axes in (*kind.pattern.operands, kind.pattern.result) for axis in axes)


def temporary(op: Op) -> Poly:
    """Return the bytes that torch's kernel for CUDA allocates while it runs, which one for a CPU does not.

    Softmax's gradient y * (g - sum(g * y)) makes g * y (SoftMax.cu, softmax_backward_cuda_out). That of a norm over
    groups makes sums of each channel, and factors of each channel and each group, in fp32: 3*N*C + 2*N*G elements
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
    """Bytes of a sort of 128 rows or more, each of more than 4096 elements; what is smaller is sorted in place.

    Source: torch 2.13, aten/src/ATen/native/cuda/Sort.cpp, should_use_small_sort, and Sort.cu, segmented_sort_pairs:
    places of elements in int64, and where cub's radix sort goes to and fro between passes, elements and places.
    """
    x = op.operands[0]
    *others, length = x.sizes
    long = as_poly(Min(1, sympy.floor(length.expr / 4097)))
    many = as_poly(Min(1, sympy.floor(numel(others).expr / 128)))
    return long * many * numel(x.sizes) * (8 + x.dtype.bytes + 8)


def _is_gradient_of_softmax(op: Op) -> bool:
    """Whether a kernel reduces the product of its two operands, once, and has a result of their shape."""
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
    """Bytes of sums and factors, if a kernel is the gradient of a norm whose statistics are those of (N, G).

    Statistics of the shape of its first axes are those of rows, unless it has gradients of a number for each channel.
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
