"""Mixed precision: training policies, torch.autocast lists, and rewriting graphs to other number formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import reduce as fold
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from ..algebra.polynomial import ZERO
from ..algebra.symbols import shown
from ..dtypes import DTYPES, DType, promote
from ..dtypes import dtype as find_dtype
from ..errors import CostGraphError, FormatError, GraphError, UnsupportedError
from ..ir.graph import (
    Graph,
    Loop,
    Op,
    OpKind,
    Storage,
    Tensor,
    base_name,
    building,
    need_choice,
    need_flag,
    need_graph,
    need_name,
    opened,
)
from ..ir.strides import Sizes
from ..notation.pattern import Affine
from ..notation.validation import READ, guarded
from ..ops.einsum import Einsum
from ..ops.elementwise import FUNCTIONS, Pointwise
from ..ops.index import Gather, Scatter
from ..ops.layout import Concat, KeepAlive, contiguous_copy
from ..ops.loops import Kernel
from ..ops.opaque import Opaque, exact, need_declared
from ..ops.reduce import REDUCTIONS, Pool, Reduce
from .rewrite import Rewriter
from .vjp.kernels import SCALED_MM, backward_rule, quantize, unscaled

__all__ = [
    "DEVICES",
    "FALLBACK",
    "WORDS",
    "autocast_list",
    "casts_inside",
    "family",
    "word",
    "POLICIES",
    "ParamFormats",
    "Policy",
    "find_policy",
    "CarryDtypes",
    "KindDtypes",
    "common_dtype",
    "is_float",
    "Retyper",
    "ScaledRetyper",
    "apply_precision",
]


# -- autocast ----------------------------------------------------------------------------------------------------------
# Ops that torch.autocast runs in another dtype, and the words by which a policy names ops.
#
# The lists are the kernels that torch 2.13 registers for AutocastCUDA and AutocastCPU. Torch's promote list (addcmul,
# scatter_add) is not needed: unlisted ops run in the promoted dtype of their operands.

DEVICES = ("cuda", "cpu")

_NORMS = ("norm", "batch_norm")
_KERNELS = ("matmul", "addmm", "conv", "attention", "softmax", "log_softmax", "cross_entropy", *_NORMS, "nll")
_POOLS = tuple(f"{operation}_pool{rank}d" for operation in ("max", "mean") for rank in (1, 2, 3))
_OTHERS = ("concat", "gather", "scatter", "dropout")

#: Op names that a policy may use: kernels by function, other ops by name.
WORDS: tuple[str, ...] = tuple(dict.fromkeys((*_KERNELS, *_POOLS, *_OTHERS, *FUNCTIONS, *REDUCTIONS)))

#: Word that applies to an op that a policy does not name.
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
_SUMS = {"log", "fill"}  # log-sum-exp per row, which traced kernels return, and the seed of a random generator
_SCORES = {
    *_SOFTMAX, "matmul", "mul", "div", "add", "softcap", "dropout", "causal_mask", "masked_fill", "where", "maximum",
    *_SUMS,
}  # fmt: skip


def autocast_list(device: str, low: str) -> dict[str, str]:
    """Return the dtype of each op that torch.autocast casts for, given the lower precision bf16 or fp16.

    The lists of cuda and cpu differ: a CPU computes norms and softmaxes in the incoming dtype.
    """
    return dict.fromkeys(_LOWER, low) | dict.fromkeys(_FP32[device], "fp32")


def casts_inside(device: str, name: str, dtype: str) -> bool:
    """Whether torch's kernel converts its input while reading, so that no cast is launched."""
    if device != "cuda":
        return False
    return name in ("sum", "prod", "concat") or (
        name in ("softmax", "log_softmax", "cross_entropy") and dtype == "fp16"
    )


def word(op: Op) -> str:
    """Return an op's word; for an unknown kernel that is its own name."""
    match op.kind:
        case Einsum(pattern=pattern, extents=extents):
            if set(pattern.result_names).issuperset(extents):
                return "mul"
            return "conv" if any(isinstance(d, Affine) for o in pattern.operands for d in o) else "matmul"
        case Kernel(body=body):
            kernel_name = family(body)
            if kernel_name == "log_softmax" and _is_loss(op):
                return "cross_entropy"
            return kernel_name or body.name
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
    """Whether log-probabilities are read only by NLL kernels."""
    readers = [r for t in op.results for r in op.graph.successors(t)]
    return bool(readers) and all(r.body is not None and family(r.body) == "nll" for r in readers)


def family(body: Graph) -> str | None:
    """Return the kernel in torch's lists that a fused body corresponds to, judged by its ops.

    Names are unreliable: a softmax may be called anything. Casts and views inside are ignored.
    """
    words = [_inner_word(op) for op in body.walk() if op.body is None]
    used = set(words) - _VIEWS
    products = words.count("matmul") + words.count("conv")
    if products == 1 and used <= {"matmul", "conv", "add"}:
        return "conv" if "conv" in used else "addmm"
    if products > 1 and _SOFTMAX <= used <= _SCORES:
        return "attention"
    if used in (_SOFTMAX | {"div"}, _SOFTMAX | {"log"}):
        return "softmax" if "div" in used else "log_softmax"
    if {"sub", "mul", "rsqrt"} <= used <= _NORM | {"lerp"} and ("mean" not in used or _is_per_channel(body)):
        return "batch_norm"
    if "mean" in used and "mul" in used and used & {"rsqrt", "sqrt"} and used <= _NORM:
        return "norm"
    return "nll" if used in ({"along", "mean", "neg"}, {"along", "mean"}) else None


def _is_per_channel(body: Graph) -> bool:
    """Whether means are taken over the first axis and a later one is kept: per channel, not per row."""
    patterns = [op.kind.pattern for op in body.ops if isinstance(op.kind, Reduce)]
    return any(p.result_names and p.operands[0][0].names[0] not in p.result_names for p in patterns)


