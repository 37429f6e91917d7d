"""Which ops torch.autocast runs in another number format, and the words by which a policy names ops.

Source of the lists: the kernels that torch 2.13 registers for AutocastCUDA and AutocastCPU. What torch has in its
list of widest formats (addcmul, scatter_add) needs no entry: ops with no entry run in the common format of their
operands.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ...graph.graph import Graph
from ...graph.op import Op
from ...graph.scopes import base_name
from ...notation.pattern import Affine
from ...ops.blocks import Kernel
from ...ops.contraction import Einsum
from ...ops.index import Gather
from ...ops.pointwise import FUNCTIONS, Pointwise
from ...ops.pooling import Pool
from ...ops.reduce import REDUCTIONS, Reduce
from ...ops.stated import Opaque

__all__ = ["DEVICES", "FALLBACK", "WORDS", "autocast_list", "casts_inside", "family", "word"]

DEVICES = ("cuda", "cpu")

_NORMS = ("norm", "batch_norm")
_KERNELS = ("matmul", "addmm", "conv", "attention", "softmax", "log_softmax", "cross_entropy", *_NORMS, "nll")
_POOLS = tuple(f"{operation}_pool{rank}d" for operation in ("max", "mean") for rank in (1, 2, 3))
_OTHERS = ("concat", "gather", "scatter", "dropout")

#: Names of ops that a policy may give a format: kernels by what they compute, all others by their function.
WORDS: tuple[str, ...] = tuple(dict.fromkeys((*_KERNELS, *_POOLS, *_OTHERS, *FUNCTIONS, *REDUCTIONS)))

#: What an op counts as where a policy does not name it.
FALLBACK: Mapping[str, str] = MappingProxyType(
    {"addmm": "matmul", "attention": "matmul", "cross_entropy": "log_softmax"}
)

_LOWER = ("matmul", "addmm", "conv", "attention")
_FP32: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        # square and relu2 call torch.pow
        "cuda": (
            "softmax", "log_softmax", "cross_entropy", "nll", "norm", "sum", "prod", "pow", "square", "relu2", "exp",
            "expm1", "log", "log1p", "reciprocal", "rsqrt", "softplus",
        ),
        "cpu": ("cross_entropy", "nll", "prod", "max_pool3d", "mean_pool3d"),
    }
)  # fmt: skip

_VIEWS = {"cast", "copy", "rearrange", "slice", "expand"}
_SOFTMAX = {"max", "sub", "exp", "sum"}
_NORM = {"mean", "sub", "square", "add", "rsqrt", "sqrt", "div", "mul", "fma"}
_SUMS = {"log", "fill"}  # of each row, which a trace's kernels hand out, and what a generator would start from
_SCORES = {
    *_SOFTMAX, "matmul", "mul", "div", "add", "softcap", "dropout", "causal_mask", "masked_fill", "where", "maximum",
    *_SUMS,
}  # fmt: skip


def autocast_list(device: str, low: str) -> dict[str, str]:
    """Return the format of each op that torch.autocast casts for, where the lower precision is bf16 or fp16.

    Lists of cuda and cpu differ: a CPU normalises and takes softmaxes in the format that comes in.
    """
    return dict.fromkeys(_LOWER, low) | dict.fromkeys(_FP32[device], "fp32")


def casts_inside(device: str, name: str, given: str) -> bool:
    """Whether torch's kernel reads the format that is given and converts on the way, so that no cast is launched."""
    if device != "cuda":
        return False
    return name in ("sum", "prod", "concat") or (
        name in ("softmax", "log_softmax", "cross_entropy") and given == "fp16"
    )


def word(op: Op) -> str:
    """Return the word of an op; that of a kernel which is none of the known ones is its own name."""
    match op.kind:
        case Einsum(pattern=pattern, extents=extents):
            if set(pattern.result_names).issuperset(extents):
                return "mul"
            return "conv" if any(isinstance(d, Affine) for o in pattern.operands for d in o) else "matmul"
        case Kernel(body=body):
            found = family(body)
            if found == "log_softmax" and _is_loss(op):
                return "cross_entropy"
            return found or body.name
        case Pointwise(function=function):
            return function.name
        case Reduce(operation=operation):
            return operation
        case Pool(pattern=pattern, operation=operation):
            return f"{operation}_pool{sum(isinstance(d, Affine) for d in pattern.operands[0])}d"
        case Opaque():
            return base_name(op.name).rpartition("/")[2]
    return op.kind.name


def _is_loss(op: Op) -> bool:
    """Whether log-probabilities go to the kernel that picks the targets' and nowhere else."""
    readers = [r for t in op.results for r in op.graph.successors(t)]
    return bool(readers) and all(r.body is not None and family(r.body) == "nll" for r in readers)


def family(body: Graph) -> str | None:
    """Return which of the kernels with a place in torch's lists a fused body is, by what it computes.

    Names say little: a softmax may be called anything. Casts and views inside are left out of account.
    """
    words = [_inner(op) for op in body.walk() if op.body is None]
    used = set(words) - _VIEWS
    products = words.count("matmul") + words.count("conv")
    if products == 1 and used <= {"matmul", "conv", "add"}:
        return "conv" if "conv" in used else "addmm"
    if products > 1 and _SOFTMAX <= used <= _SCORES:
        return "attention"
    if used in (_SOFTMAX | {"div"}, _SOFTMAX | {"log"}):
        return "softmax" if "div" in used else "log_softmax"
    if {"sub", "mul", "rsqrt"} <= used <= _NORM | {"lerp"} and ("mean" not in used or _over_the_batch(body)):
        return "batch_norm"
    if "mean" in used and "mul" in used and used & {"rsqrt", "sqrt"} and used <= _NORM:
        return "norm"
    return "nll" if used in ({"along", "mean", "neg"}, {"along", "mean"}) else None


def _over_the_batch(body: Graph) -> bool:
    """Whether means are taken of the first axis and a later one stays: of a channel, and not of a row."""
    patterns = [op.kind.pattern for op in body.ops if isinstance(op.kind, Reduce)]
    return any(p.result_names and p.operands[0][0].names[0] not in p.result_names for p in patterns)


def _inner(op: Op) -> str:
    return ("along" if op.kind.batch else "rows") if isinstance(op.kind, Gather) else word(op)
