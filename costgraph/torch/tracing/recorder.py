"""Record a program: each dispatched aten op with its scope and phase, and each storage's lifetime."""

from __future__ import annotations

import re
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple, Protocol
from unittest.mock import patch

import torch
from torch import nn
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import grad_mode
from torch.autograd.function import Function, _SingleLevelFunction
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.checkpoint import CheckpointFunction

from ...algebra.polynomial import Poly, poly
from ...algebra.symbols import is_level, symbol
from ...errors import UnsupportedError
from .call import Call, Counts, Spec, Values, format_of
from .choices import Choice, Choices
from .composites import COMPOSITES, is_composed, run_eagerly
from .data import Data
from .meta_kernels import STAND_INS
from .rules.counts import counts_of, is_derived
from .shapes import caller
from .symbolic_range import Loops
from .translations import translation_of
from .translations.table import Translation

__all__ = [
    "BARRIER",
    "NONE",
    "Barrier",
    "is_untracked",
    "Scopes",
    "path_of",
    "FormatAssertion",
    "Release",
    "Event",
    "Handle",
    "JoinedTensor",
    "RecordedOp",
    "Source",
    "LoopIteration",
    "Leaves",
    "JOINS",
    "record_join",
    "ListPosition",
    "handles",
    "is_listed",
    "one_by_one",
    "list_positions",
    "tags_of",
    "Recorder",
    "backward_passes",
    "barriers",
]


# -- gradient barriers -------------------------------------------------------------------------------------------------

#: Tensor attribute with its `Barrier`; weak references to tensors would break `swap_tensors`.
BARRIER = "_costgraph_barrier"


class Barrier(NamedTuple):
    """Why a gradient does not pass to a tensor's producer."""

    by: str = ""
    """function of the program that states the gradient, or why the tensor is a leaf; "" if none passes"""
    leaf: bool = False
    """whether the tensor is an autograd leaf other than a declared parameter"""
    alone: bool = False
    """whether it is a leaf only if no parameter precedes it: otherwise `requires_grad_` changes nothing"""


#: No gradient passes, as after `detach`.
NONE = Barrier()

#: Tensor attribute with its number among equal views.
_VIEW = "_costgraph_view"


def is_untracked(results: Iterable[Any], grad_off: bool | None) -> bool:
    """Whether an in-place write is invisible to autograd.

    This holds wherever gradients are switched off. Elsewhere it holds for a tensor without a gradient, such as
    `x.data`, which may alias one that has a gradient. `grad_off` is None for a training step.
    """
    marks = (t.__dict__.get(BARRIER) for t in results if isinstance(t, torch.Tensor))
    return bool(grad_off) or (grad_off is False and NONE in marks)


# -- scopes ------------------------------------------------------------------------------------------------------------
# Backward ops belong to the module whose forward pass created their autograd node.


def path_of(name: str) -> str:
    """Return a parameter's or module's scope; compiled modules have the scope of the module inside.

    Keys may be any text: invalid characters become underscores, and so does a missing leading letter.
    """
    parts = (re.sub(r"\W", "_", part, flags=re.ASCII) for part in name.split(".") if part not in ("", "_orig_mod"))
    return "/".join(part if is_level(part) else f"_{part}" for part in parts)


class Scopes:
    """The scope of the running module, from its path in the module tree."""

    def __init__(self, module: nn.Module) -> None:
        self.paths = {id(m): path_of(name) for name, m in module.named_modules()}
        self.stack: list[str] = []
        self.node_scopes: dict[int, str] = {}
        """Scope that created each autograd node, by sequence number."""

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """Follow module calls."""
        pre_hook = register_module_forward_pre_hook(self._enter)
        post_hook = register_module_forward_hook(self._leave, always_call=True)
        try:
            with warnings.catch_warnings():
                # a compiled module warns that such hooks run twice; both have the same path
                warnings.filterwarnings("ignore", message="Using `torch.compile")
                yield
        finally:
            pre_hook.remove()
            post_hook.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        parent = self.stack[-1] if self.stack else ""
        self.stack.append(self.paths.get(id(module), f"{parent}/{type(module).__name__}".strip("/")))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.stack.pop()

    def current(self) -> tuple[str, bool]:
        """Return the running op's scope, and whether it belongs to a recomputed forward pass."""
        node = torch._C._current_autograd_node()
        recomputed = node is not None and torch.is_grad_enabled()
        if node is not None and not self.stack:
            return self.node_scopes.get(node._sequence_nr(), ""), recomputed
        scope = self.stack[-1] if self.stack else ""
        if node is None and torch.is_grad_enabled():  # autograd creates the node just before the op itself runs
            self.node_scopes[torch.autograd._get_sequence_nr() - 1] = scope
        return scope, recomputed