def _inner_word(op: Op) -> str:
    return ("along" if op.kind.batch else "rows") if isinstance(op.kind, Gather) else word(op)


# -- policies ----------------------------------------------------------------------------------------------------------

_FORMAT_FIELDS = ("params", "compute", "grads", "master", "moments", "matmul", "grad_matmul")


class ParamFormats(NamedTuple):
    """Number formats of the tensors that belong to one parameter in training."""

    param: DType
    """the parameter"""
    grad: DType
    """its gradient, as stored for the optimizer"""
    master: DType | None
    """the optimizer's master copy, None if there is none"""
    moments: DType
    """optimizer state of the same shape"""


@guarded()
@dataclass(frozen=True)
class Policy:
    """Number formats of training. None keeps the declared format.

    Parameters
    ----------
    name : str
        Name in reports and errors.
    params : str, optional
        Format of parameters declared in the graph's default format.
    compute : str, optional
        Format of inputs, buffers and activations in the default format. If it differs from `params` and there is no
        autocast, each parameter is cast once before its first use.
    grads : str, optional
        Format of stored parameter gradients; None: that of each parameter.
    master : str, optional
        Format of the master weights that the optimizer keeps and updates; None: no copy. Parameters that are at least
        as wide get none.
    moments : str, optional
        Format of optimizer state; None: that of the master copy, or of the parameter.
    autocast : mapping of str to str, optional
        Ops that run in another format: by a word in `costgraph.transforms.precision.WORDS`, or the name of a kernel or
        opaque op in the graph. None: every op runs in its incoming format.
    autocast_device : str
        `cuda` or `cpu`; decides whether a cast is part of a kernel or launched separately.
    loss_scaling : bool
        Whether the loss is multiplied by a scale, and the gradients divided by it before the update.
    scopes : mapping of str to str
        Formats by scope of the model: its parameters are stored and its ops run in that format, without autocast.
    matmul : str, optional
        Format that both operands of linear layers are quantized to, with per-tensor scales.
    grad_matmul : str, optional
        Format that the incoming gradient of such a layer is quantized to before its two matmuls; None: that of
        `matmul`.

    Raises
    ------
    FormatError
        If a format is unknown or not a float.
    GraphError
        If another argument is invalid.

    Examples
    --------
    >>> from costgraph.transforms.precision import Policy
    >>> Policy("lean", params="fp32", grads="bf16", moments="fp32").grads
    'bf16'
    """

    name: str
    params: str | None = None
    compute: str | None = None
    grads: str | None = None
    master: str | None = None
    moments: str | None = None
    autocast: Annotated[Mapping[str, str] | None, READ] = field(default=None, hash=False)
    autocast_device: str = "cuda"
    loss_scaling: bool = False
    scopes: Annotated[Mapping[str, str], READ] = field(default_factory=dict, hash=False)
    matmul: str | None = None
    grad_matmul: str | None = None

    def __post_init__(self) -> None:
        need_name("policy", self.name)
        place = f"policy {self.name!r}"
        need_flag(place, loss_scaling=self.loss_scaling)
        need_choice(f"{place}: autocast_device", self.autocast_device, DEVICES)
        for key in _FORMAT_FIELDS:
            if getattr(self, key) is not None:
                object.__setattr__(self, key, _format_name(f"{place}: {key}", getattr(self, key)))
        for key in ("matmul", "grad_matmul"):
            value = getattr(self, key)
            if value is not None and (DTYPES[value].bits > 8 or DTYPES[value].scale or DTYPES[value].codes):
                raise FormatError(
                    f"{place}: {key} {value!r}, expected a format of 8 bits or fewer without block scales"
                )
        for key in ("autocast", "scopes"):
            value = getattr(self, key)
            if value is None and key == "autocast":
                continue
            if not isinstance(value, Mapping) or not all(isinstance(k, str) for k in value):
                raise GraphError(f"{place}: {key} {shown(value)}, expected a mapping of names to formats")
            formats = {k: _format_name(f"{place}: {key} {k!r}", v) for k, v in value.items()}
            object.__setattr__(self, key, MappingProxyType(formats))

    def __reduce__(self) -> tuple[object, ...]:
        # a read-only view of a mapping cannot be pickled
        values = (getattr(self, f.name) for f in fields(self))
        return type(self), tuple(dict(v) if isinstance(v, Mapping) else v for v in values)

    @property
    def matmul_dtype(self) -> str | None:
        """Format in which most matmuls run: set by quantized operands, by autocast, or by activations."""
        return self.matmul or (self.autocast or {}).get("matmul") or self.compute

    def scope_format(self, name: str) -> DType | None:
        """Return the format of the innermost policy scope that contains a name, None if there is none."""
        scopes = [s for s in self.scopes if name == s or name.startswith(f"{s}/")]
        return find_dtype(self.scopes[max(scopes, key=len)]) if scopes else None

    def formats_of(self, param: Tensor) -> ParamFormats:
        """Return the formats of a parameter in a graph made by `apply_precision` with this policy.

        Parameters
        ----------
        param : Tensor
            The parameter, in its stored format.

        Returns
        -------
        ParamFormats
            For a parameter with its own format (of a scope, or declared), the gradient has the wider of that and
            `grads`.

        Raises
        ------
        GraphError
            If `param` is not a parameter.
        """
        if not isinstance(param, Tensor) or param.role != "param":
            raise GraphError(f"policy {self.name!r}: formats of {shown(param)}, expected a parameter")
        dtype = param.dtype
        grad = dtype if self.grads is None else find_dtype(self.grads)
        if self.params is not None and dtype.name != self.params:
            grad = promote(dtype, grad)
        master = None if self.master is None else find_dtype(self.master)
        if master is not None and promote(dtype, master) == dtype:
            master = None
        moments = find_dtype(self.moments) if self.moments is not None else master or dtype
        return ParamFormats(dtype, grad, master, moments)


