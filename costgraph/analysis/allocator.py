"""Device memory beyond tensors: the caching allocator's blocks, library workspaces and kernel temporaries."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import sympy

from ..algebra.extremum import Min
from ..algebra.polynomial import ZERO, Poly, as_poly
from ..algebra.symbols import shown
from ..errors import GraphError
from ..hardware.specs import DEFAULT, Arch, arch_of
from ..ir.graph import Graph, Op, need_choice
from ..ir.strides import numel
from ..notation.pattern import Affine
from ..ops.einsum import Einsum
from ..ops.elementwise import Pointwise
from ..ops.index import Sort
from ..ops.loops import Kernel
from ..ops.reduce import Reduce
from .liveness import LiveRange, Program, View

__all__ = [
    "CachingAllocator",
    "LT_WORKSPACE",
    "blas_workspace",
    "on_device",
    "temporary",
]


# -- caching allocator -------------------------------------------------------------------------------------------------


_BLOCK = 512
#: Requests up to the first size are small and share segments of the second size.
_SMALL, _SMALL_SEGMENT = 1 << 20, 2 << 20
#: Requests below the first size share segments of the second; larger ones are rounded up to multiples of the third.
_LARGE, _LARGE_SEGMENT, _ROUNDED = 10 << 20, 20 << 20, 2 << 20


class _Block(NamedTuple):
    """A block; blocks sort in best-fit order, the smallest first, then by address."""

    size: int
    segment: int
    at: int

    @property
    def end(self) -> int:
        return self.at + self.size


class _Pool:
    """Free blocks for small or for large requests."""

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self.free: list[_Block] = []
        self.starts: dict[tuple[int, int], _Block] = {}
        self.ends: dict[tuple[int, int], _Block] = {}

    def add(self, block: _Block) -> None:
        """Add a free block, merging it with free neighbours."""
        for neighbour in (self.ends.get((block.segment, block.at)), self.starts.get((block.segment, block.end))):
            if neighbour is not None:
                self.remove(neighbour)
                block = _Block(block.size + neighbour.size, block.segment, min(block.at, neighbour.at))
        insort(self.free, block)
        self.starts[block.segment, block.at] = self.ends[block.segment, block.end] = block

    def remove(self, block: _Block) -> None:
        del self.free[bisect_left(self.free, block)], self.starts[block.segment, block.at]
        del self.ends[block.segment, block.end]

    def segment(self, size: int) -> int:
        """Return the segment size for a request that no free block fits."""
        if self.small:
            return _SMALL_SEGMENT
        return _LARGE_SEGMENT if size < _LARGE else -(-size // _ROUNDED) * _ROUNDED

    def splits(self, remainder: int) -> bool:
        """Whether the unused part of a block is split off."""
        return remainder >= _BLOCK if self.small else remainder > _SMALL


class CachingAllocator:
    """Allocate and free blocks; unused bytes of a block that is not split count as allocated."""

    def __init__(self) -> None:
        self.pools = _Pool(small=False), _Pool(small=True)
        self.segments: list[_Pool] = []
        """pool of each segment, in allocation order"""
        self.taken = 0
        """allocated bytes"""
        self.most = 0
        """peak allocated bytes"""

    def take(self, size: int) -> _Block:
        """Allocate a block of at least `size` bytes."""
        size = max(-(-size // _BLOCK) * _BLOCK, _BLOCK)
        pool = self.pools[size <= _SMALL]
        index = bisect_left(pool.free, _Block(size, -1, -1))
        if index < len(pool.free):
            block = pool.free[index]
            pool.remove(block)
        else:
            block = _Block(pool.segment(size), len(self.segments), 0)
            self.segments.append(pool)
        if pool.splits(block.size - size):
            pool.add(_Block(block.size - size, block.segment, block.at + size))
            block = _Block(size, block.segment, block.at)
        self.taken += block.size
        self.most = max(self.most, self.taken)
        return block

    def give(self, block: _Block) -> None:
        """Free a block."""
        self.taken -= block.size
        self.segments[block.segment].add(block)


# -- workspaces --------------------------------------------------------------------------------------------------------


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