# -- events ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Handle(Spec):
    """A view of a storage, as one torch tensor is."""

    storage: int
    """storage number"""
    offset: Poly
    """first element within the storage"""
    signs: tuple[bool, bool] = (False, False)
    """torch's conjugate bit and negative bit"""
    barrier: Barrier | None = None
    """why no gradient passes to its producer, None where one does"""
    view: int = 0
    """number among equal views, each of which has its own gradient"""


@dataclass
class Source:
    """A storage that exists before the first op."""

    name: str
    role: str
    handle: Handle
    bytes: Poly
    grad: bool = False


@dataclass
class RecordedOp:
    """An op call."""

    target: str
    """name and overload, as in torch.ops.aten; prefixed with any other namespace"""
    operands: tuple[Handle, ...]
    outputs: list[tuple[Handle, int | None, int, Poly | None]]
    """results: the operand whose storage each shares, its position in the returned values (-1: the operand itself), and
    the storage's bytes if they differ from the tensor's"""
    counts: Counts | None
    """costs from its rule; None if the translation gives them"""
    moves: bool
    """False for a view, which touches no memory"""
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    scope: str
    phase: str
    call: Call | None
    """the call with its arguments by schema name"""
    translation: Translation | None
    """builds declared ops for the call"""
    tags: Collection[Any] = ()
    """torch's op tags"""
    choice: Choice | None = None
    """rule that selected it on the device; None if every device runs it"""
    line: str = ""
    """program line, for a call whose costs are not known yet"""
    untracked: bool = False
    """whether it is an in-place write invisible to autograd"""
    no_grad: bool = False
    """whether it ran without autograd"""

    @property
    def name(self) -> str:
        """Op name without the overload."""
        return self.target.partition(".")[0] or "op"


@dataclass
class Release:
    """A storage is freed."""

    storage: int


@dataclass
class FormatAssertion:
    """A program casts a tensor to the format that it already has."""

    operand: Handle
    result: Handle
    """the cast's result: in a separate storage, as a real cast would allocate, or the same one"""
    scope: str
    phase: str
    fixed: bool | None = None
    """whether the format stays the same in another model format; None if unknown"""


@dataclass
class LoopIteration:
    """A loop iteration begins or ends."""

    path: tuple[tuple[int, int], ...]
    """enclosing loops by number, with their iterations"""


@dataclass
class JoinedTensor:
    """A `cat` or `stack` of per-iteration results from a loop, possibly with other tensors."""

    parts: tuple[Handle, ...]
    result: Handle
    loop: int
    axis: int
    stacked: bool
    """whether each part is one position on a new axis"""
    reverse: bool
    """whether the last iteration's result comes first"""
    scope: str
    phase: str


Event = RecordedOp | Release | FormatAssertion | LoopIteration | JoinedTensor


# -- leaves ------------------------------------------------------------------------------------------------------------


class Leaves:
    """Tensors that exist before the first op, each with its data as declared.

    A parameter is one Python object for the whole run. `.to`, `.data =` and `swap_tensors` can give it other data, and
    a program can create further parameters, whose gradients belong to no graph parameter.
    """

    def __init__(self) -> None:
        self._declared: dict[int, tuple[torch.Tensor, str, Handle, bool]] = {}

    def declare(self, t: torch.Tensor, name: str, handle: Handle) -> None:
        """Register a source tensor, and whether it requires a gradient."""
        self._declared.setdefault(id(t), (t, name, replace(handle, barrier=None), t.requires_grad))

    def barrier(self, t: torch.Tensor, handle: Handle) -> Barrier | None:
        """Return why an autograd leaf's gradient reaches no declared tensor; None if it does."""
        if id(t) not in self._declared:
            if t.requires_grad and t._base is None:  # a view's flag follows from its base
                cut = isinstance(t, nn.Parameter) or t.__dict__.get(BARRIER) == NONE
                return Barrier(
                    "an autograd leaf (a parameter, a copy of one, or `requires_grad_`) is created during the run",
                    leaf=True,
                    alone=not cut,
                )
            return t.__dict__.get(BARRIER)
        _, name, declared, was_trained = self._declared[id(t)]
        if t.requires_grad and handle != declared:
            return Barrier(f"the data of parameter {name!r} is replaced during the run", leaf=True)
        if t.requires_grad and not was_trained:
            return Barrier(f"{name!r} starts to require a gradient during the run", leaf=True)
        if was_trained and not t.requires_grad:
            return NONE  # frozen from here on
        return None if t.requires_grad else t.__dict__.get(BARRIER)

    def need_same(self, parameters: Iterable[tuple[torch.Tensor, Handle]]) -> None:
        """Raise an error for parameters whose data was replaced during the run."""
        for t, handle in parameters:
            _, name, declared, _ = self._declared[id(t)]
            if replace(handle, barrier=None) != declared:
                raise UnsupportedError(
                    f"trace: the data of parameter {name!r} is replaced during the run; convert, assign or swap "
                    f"parameters before the trace"
                )