def _format_name(place: str, value: object) -> str:
    try:
        dtype = find_dtype(value)
    except CostGraphError as error:
        raise FormatError(f"{place}: {error}") from None
    if dtype.kind != "float":
        raise FormatError(f"{place}: {dtype.name!r}, expected a floating format")
    return dtype.name


def _mixed(name: str, device: str, low: str) -> Policy:
    return Policy(
        name,
        params="fp32",
        compute="fp32",
        autocast=autocast_list(device, low),
        autocast_device=device,
        loss_scaling=low == "fp16",  # a gradient in fp16 underflows, one in bf16 has the range of fp32
    )


def _plain(name: str, device: str) -> Policy:
    formats: dict[str, dict[str, str]] = {
        "fp32": {"params": "fp32", "compute": "fp32"},
        "bf16": {"params": "bf16", "compute": "bf16", "moments": "fp32"},
        "bf16-master": {"params": "bf16", "compute": "bf16", "master": "fp32", "moments": "fp32"},
        "megatron-bf16": {"params": "bf16", "compute": "bf16", "grads": "fp32", "master": "fp32", "moments": "fp32"},
        "fp8": {
            "params": "bf16", "compute": "bf16", "moments": "fp32", "matmul": "fp8_e4m3", "grad_matmul": "fp8_e5m2",
        },
        "declared": {},
    }  # fmt: skip
    return Policy(name, autocast_device=device, **formats[name])  # type: ignore[arg-type]  # formats are names


#: Policy names that `find_policy` accepts.
POLICIES = ("fp32", "bf16", "bf16-master", "bf16-mixed", "fp16-mixed", "megatron-bf16", "fp8")


def find_policy(policy: object, *, autocast_device: str | None = None) -> Policy:
    """Return the policy for a name or mapping; a policy is returned unchanged.

    Parameters
    ----------
    policy : None, str, mapping or Policy
        None keeps every format as declared. A name of `POLICIES`:

        - fp32: everything in fp32.
        - bf16: weights, activations and gradients in bf16, optimizer state in fp32. Lightning's bf16-true (torch's
          optimizers over a bf16 model, with state in bf16) is None on a bf16 graph. `bf16=True` in transformers'
          Trainer and in Accelerate is bf16-mixed.
        - bf16-master: bf16 with fp32 master weights.
        - bf16-mixed, fp16-mixed: torch.autocast over fp32 weights and gradients, with loss scaling for fp16, like
          Lightning's bf16-mixed and 16-mixed.
        - megatron-bf16: weights and activations in bf16; gradients, master weights and optimizer state in fp32.
        - fp8: bf16, with linear layers quantized to E4M3 and their incoming gradients to E5M2.

        A mapping such as `{"matmul": "bf16", "softmax": "fp32"}` assigns formats to ops as autocast does, using the
        words in `costgraph.transforms.precision.WORDS`, and keeps everything else as declared.
    autocast_device : str, optional
        `cuda` (default) or `cpu`, whose op lists differ; a Policy has its own.

    Returns
    -------
    Policy
        Named like `policy`, "declared" for None, and "custom" for a mapping.

    Raises
    ------
    GraphError, FormatError
        If the policy, the device or a format is unknown.

    Examples
    --------
    >>> from costgraph.transforms.precision import find_policy
    >>> find_policy("megatron-bf16").grads, find_policy("fp16-mixed").loss_scaling
    ('fp32', True)
    """
    device = "cuda" if autocast_device is None else autocast_device
    need_choice("policy: autocast_device", device, DEVICES)
    if isinstance(policy, Policy):
        if autocast_device not in (None, policy.autocast_device):
            raise GraphError(
                f"policy {policy.name!r}: autocast_device {device!r} differs from the policy's own "
                f"{policy.autocast_device!r}"
            )
        return policy
    if policy is None:
        return _plain("declared", device)
    if isinstance(policy, Mapping):
        return Policy("custom", autocast=policy, autocast_device=device)
    need_choice("policy", policy, POLICIES)
    name = str(policy)
    return _mixed(name, device, name.partition("-")[0]) if name.endswith("-mixed") else _plain(name, device)


# -- formats in op records and loop carries ----------------------------------------------------------------------------


def is_float(t: Tensor) -> bool:
    """Whether a tensor is floating point; all others keep their format."""
    return t.dtype.kind == "float"


def common_dtype(tensors: Sequence[Tensor]) -> DType:
    """Return the common format of tensors, by torch's type promotion."""
    return fold(promote, (t.dtype for t in tensors if is_float(t)))


def _derived(tensors: Sequence[Tensor]) -> DType | None:
    try:
        return fold(promote, (t.dtype for t in tensors))
    except FormatError:
        return None  # 8-bit floats do not promote: the result format was given explicitly


class CarryDtypes:
    """Formats of loop carries, found by rewriting until a fixed point."""

    def __init__(self) -> None:
        self.settled: dict[tuple[Op, int], DType] = {}
        self.history: dict[tuple[Op, int], list[DType]] = {}
        self.changed = False

    def settle(self, op: Op, i: int, entry: DType, after: DType) -> None:
        """Record a body whose carry-out has another format than its carry-in."""
        history = self.history.setdefault((op, i), [entry])
        # if the formats alternate, settle on a lossless one
        dtype = fold(promote, history, after) if after in history else after
        if dtype != entry:
            self.settled[op, i] = dtype
            self.changed = True
        if after not in history:
            history.append(after)


class KindDtypes:
    """Updates the formats in op records to match rewritten operands and policy scopes.

    `default` is the default format of the old graph, `base` its replacement, and `formal_dtypes` the format of each
    formal of the old graph.
    """

    def __init__(self, policy: Policy, default: DType, base: DType, formal_dtypes: Mapping[Tensor, DType]) -> None:
        self.policy, self.default, self.base, self.formal_dtypes = policy, default, base, formal_dtypes

    def of(self, op: Op, operands: Sequence[Tensor]) -> OpKind:
        """Return the record of an op for other operands; bodies are unchanged."""
        kind = op.kind
        if isinstance(kind, Opaque):
            return replace(kind, outputs=self._opaque_outputs(op, kind, operands))
        if isinstance(kind, Einsum):
            return self._contraction(op, kind, operands)
        if isinstance(kind, Pointwise) and kind.inplace and kind.dtype is None:
            dtype = operands[0].dtype
            mixed = dtype.kind == "float" and any(t.dtype != dtype for t in operands[1:])
            return replace(kind, dtype=dtype) if mixed else kind  # an in-place op keeps the format of its operand
        new_fields: dict[str, Any] = {
            name: self._replace_dtype(op, v) if isinstance(v, DType) else self._replace_default(v, op)
            for name, v in kind.stated().items()
        }
        return replace(kind, **new_fields)

    def _contraction(self, op: Op, kind: Einsum, operands: Sequence[Tensor]) -> Einsum:
        old = kind.dtype
        new = _derived(operands) if old == _derived(op.operands) else None
        dtype = self._replace_dtype(op, old) if new is None else new
        return replace(kind, dtype=dtype, workspace=kind.workspace * dtype.bits / old.bits)

    def _replace_dtype(self, op: Op, dtype: DType) -> DType:
        """Return the new format for one that an op states: inside a kernel, that of the operand that had it."""
        graph = op.graph
        while graph.fused and graph.formals:
            for i, f in enumerate(graph.formals):
                if f.dtype == dtype and (i == 0 or dtype == self.default):
                    return self.formal_dtypes[f]
            if graph.parent is None:
                break
            graph = graph.parent
        return self._replace_default(dtype, op)  # type: ignore[no-any-return]  # a format stays one

    def _replace_default(self, value: Any, op: Op) -> Any:
        """Replace the default format in a value by the policy's."""
        if isinstance(value, DType):
            scope_dtype = self.policy.scope_format(op.name)
            return (scope_dtype or self.base) if value == self.default and value.kind == "float" else value
        if isinstance(value, tuple):
            return tuple(self._replace_default(v, op) for v in value)
        if isinstance(value, Mapping):
            return {k: self._replace_default(v, op) for k, v in value.items()}
        return value

    def _opaque_outputs(self, op: Op, kind: Opaque, operands: Sequence[Tensor]) -> tuple[tuple[Sizes, DType], ...]:
        """Return the outputs of an opaque op; the default format becomes that of the operands that had it."""
        default = self.default
        default_operands = [
            t for old, t in zip(op.operands, operands, strict=True) if old.dtype == default and is_float(t)
        ]
        new_default = common_dtype(default_operands) if default_operands else self._replace_default(default, op)
        outputs = tuple((sizes, new_default if dtype == default else dtype) for sizes, dtype in kind.outputs)
        old_dtypes = [t.dtype for t in op.operands], [t.dtype for t in op.results]
        for access, byte_counts, old, new in (
            ("reads", kind.bytes_read, old_dtypes[0], [t.dtype for t in operands]),
            ("writes", kind.bytes_written, old_dtypes[1], [dtype for _, dtype in outputs]),
        ):
            if byte_counts is not None and old != new:
                raise UnsupportedError(
                    f"opaque {op.name!r}: states the bytes that it {access}, but the policy changes its formats from "
                    f"{', '.join(d.name for d in old)} to {', '.join(d.name for d in new)}; expected no stated bytes, "
                    f"or a policy that keeps its formats"
                )
        return outputs


# -- rewriter ----------------------------------------------------------------------------------------------------------