# -- joins -------------------------------------------------------------------------------------------------------------
# `cat` and `stack` of per-iteration results: the number of parts is the iteration count, a symbolic size.

aten = torch.ops.aten

#: Ops that join a list of tensors.
JOINS = (aten.cat.default, aten.stack.default)


class Recording(Protocol):
    """The part of `Recorder` used here."""

    loop_state: Loops
    scopes: Scopes
    phase: str
    events: list[Event]

    @staticmethod
    def barrier(t: torch.Tensor, mark: Barrier = ...) -> None:
        """Mark that no gradient passes to a tensor's producer."""

    def handle_of(self, t: torch.Tensor) -> Handle:
        """Return the handle of a tensor."""

    def new_handle(self, t: torch.Tensor) -> Handle:
        """Return a new tensor's handle."""


def record_join(recorder: Recording, func: Any, parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor | None:
    """Record a join of per-iteration results and return its result; None for any other list."""
    part = recorder.loop_state.find_join(parts)
    if part is None:
        return None
    first, stacked = parts[part.first], func is aten.stack.default
    shape, axis = list(first.shape), dim % (first.ndim + stacked)
    lengths = [1 if stacked else t.shape[axis] for t in parts]
    length = sum(lengths[: part.first]) + sum(lengths[part.last :]) + part.count * lengths[part.first]
    shape[axis : axis + 1 - stacked] = [length]
    result: torch.Tensor = aten.new_empty.default(first, shape)
    operands = tuple(map(recorder.handle_of, parts))
    barrier = next((h.barrier for h in operands if h.barrier is not None), None)
    if barrier is not None:
        recorder.barrier(result, barrier)
    scope, _ = recorder.scopes.current()
    recorder.events.append(
        JoinedTensor(
            operands, recorder.new_handle(result), part.loop, axis, stacked, part.reverse, scope, recorder.phase
        )
    )
    return result


# -- foreach and fused ops ---------------------------------------------------------------------------------------------
# `_foreach_` and `_fused_` calls are split into one call per list position.

#: Their name prefixes; `_foreach_` precedes the single-tensor op's name.
_FOREACH, _FUSED = "_foreach_", "_fused_"
#: Schema names of the numbers that list ops pair with each tensor.
_NUMBERS = ("scalar", "scalars")


def is_listed(call: Call) -> bool:
    """Whether a call maps over lists of tensors."""
    return call.name.startswith((_FOREACH, _FUSED)) and any(map(_is_list, call.arguments.values()))


def _first_list(call: Call) -> tuple[Spec, ...]:
    """Return the first list of tensors, which has one per position."""
    tensors: tuple[Spec, ...] = next(filter(_is_list, call.arguments.values()))
    return tensors


def _is_list(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and isinstance(value[0], Spec)


def one_by_one(call: Call) -> list[Call]:
    """Split a call on lists into calls on single tensors; other calls are returned unchanged.

    Each gets the name of the single-tensor op, if there is one, and that op's argument names.
    """
    if not is_listed(call):
        return [call]
    name = call.name.removeprefix(_FOREACH)
    scalar_name = "value" if name.startswith("addc") else "other"
    first_list = _first_list(call)

    def call_at(index: int) -> Call:
        arguments = {
            scalar_name if k in _NUMBERS else k: (v[index] if index < len(v) else None) if isinstance(v, tuple) else v
            for k, v in call.arguments.items()
        }
        return replace(
            call,
            name=name,
            arguments=arguments,
            results=call.results[index : index + 1] or first_list[index : index + 1],
        )

    return [call_at(i) for i in range(len(first_list))]


@cache
def tags_of(name: str) -> tuple[Any, ...]:
    """Return torch's tags for a single-tensor op."""
    packet = getattr(torch.ops.aten, name, None)
    return () if packet is None else tuple(getattr(packet, packet.overloads()[0]).tags)


@dataclass(frozen=True)
class ListPosition:
    """A call's arguments and results at one list position."""

    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    operands: Mapping[Handle, int]
    """operand numbers by tensor"""
    outputs: list[tuple[Handle, int | None, int, Poly | None]]


def list_positions(call: Call, all_positions: ListPosition) -> list[ListPosition]:
    """Return the arguments and results at each list position; for other calls, only `all_positions`."""
    return (
        [_position_of(all_positions, i) for i in range(len(_first_list(call)))] if is_listed(call) else [all_positions]
    )


def _position_of(all_positions: ListPosition, i: int) -> ListPosition:
    def select(value: Any) -> Any:
        return value[i : i + 1] if isinstance(value, tuple) else value

    arguments = tuple(map(select, all_positions.arguments))
    keywords = {k: select(v) for k, v in all_positions.keywords.items()}
    operands: dict[Handle, int] = {}
    for h in handles((arguments, *keywords.values())):
        if h.numel:
            operands.setdefault(h, len(operands))
    outputs = [
        (h, None if index >= 0 else operands[h], min(index, 0), bytes_)
        for h, _, index, bytes_ in all_positions.outputs
        if index == i or (index < 0 and h in operands)
    ]
    return ListPosition(arguments, keywords, operands, outputs)


def handles(value: Any) -> Iterator[Handle]:
    """Yield the tensors in an argument, with lists flattened."""
    if isinstance(value, Handle):
        yield value
    elif isinstance(value, tuple | list):
        for v in value:
            yield from handles(v)


# -- recorder ----------------------------------------------------------------------------------------------------------

# Reference counts for a tensor and its storage when only autograd's input buffer holds them: the buffer's own, and
# those taken by the call.
_SOLE_TENSOR_REFERENCES, _SOLE_STORAGE_REFERENCES = 4, 2

# gradients of lookups write into new zeros
_IN_PLACE_FORMS = {
    aten.index_put.default: aten.index_put_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.index_fill.int_Scalar: aten.index_fill_.int_Scalar,
    aten.put.default: aten.put_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter_add.default: aten.scatter_add_.default,
}
#: The same, in the nodes of `clamp` only; elsewhere these ops allocate a new tensor.
_IN_PLACE_IN_CLAMP = {
    aten.logical_and.default: aten.logical_and_.default,
    aten.logical_or.default: aten.logical_or_.default,
}

# ops that only query tensors, or mark a profiler region
_UNRECORDED = ("prim", "profiler")


@dataclass(eq=False)
class Recorder(TorchDispatchMode):
    """Dispatch mode that records every aten op below autograd.

    `scopes` gives an op's module, `data` known tensor values, `choices` the rule that selected a kernel.
    `kernels` are ops that a CPU decomposes but the device implements; `stand_ins` replace ops. With `symbols`, an op
    without a rule costs symbols named after it; otherwise it is an error.
    """

    values: Values
    scopes: Scopes
    data: Data
    loop_state: Loops
    symbols: bool = False
    device: str = "cpu"
    kernels: Collection[Any] = ()
    stand_ins: Mapping[Any, Callable[..., Any]] = field(default_factory=lambda: STAND_INS)
    choices: Choices = field(default_factory=Choices)
    phase: str = "forward"
    paused: bool = False
    grad_off: bool | None = None
    """whether the program has gradients off, in an inference trace; None in a training step"""
    events: list[Event] = field(default_factory=list)
    sources: dict[int, Source] = field(default_factory=dict)
    leaves: Leaves = field(default_factory=Leaves)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types for it
        self._storage_numbers: dict[int, int] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._producer_nodes: dict[int, int] = {}  # autograd node that produced each storage
        self._views: Counter[Handle] = Counter()
        self._count = 0
        self.loop_state.note = lambda path: self.events.append(LoopIteration(path))

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Run ops unrecorded."""
        self.paused = True
        try:
            yield
        finally:
            self.paused = False

    supports_higher_order_operators = True

    # -- storages ------------------------------------------------------------------------------------------------

    def _storage_number(self, t: torch.Tensor) -> tuple[int, bool]:
        """Return a tensor's storage number, and whether it is new."""
        storage = t.untyped_storage()
        key = storage._cdata
        if key in self._storage_numbers:
            return self._storage_numbers[key], False
        self._count += 1
        number = self._storage_numbers[key] = self._count

        def gone(_: Any) -> None:
            self._storage_numbers.pop(key, None)
            self._alive.pop(number, None)
            if number not in self.sources:
                self.events.append(Release(number))

        self._alive[number] = weakref.ref(storage, gone)
        return number, True

    def new_handle(self, t: torch.Tensor) -> Handle:
        """Return a new tensor's handle."""
        return self.handle(t, self._storage_number(t)[0])

    def has_live_storages(self) -> bool:
        """Whether a storage from the run is still alive."""
        return not self._alive.keys() <= self.sources.keys()

    def handle(self, t: torch.Tensor, storage: int) -> Handle:
        """Return a tensor's handle in the given storage."""
        spec, size = self.values.spec(t), self.values.translator.size
        signs, view = (t.is_conj(), t.is_neg()), t.__dict__.get(_VIEW, 0)
        handle = Handle(spec.sizes, spec.strides, spec.dtype, storage, size(t.storage_offset()), signs, view=view)
        if self.grad_off is not False:
            return handle
        barrier = self.leaves.barrier(t, handle) if t.is_leaf else t.__dict__.get(BARRIER)
        return handle if barrier is None else replace(handle, barrier=barrier)

    @staticmethod
    def barrier(t: torch.Tensor, mark: Barrier = NONE) -> None:
        """Mark that no gradient passes to a tensor's producer, or that a program's function states it."""
        t.__dict__[BARRIER] = mark

    def handle_of(self, t: torch.Tensor) -> Handle:
        """Return a tensor's handle; a storage without a recorded producer becomes a constant buffer."""
        return self.source(t, "buffer", "")

    def source(self, t: torch.Tensor, role: str, name: str) -> Handle:
        """Declare a tensor that exists before the first op; a storage's first name counts."""
        number, new = self._storage_number(t)
        if new or name:
            self.leaves.declare(t, name, self.handle(t, number))
        handle = self.handle(t, number)
        if new and handle.numel:
            name = name or f"constant_{number}"
            self.sources[number] = Source(name, role, handle, self._bytes(t), t.requires_grad and t.is_leaf)
        return handle

    def _bytes(self, t: torch.Tensor) -> Poly:
        return self.values.translator.size(t.untyped_storage().nbytes())

    def record_cast(self, t: torch.Tensor, result: torch.Tensor) -> FormatAssertion:
        """Record a cast to the format that a tensor already has."""
        event = FormatAssertion(self.handle_of(t), self.new_handle(result), self.scopes.current()[0], self.phase)
        self.events.append(event)
        return event

    # -- calls ---------------------------------------------------------------------------------------------------

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and torch would check on each call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.device == "cpu":
            return self._dispatched(func, args, kwargs)
        with torch._C.DisableTorchFunction():  # torch functions would report the simulated device
            return self._dispatched(func, args, kwargs)

    def _dispatched(self, func: Any, args: Any, kwargs: Any) -> Any:
        # long: one case per kind of call that is not recorded as is
        if func is torch.ops.prim.device.default:  # queried several times per op
            t = args[0]
            return t.fake_device if isinstance(t, FakeTensor) and not t.fake_mode.in_kernel_invocation else func(t)
        kwargs = kwargs or {}
        if self.paused:
            return self.stand_ins.get(func, func)(*args, **kwargs)
        if isinstance(func, HigherOrderOperator):
            with self:
                return run_eagerly(func, args, kwargs)
        if not isinstance(func, OpOverload):
            raise UnsupportedError(f"{caller()}: op {func} has no rule; expected an op from torch.ops")
        if func.namespace == "prims" and hasattr(func, "impl_aten"):  # in forward-mode formulas
            with self:
                return func.impl_aten(*args, **kwargs)
        if func.namespace in _UNRECORDED:
            return func(*args, **kwargs)
        answer = self.data.answer(func, args)
        if answer is not None:
            return answer
        if func is aten.equal.default:
            raise UnsupportedError(
                f"{caller()}: compares two tensors, whose values are unknown; choose the branch to trace: "
                f"choose={{'equal': True}} or choose={{'equal': False}}"
            )
        decomposition = COMPOSITES.get(func) or (
            func.decompose if is_composed(func) and func not in self.kernels else None
        )
        if decomposition is not None:
            with self:  # below autograd and inside ops, composites have not been decomposed yet
                return decomposition(*args, **kwargs)
        if func is aten.lift_fresh.default:
            return self._record_lift(args)
        if func is aten.add.Tensor and not kwargs and self._accumulates_in_place(*args):
            func = aten.add_.Tensor
        elif (in_place_op := _in_place(func)) is not None and self._is_from_current_node(args[0]):
            func = in_place_op
        if func in JOINS and self.loop_state.loops and (result := record_join(self, func, *args, **kwargs)) is not None:
            self.loop_state.mark([result])
            return result
        operands: dict[Handle, int] = {}

        def operand(t: torch.Tensor) -> Handle:
            handle = self.handle_of(t)
            if handle.numel:
                operands.setdefault(handle, len(operands))
            return handle

        try:
            positional = tuple(self.values.convert(a, operand) for a in args)
            keywords = {k: self.values.convert(v, operand) for k, v in kwargs.items()}
            out = self.stand_ins.get(func, func)(*args, **kwargs)
            self.data.note(func, args, kwargs, out)
            self.data.note_producer(func, args, out)
            if func is aten._local_scalar_dense.default:
                self.data.note_read(args[0], out)
            detaches = func is aten.detach.default and self.grad_off is not None and not torch.is_grad_enabled()
            if self.grad_off or detaches:
                for t in _leaves(out):
                    if isinstance(t, torch.Tensor) and not any(t is a for a in args):
                        self.barrier(t)
            if not detaches:  # a detach without gradients is the same tensor
                self._record(func, positional, keywords, operands, out)
        except UnsupportedError as error:
            location = f"{caller()}: "
            raise UnsupportedError(f"{location}{str(error).removeprefix(location)}") from None
        self.loop_state.mark(_leaves(out))
        return out

    def _record_lift(self, args: Any) -> Any:
        """Record that Python numbers become a tensor."""
        func = aten.lift_fresh.default
        out = func(*args)
        self.data.note(func, args, {}, out)
        with _disable_current_modes():
            numbers = args[0].tolist()
        op = func if isinstance(numbers, list) else aten.scalar_tensor.default
        self._record(op, (self.values.convert(numbers, self.handle_of),), {"dtype": format_of(args[0].dtype)}, {}, out)
        return out

    def _accumulates_in_place(self, x: Any, y: Any) -> bool:
        """Whether autograd accumulates a gradient in place, into one that nothing else references.

        Fake tensors never take that path. The sum belongs to no node: the accumulated gradient was produced by an
        earlier node than the one that ran last.
        """
        node = torch._C._current_autograd_node()
        if node is None or torch.is_grad_enabled() or not all(isinstance(t, torch.Tensor) for t in (x, y)):
            return False
        storage = x.untyped_storage()
        producer = self._producer_nodes.get(self._storage_numbers.get(storage._cdata, 0))
        if producer is None or producer == node._sequence_nr():
            return False
        unshared = (
            getattr(x, "_use_count", int)() == _SOLE_TENSOR_REFERENCES
            and torch._C._storage_Use_Count(storage._cdata) == _SOLE_STORAGE_REFERENCES
        )
        spec = self.values.spec(x)
        return unshared and spec.touched == spec.numel and x.shape == y.shape

    def _is_from_current_node(self, x: torch.Tensor) -> bool:
        """Whether the current backward node produced the tensor itself, and so writes into it.

        For fake tensors, torch copies it instead.
        """
        node = torch._C._current_autograd_node()
        if node is None or isinstance(node, torch.autograd.function.BackwardCFunction):
            return False
        return self._producer_nodes.get(self._storage_numbers.get(x.untyped_storage()._cdata, 0)) == node._sequence_nr()

    def _record(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], operands: dict[Handle, int], out: Any
    ) -> None:
        outputs, results = self._outputs(out, operands)
        schema = func._schema
        written = [
            args[i] if i < len(args) else kwargs.get(a.name)
            for i, a in enumerate(schema.arguments)
            if a.alias_info is not None and a.alias_info.is_write
        ]
        written_handles = [h for h in handles((*written, *_undeclared_writes(func, args))) if h.numel]
        returned = {h for h, *_ in outputs}
        outputs += [(h, operands[h], -1, None) for h in written_handles if h not in returned]
        moves = bool(written_handles) or any(of is None for _, of, _, _ in outputs)
        untracked = bool(written_handles) and is_untracked(_leaves(out), self.grad_off)
        if not outputs or (not moves and all(h in operands for h, *_ in outputs)):
            return  # it reads a number, or returns its operand
        call = _call(func, args, kwargs, results, self.device)
        for single_call, position in zip(
            one_by_one(call), list_positions(call, ListPosition(args, kwargs, operands, outputs)), strict=True
        ):
            if position.outputs:
                tags = func.tags if single_call is call else tags_of(single_call.name)
                self._add(func, single_call, position, tags, moves=moves, untracked=untracked)

    def _add(
        self,
        func: OpOverload,
        call: Call,
        position: ListPosition,
        tags: Collection[Any],
        *,
        moves: bool,
        untracked: bool,
    ) -> None:
        """Record a call on single tensors."""
        counts: Counts | None = Counts()
        if moves and func is not aten.lift_fresh.default:
            counts = None if is_derived(call) else self._counts(call, tags)
        scope, recomputed = self.scopes.current()
        fields = (
            f"{_name(func)}.{func._overloadname}",
            tuple(position.operands),
            position.outputs,
            counts,
            moves,
            _encoded(position.arguments, position.operands),
            {k: _encoded(v, position.operands) for k, v in position.keywords.items()},
            scope,
            "recompute" if recomputed and self.phase == "backward" else self.phase,
            call,
            translation_of(call.name, call.overload, tags),
            tags,
        )
        # translations run when the graph is built; their errors name this line
        self.events.append(
            RecordedOp(
                *fields, self.choices.current(), caller() if counts is None else "", untracked, bool(self.grad_off)
            )
        )

    def _outputs(
        self, out: Any, operands: dict[Handle, int]
    ) -> tuple[list[tuple[Handle, int | None, int, Poly | None]], tuple[Spec, ...]]:
        """Return the nonempty results, and all results as a rule sees them."""
        outputs: list[tuple[Handle, int | None, int, Poly | None]] = []
        results: list[Spec] = []
        node = torch._C._current_autograd_node()
        for index, t in enumerate(_leaves(out)):
            if not isinstance(t, torch.Tensor):
                continue
            number, new = self._storage_number(t)
            handle = self.handle(t, number)
            results.append(handle)
            if not handle.numel:
                continue
            operand = None if new else next((i for h, i in operands.items() if h.storage == number), None)
            if not new and operand is None:
                if any(h.storage == number for h, *_ in outputs):
                    continue  # another view of a result's storage
                operand = operands[handle] = len(operands)  # a view of a tensor that is no argument
            if self.grad_off is not None and operand is not None and handle not in operands:
                t.__dict__[_VIEW] = self._views[handle]
                self._views[handle] += 1
                results[-1] = handle = self.handle(t, number)
            base = None if operand is None else next(h for h, i in operands.items() if i == operand)
            if base is not None and base.barrier is not None and handle.barrier is None:
                self.barrier(t, base.barrier)
                handle = self.handle(t, number)
            bytes_ = self._bytes(t) if new else None
            if new and node is not None:
                self._producer_nodes[number] = node._sequence_nr()
            same = bytes_ is not None and bytes_ == handle.numel * handle.dtype.bytes
            outputs.append((handle, operand, index, None if same else bytes_))
        return outputs, tuple(results)

    def _counts(self, call: Call, tags: Collection[Any]) -> Counts:
        try:
            return counts_of(call, tags)
        except UnsupportedError:
            if not self.symbols:
                raise
            name = call.name.strip("_").replace(".", "_")
            matmul, pointwise, other = (poly(symbol(f"{kind}_flops_{name}")) for kind in Counts().by_kind())
            return Counts(matmul=matmul, pointwise=pointwise, transcendental=other)


def _in_place(func: OpOverload) -> OpOverload | None:
    """Return the in-place op that autograd calls for real tensors."""
    if func in _IN_PLACE_IN_CLAMP:
        node = torch._C._current_autograd_node()
        return _IN_PLACE_IN_CLAMP[func] if node is not None and node.name().startswith("ClampBackward") else None
    return _IN_PLACE_FORMS.get(func)


def _call(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], results: tuple[Spec, ...], device: str
) -> Call:
    """Return the call as a rule sees it."""
    schema = func._schema
    arguments = {
        a.name: args[i] if i < len(args) else kwargs.get(a.name, a.default_value)
        for i, a in enumerate(schema.arguments)
    }
    name = _name(func)
    inplace = schema.is_mutable and name.endswith("_")
    return Call(name.removesuffix("_") if inplace else name, func._overloadname, inplace, arguments, results, device)