class Retyper(Rewriter):
    """Copies a graph op by op, each in the current formats of its operands."""

    def __init__(self, policy: Policy, old: Graph, carries: CarryDtypes) -> None:
        super().__init__()
        self.policy, self.carries = policy, carries
        self.default = old.dtype
        self.base = old.dtype if policy.compute is None else DTYPES[policy.compute]
        self.formal_dtypes: dict[Tensor, DType] = {}
        """Format of each formal in the old graph."""
        self.records = KindDtypes(policy, self.default, self.base, self.formal_dtypes)
        self.sources: dict[Tensor, Tensor] = {}
        """Outer tensor of a formal, if the same in all iterations."""
        self.slices: dict[Tensor, Tensor] = {}
        """Parameter that a formal slices, one storage per iteration."""
        self.param_casts: dict[tuple[Tensor, DType], Any] = {}
        """Casts of parameters, each made once."""
        self.scoped: set[Tensor] = set()
        """Results of ops, and parameters, in a scope with its own format."""
        self.exact = exact(old) | _explicit_dtype_ops(old)
        """Ops that keep their formats: integer-only ones, and those with an explicit dtype in the program."""
        self.kernels: list[Op] = []
        """Kernels, outermost first, whose body is copied without autocast."""

    # -- sources -------------------------------------------------------------------------------------------------

    def source(self, old: Tensor, new: Graph, suffix: str) -> Any:
        """Copy a source, changing the default format to the policy's."""
        copied = super().source(old, new, suffix)
        if old.dtype == self.default and is_float(old):
            scope = self.policy.scope_format(old.name)
            if old.role == "param":
                params = self.policy.params
                dtype = scope or (old.dtype if params is None else DTYPES[params])
            else:
                dtype = scope or self.base
            _set_dtype(copied, dtype)
            if scope is not None:
                self.scoped.add(copied)
        return copied

    def leaf(self, t: Tensor) -> Tensor:
        """Return the tensor outside all bodies that a formal stands for."""
        while t in self.sources:
            t = self.sources[t]
        return t

    def param(self, t: Tensor) -> Tensor | None:
        """Return the parameter that a tensor is, None for other tensors and views."""
        leaf = self.leaf(t)
        declared = self.slices.get(leaf, leaf)
        return leaf if declared.role == "param" and declared.producer is None else None

    # -- casts ---------------------------------------------------------------------------------------------------

    def cast(self, t: Tensor, dtype: DType, graph: Graph, name: str) -> Tensor:
        """Add a cast."""
        result: Tensor = graph.add_op(Pointwise(function=FUNCTIONS["cast"], dtype=dtype), [t], name).results[0]
        return result

    def cached_for_param(self, t: Tensor, key: DType, make: Callable[[Graph, Tensor, str], Any]) -> Any:
        """Return a parameter's cached replacement, made in the graph that declares it."""
        leaf = self.leaf(t)
        if (leaf, key) not in self.param_casts:
            name = self.slices.get(leaf, leaf).name
            self.param_casts[leaf, key] = make(leaf.graph, leaf, name)
        return self.param_casts[leaf, key]

    def cast_operand(self, t: Tensor, dtype: DType, op: Op, new: Graph) -> Tensor:
        """Cast a tensor, reusing a parameter's cached cast."""
        if self._caches_cast(t, dtype, op) and not new.fused:
            result: Tensor = self.cached_for_param(
                t, dtype, lambda graph, leaf, name: self.cast(leaf, dtype, graph, f"{name}.cast")
            )
            return result
        return self.cast(t, dtype, new, f"{op.scope}/cast" if op.scope else "cast")

    def _caches_cast(self, t: Tensor, dtype: DType, op: Op) -> bool:
        leaf = self.param(t)
        if leaf is None:
            return False
        if self.policy.autocast is None or self.policy.scope_format(op.name) is not None:
            return True
        # torch caches only casts to narrower dtypes, of leaves that require grad
        return self.slices.get(leaf, leaf).requires_grad and dtype.bits < leaf.dtype.bits

    # -- ops -----------------------------------------------------------------------------------------------------

    def autocast_dtype(self, op: Op) -> DType | None:
        """Return the format that autocast runs an op in, None if it is not listed."""
        table = self.policy.autocast
        if table is None or op.kind.overwrites():  # autocast skips in-place ops
            return None
        name = word(op)
        keys = [name, FALLBACK.get(name, "")]
        if op.body is not None:
            keys.insert(0, op.body.name)
        dtype = next((table[k] for k in keys if k in table), None)
        return None if dtype is None else DTYPES[dtype]

    def operand_dtype(self, op: Op, old: Tensor, t: Tensor) -> DType | None:
        """Return the format that an op needs an operand in, None for its current one."""
        if not is_float(t):
            return None
        is_default = old.dtype == self.default
        scope = self.policy.scope_format(op.name)
        if scope is not None:
            return scope if is_default else None
        if self.policy.autocast is not None:
            return None if t.dtype.name == "fp64" else self.autocast_dtype(op)
        return self.base if is_default and (self.param(t) is not None or t in self.scoped) else None

    def operands(self, op: Op, new: Graph) -> list[Tensor]:
        """Return an op's rewritten operands, cast where needed."""
        tensors = [self.tensors[t] for t in op.operands]
        if self.kernels:
            return tensors
        casts: dict[Tensor, Tensor] = {}
        for i, (old, t) in enumerate(zip(op.operands, tensors, strict=True)):
            dtype = None if i == 0 and op.kind.overwrites() else self.operand_dtype(op, old, t)
            if dtype is not None and dtype != t.dtype:
                if t not in casts:
                    casts[t] = self.cast_operand(t, dtype, op, new)
                tensors[i] = casts[t]
        return tensors

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        """Copy an op in its new formats."""
        if op in self.exact:
            self.copy(op, new, suffix)
        elif op.loop is not None:
            self._loop(op, op.loop, new)
        elif isinstance(op.kind, Kernel):
            self._kernel(op, op.kind, new)
        elif isinstance(op.kind, KeepAlive) and op.kind.requested_dtype is not None:
            self._requested_cast(op, op.kind, op.kind.requested_dtype, new)
        else:
            self._plain(op, new)
        if self.policy.scope_format(op.name) is not None and not self.kernels:
            self.scoped.update(self.tensors[t] for t in op.results)

    def _plain(self, op: Op, new: Graph) -> None:
        kernel_dtype = self._converted_inside(op, new)
        if kernel_dtype is not None:
            self._with_casts(op, new, [self.tensors[t] for t in op.operands], kernel_dtype)
            return
        operands = self.operands(op, new)
        if self._is_redundant_cast(op, operands[0] if operands else None):
            self.tensors[op.results[0]] = operands[0]
            return
        if isinstance(op.kind, Concat | Scatter) and len({t.dtype for t in operands if is_float(t)}) > 1:
            target_dtype = operands[0].dtype if op.kind.overwrites() else common_dtype(operands)
            if casts_inside(self.policy.autocast_device, word(op), target_dtype.name) and not new.fused:
                self._with_casts(op, new, operands, target_dtype)
                return
            operands = [
                self.cast_operand(t, target_dtype, op, new) if is_float(t) and t.dtype != target_dtype else t
                for t in operands
            ]
        self.add(op, self.records.of(op, operands), operands, new)

    def _requested_cast(self, op: Op, kind: KeepAlive, requested: DType, new: Graph) -> None:
        """Add a cast that the program requests; under autocast a default-format request keeps the current format."""
        (t,) = (self.tensors[t] for t in op.operands)
        is_default = not kind.fixed and requested == self.default
        dtype = requested if not is_default else self.base if self.policy.autocast is None else t.dtype
        if dtype == t.dtype:
            self.add(op, replace(kind, requested_dtype=dtype), [t], new)
        else:
            self.add(op, Pointwise(function=FUNCTIONS["cast"], dtype=dtype), [t], new)

    def _converted_inside(self, op: Op, new: Graph) -> DType | None:
        """Return the format that a torch kernel converts to while reading, None if it does not."""
        if self.kernels or new.fused or self.policy.scope_format(op.name) is not None:
            return None
        dtype = self.autocast_dtype(op)
        first = self.tensors[op.operands[0]] if op.operands else None
        if dtype is None or first is None or not is_float(first) or first.dtype.bits >= dtype.bits:
            return None
        return dtype if casts_inside(self.policy.autocast_device, word(op), first.dtype.name) else None

    def _with_casts(self, op: Op, new: Graph, operands: Sequence[Tensor], dtype: DType) -> None:
        """Add an op together with the casts of its operands as one kernel."""
        body = new.start_body(word(op), fused=True)
        formals = [body.adopt(t) for t in operands]  # captured in operand order
        inner = [self.cast(t, dtype, body, f"{op.name}/cast") if t.dtype != dtype else t for t in formals]
        new_op = body.add_op(self.records.of(op, inner), inner, f"{op.name}/{word(op)}", op.phase)
        body.outputs += new_op.results
        self.add(op, Kernel(body=body, backward="ops"), body.captured, new)

    def _is_redundant_cast(self, op: Op, t: Tensor | None) -> bool:
        """Whether a cast has become redundant. A result of a body keeps its own storage."""
        if word(op) != "cast" or t is None:
            return False
        kind = self.records.of(op, [t])
        if not isinstance(kind, Pointwise) or kind.dtype != t.dtype:
            return False
        is_output = op.graph.parent is not None and op.results[0] in op.graph.outputs
        return not is_output or (t.role == "activation" and not t.is_view and op.graph.fused)

    # -- bodies --------------------------------------------------------------------------------------------------

    def _kernel(self, op: Op, kind: Kernel, new: Graph) -> None:
        is_known = family(kind.body) is not None
        kernel_dtype = self._converted_inside(op, new)
        operands = [self.tensors[t] for t in op.operands]
        as_one = bool(
            self.kernels
            or is_known
            or self.autocast_dtype(op)
            or self.policy.autocast is None
            or self.policy.scope_format(op.name)
        )
        # other kernels are compiled from ops that autocast has handled one by one
        if as_one:
            operands = operands if kernel_dtype is not None else self.operands(op, new)
            self.kernels.append(op)
        body, operands = self._body(op, new, operands, kernel_dtype)
        if as_one:
            self.kernels.pop()
        if is_known and kernel_dtype is None:
            self._restore_result_dtypes(op, kind.body, body)
        self.add(op, replace(kind, body=body), operands, new)

    def _restore_result_dtypes(self, op: Op, old: Graph, body: Graph) -> None:
        """Return results in the format of the first operand where the old kernel did, as torch's kernels do.

        Later results, sums and statistics, keep the kernel's format, in attention at least fp32. Norms on a CPU return
        them in the format of all operands if that is unique.
        """
        first, new_first, name = old.formals[0].dtype, self.formal_dtypes[old.formals[0]], family(old)
        is_unique = all(self.formal_dtypes[f] == new_first for f in old.formals if f.dtype == first)
        all_results = is_unique and op.call is not None and not op.call.rule and name in _NORMS
        for i, old_output in enumerate(old.outputs):
            t = body.outputs[i]
            dtype = (
                new_first if not i or all_results else promote(t.dtype, DTYPES["fp32"]) if name == "attention" else None
            )
            if dtype is not None and old_output.dtype == first and t.dtype != dtype and is_float(t):
                body.outputs[i] = self.cast(t, dtype, body, f"{t.name}.cast")

    def _body(
        self, op: Op, new: Graph, operands: Sequence[Tensor], kernel_dtype: DType | None = None
    ) -> tuple[Graph, list[Tensor]]:
        """Copy a body for operands in other formats; return it with its final operands."""
        old, loop = op.body, op.loop
        assert old is not None
        carries, slices = ((), ()) if loop is None else (loop.carries, loop.slices)
        statistics_dtype = _statistics_dtype(op, operands[0]) if old.fused and operands else None
        body = new.start_body(old.name, fused=old.fused)
        for i, (f, t, old_operand) in enumerate(zip(old.formals, operands, op.operands, strict=True)):
            formal = self.formal(f, body)
            _set_dtype(formal, t.dtype)
            if f in slices:
                self._slice(formal, t, old_operand)
            elif f not in carries:
                formal.strides, formal.offset = t.strides, t.offset  # a cast is dense
                self.sources[formal] = t
            self.tensors[f], self.formal_dtypes[f] = (
                formal,
                kernel_dtype if kernel_dtype is not None and is_float(t) else t.dtype,
            )
            compute_dtype = statistics_dtype if i == 0 and statistics_dtype is not None else self.formal_dtypes[f]
            if compute_dtype != t.dtype:
                self.tensors[f] = self.cast(formal, compute_dtype, body, f"{op.name}/cast")
        self.fill(old, body)
        body.outputs += [body.adopt(self.tensors[t]) for t in old.outputs]
        return body, self._drop_unused_formals(old, body, operands, {*carries, *slices})

    def _slice(self, formal: Tensor, t: Tensor, old_operand: Tensor) -> None:
        if t.strides != old_operand.strides:
            formal.strides = t.strides[1:]
        declared = self.slices.get(self.leaf(t), self.leaf(t))
        if declared.role == "param" and declared.storage.pieces and declared.producer is None:
            self.slices[formal] = declared

    def _drop_unused_formals(
        self, old: Graph, body: Graph, operands: Sequence[Tensor], fixed: set[Tensor]
    ) -> list[Tensor]:
        """Drop formals that are read only through casts outside the body, and capture those casts."""
        used, formals = list[Tensor](), list[Tensor]()
        for f, formal, t in zip(old.formals, body.formals, operands, strict=False):
            is_unused = f not in fixed and not any(body.successors(formal)) and formal not in body.outputs
            if is_unused and (any(old.successors(f)) or f in old.outputs):
                body.remove_node(formal)
            else:
                used.append(t)
                formals.append(formal)
        body.formals[:] = formals + body.formals[len(operands) :]
        return [*used, *body.captured]

    def _loop(self, op: Op, loop: Loop, new: Graph) -> None:
        operands = [self.tensors[t] for t in op.operands]
        for i in range(len(loop.starts)):
            settled = self.carries.settled.get((op, i))
            if settled is not None and settled != operands[i].dtype:
                operands[i] = self.cast(operands[i], settled, new, f"{op.name}/cast")
        body, operands = self._body(op, new, operands)
        for i in range(len(loop.starts)):
            entry, carry_out = operands[i].dtype, body.outputs[i]
            if carry_out.dtype != entry:
                self.carries.settle(op, i, entry, carry_out.dtype)
                carry_out = self.cast(carry_out, entry, body, f"{op.name}/cast")
            with building(body):
                body.outputs[i] = contiguous_copy(carry_out)
        self.add(op, replace(loop.kind, body=body), operands, new)


def _explicit_dtype_ops(graph: Graph) -> set[Op]:
    """Return the ops that create floats from nothing, or from integers, in a dtype that the program states."""
    requests = (op for op in graph.walk() if isinstance(op.kind, KeepAlive) and op.kind.fixed)
    producers = (t.producer for op in requests for t in op.operands)
    return {m for m in producers if m is not None and not any(map(is_float, m.operands))}


def _statistics_dtype(op: Op, x: Tensor) -> DType | None:
    """Return the format in which a norm computes means and variances, at least fp32; None for other kernels."""
    assert op.body is not None
    if not is_float(x) or family(op.body) not in _NORMS:
        return None
    return promote(x.dtype, DTYPES["fp32"])


def _set_dtype(t: Tensor, dtype: DType) -> None:
    t.dtype = dtype
    t.storage = Storage(t.name, t.sizes, dtype, t.role, t.storage.pieces)


# -- scaled matmuls ----------------------------------------------------------------------------------------------------
# Linear layers in 8-bit formats, whose operands are quantized with per-tensor scales.


def _matmul_of(op: Op) -> Op | None:
    """Return the contraction of an op that may be a linear layer, None if it is not."""
    if op.body is not None:
        if not isinstance(op.kind, Kernel) or family(op.body) != "addmm":
            return None
        op = next(o for o in op.body.ops if isinstance(o.kind, Einsum))
    return op if isinstance(op.kind, Einsum) and word(op) == "matmul" and len(op.operands) == 2 else None