def _name(func: OpOverload) -> str:
    return func._schema.name.removeprefix("aten::").replace("::", ".")


def _leaves(out: Any) -> Iterator[Any]:
    if isinstance(out, tuple | list):
        for value in out:
            yield from _leaves(value)
    else:
        yield out


def _undeclared_writes(func: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return operands written although the schema does not say so: running statistics in training."""
    return args[3:5] if func is aten.native_batch_norm.default and args[5] else ()


def _encoded(value: Any, operands: Mapping[Handle, int]) -> Any:
    """Return an argument as stored in an op, with tensors as operand indices."""
    if isinstance(value, Handle):
        return {"operand": operands[value]} if value.numel else {"empty": value.sizes, "dtype": value.dtype}
    if isinstance(value, tuple):
        return tuple(_encoded(v, operands) for v in value)
    return value


# -- gradients ---------------------------------------------------------------------------------------------------------
# Follow autograd: backward passes, switched-off gradients, and custom autograd functions.

#: Every backward pass goes through it.
_ENGINE = torch.autograd.graph._engine_run_backward


@contextmanager
def backward_passes(recorder: Recorder) -> Iterator[None]:
    """Record ops run by autograd in the backward phase, including backward passes run by the program."""

    def run(*args: Any, **options: Any) -> Any:
        phase = recorder.phase
        recorder.phase = "backward"
        try:
            return _ENGINE(*args, **options)
        finally:
            recorder.phase = phase

    with patch.object(torch.autograd, _ENGINE.__name__, run), patch.object(torch.autograd.graph, _ENGINE.__name__, run):
        yield


@contextmanager
def barriers(recorder: Recorder) -> Iterator[None]:
    """Mark tensors in an inference trace whose gradient would stop, or be stated by the program."""
    recorder.grad_off = False
    with ExitStack() as patched:
        for patches in (_switches(recorder), _inference(recorder), _functions(recorder)):
            patched.enter_context(patches)
        yield
    recorder.grad_off = None


class _Mode(NamedTuple):
    """Whether gradients are on, as restored by a switch."""

    actual: bool
    intended: bool
    """the same if the trace had gradients on"""


@contextmanager
def _switches(recorder: Recorder) -> Iterator[None]:
    """Follow `no_grad`, `enable_grad` and `set_grad_enabled`, which all query the mode and then set it."""
    is_on, set_enabled = torch.is_grad_enabled, torch._C._set_grad_enabled

    def is_grad_enabled() -> bool | _Mode:
        by_switch = sys._getframe(1).f_code.co_filename == grad_mode.__file__
        return _Mode(is_on(), not recorder.grad_off) if by_switch else is_on()

    def switched(mode: bool | _Mode) -> None:
        actual, intended = mode if isinstance(mode, _Mode) else (mode, mode)
        set_enabled(actual)
        recorder.grad_off = not intended

    with patch.object(torch, "is_grad_enabled", is_grad_enabled), patch.object(torch._C, "_set_grad_enabled", switched):
        yield


@contextmanager
def _inference(recorder: Recorder) -> Iterator[None]:
    """Follow `inference_mode`, a separate switch; `inference_mode(False)` turns gradients on."""
    block = torch.inference_mode
    enter, leave = block.__enter__, block.__exit__
    previous: list[bool | None] = []

    def entered(self: torch.inference_mode) -> None:
        previous.append(recorder.grad_off)
        enter(self)
        recorder.grad_off = self.mode

    def left(self: torch.inference_mode, *error: Any) -> None:
        leave(self, *error)
        recorder.grad_off = previous.pop()

    with patch.object(block, "__enter__", entered), patch.object(block, "__exit__", left):
        yield


@contextmanager
def _functions(recorder: Recorder) -> Iterator[None]:
    """Mark results of custom autograd functions; a checkpoint keeps the gradients inside."""
    base = torch._C._FunctionBase.__dict__["apply"]

    def applied(function: type[Function], *args: Any) -> Any:
        apply = base.__get__(None, function)
        if function is CheckpointFunction:
            outer, run = recorder.grad_off, args[0]

            def running(*inputs: Any) -> Any:
                with patch.object(recorder, "grad_off", outer):
                    return run(*inputs)

            return apply(running, *args[1:])
        results = apply(*args)
        if not recorder.grad_off and not function.__module__.startswith(__package__):  # not the tracer's own
            for t in results if isinstance(results, tuple) else (results,):
                if isinstance(t, torch.Tensor):
                    recorder.barrier(t, Barrier(function.__qualname__))
        return results

    # programs may hold bound `apply` methods, which resolve through `_SingleLevelFunction`
    with patch.object(_SingleLevelFunction, "apply", classmethod(applied)):
        yield