def _quantize(graph: Graph, t: Tensor, name: str, dtype: DType) -> tuple[Tensor, Tensor]:
    """Quantize a tensor within a graph and scope."""
    with opened(graph=graph, levels=tuple(name.split("/")) if name else ()):
        return quantize(t, dtype)


class ScaledRetyper(Retyper):
    """Retyper that also runs linear layers in the policy's `matmul` format."""

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        """Copy an op, or replace a linear layer."""
        if not new.fused and self._is_scaled(op):
            self._add_scaled(op, new)
        else:
            super().emit(op, new, suffix)

    def _is_scaled(self, op: Op) -> bool:
        if self.policy.matmul is None or self.kernels or self.policy.scope_format(op.name) is not None:
            return False
        return self.autocast_dtype(op) is None and self._is_linear(op)

    def _is_linear(self, op: Op) -> bool:
        """Whether an op multiplies activations by a parameter, both in the default format."""
        product = _matmul_of(op)
        if product is None:
            return False
        outer = [self._outer_operand(op, t) for t in product.operands]
        if any(t is None or not is_float(t) or t.dtype.bits < 16 or not t.ndim for t in outer):
            return False
        weights = [t for t in outer if t is not None and self._is_weight(t)]
        return len(weights) == 1 and all(t.dtype == self.default for t in product.operands)

    def _outer_operand(self, op: Op, t: Tensor) -> Tensor | None:
        """Return the rewritten tensor for an operand of a matmul, None if the kernel computes it."""
        if op.body is None:
            operand: Tensor = self.tensors[t]
            return operand
        if t not in op.body.formals:
            return None
        outer: Tensor = self.tensors[op.operands[op.body.formals.index(t)]]
        return outer

    def _is_weight(self, t: Tensor) -> bool:
        leaf = self.leaf(t)
        while leaf.is_view and leaf.producer is not None:
            leaf = self.leaf(leaf.producer.operands[0])
        return self.slices.get(leaf, leaf).role == "param"

    def _add_scaled(self, op: Op, new: Graph) -> None:
        """Add a linear layer with quantized operands, as one kernel with its bias."""
        product = _matmul_of(op)
        assert product is not None
        dtype = DTYPES[self.policy.matmul or ""]
        pairs = []
        for t in product.operands:
            outer = self._outer_operand(op, t)
            assert outer is not None
            if self.param(outer) is not None:
                pairs.append(
                    self.cached_for_param(outer, dtype, lambda graph, leaf, name: _quantize(graph, leaf, name, dtype))
                )
            else:
                pairs.append(_quantize(new, outer, op.scope, dtype))
        old = op.body
        body = new.start_body(SCALED_MM if old is None else old.name, fused=True)
        y = self._scaled_matmul(op, product, pairs, body)
        if old is None:
            body.outputs.append(y)
        else:
            self._add_bias(op, product, y, new, body)
        kind = Kernel(
            body=body,
            workspace=ZERO if old is None else op.workspace,
            backward=backward_rule(self.policy.grad_matmul or dtype.name),
        )
        self.add(op, kind, body.captured, new)

    def _scaled_matmul(self, op: Op, product: Op, pairs: Sequence[tuple[Tensor, Tensor]], body: Graph) -> Tensor:
        """Multiply quantized operands and divide by their scales."""
        (x, x_scale), (w, w_scale) = pairs
        name = product.name if product is not op else f"{op.name}/matmul"
        assert isinstance(product.kind, Einsum)
        (y,) = body.add_op(replace(product.kind, dtype=DTYPES["fp32"]), [x, w], name, op.phase).results
        with opened(graph=body, levels=tuple(op.name.split("/"))):
            return unscaled(y, x_scale, w_scale, self.base)

    def _add_bias(self, op: Op, product: Op, y: Tensor, new: Graph, body: Graph) -> None:
        """Copy the ops of a kernel that follow its matmul."""
        old = op.body
        assert old is not None
        self.tensors[product.results[0]] = y
        for f, t in zip(old.formals, op.operands, strict=True):
            operand = self.tensors[t]
            dtype = None if f in product.operands else self.operand_dtype(op, t, operand)
            if dtype is not None and dtype != operand.dtype:
                operand = self.cast_operand(operand, dtype, op, new)
            self.tensors[f], self.formal_dtypes[f] = operand, operand.dtype
        self.kernels.append(op)
        for inner in old.ops:
            if inner is not product:
                self.emit(inner, body)
        self.kernels.pop()
        body.outputs += [body.adopt(self.tensors[t]) for t in old.outputs]


# -- entry point -------------------------------------------------------------------------------------------------------


def apply_precision(graph: Graph, policy: object, *, autocast_device: str | None = None) -> Graph:
    """Rewrite a forward graph to the number formats of a policy, with every cast as an op.

    Parameters
    ----------
    graph : Graph
        The forward pass; it is not modified.
    policy : None, str, mapping or Policy
        As in `costgraph.transforms.precision.find_policy`.
    autocast_device : str, optional
        `cuda` (default) or `cpu`, whose op lists differ.

    Returns
    -------
    Graph
        Tensors declared in the default format get the policy's, which becomes the new default; others (fp32 tables,
        indices) are unchanged. Casts are inserted where an op runs in another format than its operands have. As in
        torch's autocast, a parameter is cast once, in the graph that declares it: inside a Repeat once per iteration,
        outside it if the iterations share it. Activations are cast at each use. A carry of a Repeat has the format that
        its body converges to. FLOPs do not change, except those for computing and applying scales.

    Raises
    ------
    GraphError
        If the policy, a word, or a scope is unknown, or the graph has more than a forward pass.
    UnsupportedError
        If an opaque op states its bytes and its formats change, or an op is an external call recorded by a trace.

    Examples
    --------
    >>> import costgraph as cg
    >>> from costgraph.transforms.precision import apply_precision
    >>> B, D, F = cg.dims("B D F")
    >>> with cg.Graph("g") as g:
    ...     g.output(cg.linear(g.input("x", (B, D)), "b d -> b f", f=F))
    >>> mixed = apply_precision(g, "bf16-mixed")
    >>> [op.name for op in mixed.ops], cg.param_bytes(mixed)
    (['linear/cast', 'linear/weight.cast', 'linear/matmul'], 4*D*F)
    """
    need_graph("apply_precision", graph)
    if policy is not None:
        need_declared("apply_precision", graph, "trace the module in these formats", floats=True)
    resolved = find_policy(policy, autocast_device=autocast_device)
    if graph.gradients or any(op.phase != "forward" for op in graph.walk()):
        raise GraphError(
            f"apply_precision: graph {graph.name!r} has more than a forward pass, expected only a forward pass"
        )
    _check_names(graph, resolved)
    carries = CarryDtypes()
    while True:
        carries.changed = False
        new = ScaledRetyper(resolved, graph, carries).run(graph)
        if not carries.changed:
            break
    with new:
        new.matmul_dtype = resolved.matmul_dtype or graph.matmul_dtype
        for body in new.bodies():
            body.dtype = graph.dtype if resolved.compute is None else DTYPES[resolved.compute]
    return new


def _check_names(graph: Graph, policy: Policy) -> None:
    """Raise GraphError for words and scopes that match nothing in the graph, since a typo would be ignored."""
    place = f"policy {policy.name!r}"
    kernel_names = {word(op) for op in graph.walk() if isinstance(op.kind, Opaque)}
    kernel_names |= {op.body.name for op in graph.walk() if op.body is not None and isinstance(op.kind, Kernel)}
    for name in policy.autocast or ():
        if name not in WORDS and name not in kernel_names:
            suggestions = get_close_matches(name, [*WORDS, *kernel_names], n=4) or [*sorted(kernel_names), *WORDS]
            raise GraphError(f"{place}: op {shown(name)} is unknown, expected one of {', '.join(suggestions)}")
    names = {t.name for t in graph.params} | {op.name for g in graph.bodies() if not g.fused for op in g.ops}
    for scope in policy.scopes:
        if not any(n == scope or n.startswith(f"{scope}/") for n in names):
            scopes = sorted({n.rpartition("/")[0] for n in names} - {""})
            raise GraphError(
                f"{place}: scope {shown(scope)} contains no op or parameter of graph {graph.name!r}, expected one such "
                f"as {', '.join(get_close_matches(scope, scopes, n=4, cutoff=0) or ['an op scope'])}"
            )
