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
    "is_unseen",
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
    "joined",
    "ListPosition",
    "handles",
    "is_listed",
    "one_by_one",
    "places",
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


def is_unseen(made: Iterable[Any], stopped: bool | None) -> bool:
    """Whether an in-place write is invisible to autograd.

    This holds wherever gradients are switched off. Elsewhere it holds for a tensor without a gradient, such as
    `x.data`, which may alias one that has a gradient. `stopped` is None for a training step.
    """
    marks = (t.__dict__.get(BARRIER) for t in made if isinstance(t, torch.Tensor))
    return bool(stopped) or (stopped is False and NONE in marks)


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
        self.made: dict[int, str] = {}
        """Scope that created each autograd node, by sequence number."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow module calls."""
        before = register_module_forward_pre_hook(self._enter)
        after = register_module_forward_hook(self._leave, always_call=True)
        try:
            with warnings.catch_warnings():
                # a compiled module warns that such hooks run twice; both have the same path
                warnings.filterwarnings("ignore", message="Using `torch.compile")
                yield
        finally:
            before.remove()
            after.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        inside = self.stack[-1] if self.stack else ""
        self.stack.append(self.paths.get(id(module), f"{inside}/{type(module).__name__}".strip("/")))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.stack.pop()

    def now(self) -> tuple[str, bool]:
        """Return the running op's scope, and whether it belongs to a recomputed forward pass."""
        node = torch._C._current_autograd_node()
        again = node is not None and torch.is_grad_enabled()
        if node is not None and not self.stack:
            return self.made.get(node._sequence_nr(), ""), again
        scope = self.stack[-1] if self.stack else ""
        if node is None and torch.is_grad_enabled():  # autograd creates the node just before the op itself runs
            self.made[torch.autograd._get_sequence_nr() - 1] = scope
        return scope, again


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
    unseen: bool = False
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

    of: Handle
    made: Handle
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
    made: Handle
    loop: int
    axis: int
    stacked: bool
    """whether each part is one position on a new axis"""
    back: bool
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
                    "a leaf of autograd (a parameter, its copy, `requires_grad_`) is made while the program runs",
                    leaf=True,
                    alone=not cut,
                )
            return t.__dict__.get(BARRIER)
        _, name, before, trained = self._declared[id(t)]
        if t.requires_grad and handle != before:
            return Barrier(f"parameter {name!r} gets other data while the program runs", leaf=True)
        if t.requires_grad and not trained:
            return Barrier(f"{name!r} begins to require a gradient while the program runs", leaf=True)
        if trained and not t.requires_grad:
            return NONE  # frozen from here on
        return None if t.requires_grad else t.__dict__.get(BARRIER)

    def need_same(self, parameters: Iterable[tuple[torch.Tensor, Handle]]) -> None:
        """Raise an error for parameters whose data was replaced during the run."""
        for t, handle in parameters:
            _, name, before, _ = self._declared[id(t)]
            if replace(handle, barrier=None) != before:
                raise UnsupportedError(
                    f"trace: parameter {name!r} gets other data while the program runs, expected one that keeps its "
                    f"own; convert, assign or swap parameters before the trace"
                )


# -- joins -------------------------------------------------------------------------------------------------------------
# `cat` and `stack` of per-iteration results: the number of parts is the iteration count, a symbolic size.

aten = torch.ops.aten

#: Ops that join a list of tensors.
JOINS = (aten.cat.default, aten.stack.default)


class Recording(Protocol):
    """The part of `Recorder` used here."""

    turns: Loops
    scopes: Scopes
    phase: str
    events: list[Event]

    @staticmethod
    def barrier(t: torch.Tensor, mark: Barrier = ...) -> None:
        """Mark that no gradient passes to a tensor's producer."""

    def known(self, t: torch.Tensor) -> Handle:
        """Return the handle of a tensor."""

    def made(self, t: torch.Tensor) -> Handle:
        """Return a new tensor's handle."""


def joined(recorder: Recording, func: Any, parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor | None:
    """Record a join of per-iteration results and return its result; None for any other list."""
    found = recorder.turns.joined(parts)
    if found is None:
        return None
    first, stacked = parts[found.first], func is aten.stack.default
    shape, axis = list(first.shape), dim % (first.ndim + stacked)
    each = [1 if stacked else t.shape[axis] for t in parts]
    many = sum(each[: found.first]) + sum(each[found.last :]) + found.count * each[found.first]
    shape[axis : axis + 1 - stacked] = [many]
    made: torch.Tensor = aten.new_empty.default(first, shape)
    known = tuple(map(recorder.known, parts))
    barrier = next((h.barrier for h in known if h.barrier is not None), None)
    if barrier is not None:
        recorder.barrier(made, barrier)
    scope, _ = recorder.scopes.now()
    recorder.events.append(
        JoinedTensor(known, recorder.made(made), found.loop, axis, stacked, found.back, scope, recorder.phase)
    )
    return made


# -- foreach and fused ops ---------------------------------------------------------------------------------------------
# `_foreach_` and `_fused_` calls are split into one call per list position.

#: Their name prefixes; `_foreach_` precedes the single-tensor op's name.
_EACH, _UPDATE = "_foreach_", "_fused_"
#: Schema names of the numbers that list ops pair with each tensor.
_NUMBERS = ("scalar", "scalars")


def is_listed(call: Call) -> bool:
    """Whether a call maps over lists of tensors."""
    return call.name.startswith((_EACH, _UPDATE)) and any(map(_is_list, call.arguments.values()))


def _lead(call: Call) -> tuple[Spec, ...]:
    """Return the first list of tensors, which has one per position."""
    found: tuple[Spec, ...] = next(filter(_is_list, call.arguments.values()))
    return found


def _is_list(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and isinstance(value[0], Spec)


def one_by_one(call: Call) -> list[Call]:
    """Split a call on lists into calls on single tensors; other calls are returned unchanged.

    Each gets the name of the single-tensor op, if there is one, and that op's argument names.
    """
    if not is_listed(call):
        return [call]
    name = call.name.removeprefix(_EACH)
    number = "value" if name.startswith("addc") else "other"
    lead = _lead(call)

    def at(i: int) -> Call:
        arguments = {
            number if k in _NUMBERS else k: (v[i] if i < len(v) else None) if isinstance(v, tuple) else v
            for k, v in call.arguments.items()
        }
        return replace(call, name=name, arguments=arguments, results=call.results[i : i + 1] or lead[i : i + 1])

    return [at(i) for i in range(len(lead))]


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


def places(call: Call, whole: ListPosition) -> list[ListPosition]:
    """Return the arguments and results at each position, as lists of one element; other calls give `[whole]`."""
    return [_at(whole, i) for i in range(len(_lead(call)))] if is_listed(call) else [whole]


def _at(whole: ListPosition, i: int) -> ListPosition:
    def cut(value: Any) -> Any:
        return value[i : i + 1] if isinstance(value, tuple) else value

    arguments, keywords = tuple(map(cut, whole.arguments)), {k: cut(v) for k, v in whole.keywords.items()}
    operands: dict[Handle, int] = {}
    for h in handles((arguments, *keywords.values())):
        if h.numel:
            operands.setdefault(h, len(operands))
    outputs = [
        (h, None if place >= 0 else operands[h], min(place, 0), bytes_)
        for h, _, place, bytes_ in whole.outputs
        if place == i or (place < 0 and h in operands)
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
_ALONE, _ALONE_IN_STORAGE = 4, 2

# gradients of lookups write into new zeros
_INTO_NEW = {
    aten.index_put.default: aten.index_put_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.index_fill.int_Scalar: aten.index_fill_.int_Scalar,
    aten.put.default: aten.put_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter_add.default: aten.scatter_add_.default,
}
#: The same, in the nodes of `clamp` only; elsewhere these ops allocate a new tensor.
_INTO_NEW_OF_CLAMP = {
    aten.logical_and.default: aten.logical_and_.default,
    aten.logical_or.default: aten.logical_or_.default,
}

# ops that only query tensors, or mark a profiler region
_SILENT = ("prim", "profiler")


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
    turns: Loops
    symbols: bool = False
    device: str = "cpu"
    kernels: Collection[Any] = ()
    stand_ins: Mapping[Any, Callable[..., Any]] = field(default_factory=lambda: STAND_INS)
    choices: Choices = field(default_factory=Choices)
    phase: str = "forward"
    paused: bool = False
    stopped: bool | None = None
    """whether the program has gradients off, in an inference trace; None in a training step"""
    events: list[Event] = field(default_factory=list)
    sources: dict[int, Source] = field(default_factory=dict)
    leaves: Leaves = field(default_factory=Leaves)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types for it
        self._numbers: dict[int, int] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._makers: dict[int, int] = {}  # autograd node that produced each storage
        self._views: Counter[Handle] = Counter()
        self._count = 0
        self.turns.note = lambda path: self.events.append(LoopIteration(path))

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

    def _number(self, t: torch.Tensor) -> tuple[int, bool]:
        """Return a tensor's storage number, and whether it is new."""
        storage = t.untyped_storage()
        key = storage._cdata
        if key in self._numbers:
            return self._numbers[key], False
        self._count += 1
        number = self._numbers[key] = self._count

        def gone(_: Any) -> None:
            self._numbers.pop(key, None)
            self._alive.pop(number, None)
            if number not in self.sources:
                self.events.append(Release(number))

        self._alive[number] = weakref.ref(storage, gone)
        return number, True

    def made(self, t: torch.Tensor) -> Handle:
        """Return a new tensor's handle."""
        return self.handle(t, self._number(t)[0])

    def left(self) -> bool:
        """Whether a storage from the run is still alive."""
        return not self._alive.keys() <= self.sources.keys()

    def handle(self, t: torch.Tensor, storage: int) -> Handle:
        """Return a tensor's handle in the given storage."""
        spec, size = self.values.spec(t), self.values.translator.size
        signs, view = (t.is_conj(), t.is_neg()), t.__dict__.get(_VIEW, 0)
        handle = Handle(spec.sizes, spec.strides, spec.dtype, storage, size(t.storage_offset()), signs, view=view)
        if self.stopped is not False:
            return handle
        barrier = self.leaves.barrier(t, handle) if t.is_leaf else t.__dict__.get(BARRIER)
        return handle if barrier is None else replace(handle, barrier=barrier)

    @staticmethod
    def barrier(t: torch.Tensor, mark: Barrier = NONE) -> None:
        """Mark that no gradient passes to a tensor's producer, or that a program's function states it."""
        t.__dict__[BARRIER] = mark

    def known(self, t: torch.Tensor) -> Handle:
        """Return a tensor's handle; a storage without a recorded producer becomes a constant buffer."""
        return self.source(t, "buffer", "")

    def source(self, t: torch.Tensor, role: str, name: str) -> Handle:
        """Declare a tensor that exists before the first op; a storage's first name counts."""
        number, new = self._number(t)
        if new or name:
            self.leaves.declare(t, name, self.handle(t, number))
        handle = self.handle(t, number)
        if new and handle.numel:
            name = name or f"constant_{number}"
            self.sources[number] = Source(name, role, handle, self._bytes(t), t.requires_grad and t.is_leaf)
        return handle

    def _bytes(self, t: torch.Tensor) -> Poly:
        return self.values.translator.size(t.untyped_storage().nbytes())

    def stated(self, t: torch.Tensor, made: torch.Tensor) -> FormatAssertion:
        """Record a cast to the format that a tensor already has."""
        event = FormatAssertion(self.known(t), self.made(made), self.scopes.now()[0], self.phase)
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
            raise UnsupportedError(f"{caller()}: op {func} has no rule, expected ops of torch.ops")
        if func.namespace == "prims" and hasattr(func, "impl_aten"):  # in forward-mode formulas
            with self:
                return func.impl_aten(*args, **kwargs)
        if func.namespace in _SILENT:
            return func(*args, **kwargs)
        answer = self.data.answer(func, args)
        if answer is not None:
            return answer
        if func is aten.equal.default:
            raise UnsupportedError(
                f"{caller()}: asks whether two tensors are equal, which have no data; say which branch to trace: "
                f"choose={{'equal': True}} or choose={{'equal': False}}"
            )
        parts = COMPOSITES.get(func) or (func.decompose if is_composed(func) and func not in self.kernels else None)
        if parts is not None:
            with self:  # below autograd and inside ops, composites have not been decomposed yet
                return parts(*args, **kwargs)
        if func is aten.lift_fresh.default:
            return self._lifted(args)
        if func is aten.add.Tensor and not kwargs and self._joins(*args):
            func = aten.add_.Tensor
        elif (into := _in_place(func)) is not None and self._is_new(args[0]):
            func = into
        if func in JOINS and self.turns.loops and (made := joined(self, func, *args, **kwargs)) is not None:
            self.turns.mark([made])
            return made
        operands: dict[Handle, int] = {}

        def operand(t: torch.Tensor) -> Handle:
            handle = self.known(t)
            if handle.numel:
                operands.setdefault(handle, len(operands))
            return handle

        try:
            positional = tuple(self.values.seen(a, operand) for a in args)
            keywords = {k: self.values.seen(v, operand) for k, v in kwargs.items()}
            out = self.stand_ins.get(func, func)(*args, **kwargs)
            self.data.note(func, args, kwargs, out)
            self.data.made(func, args, out)
            if func is aten._local_scalar_dense.default:
                self.data.read(args[0], out)
            detaches = func is aten.detach.default and self.stopped is not None and not torch.is_grad_enabled()
            if self.stopped or detaches:
                for t in _leaves(out):
                    if isinstance(t, torch.Tensor) and not any(t is a for a in args):
                        self.barrier(t)
            if not detaches:  # a detach without gradients is the same tensor
                self._record(func, positional, keywords, operands, out)
        except UnsupportedError as error:
            where = f"{caller()}: "
            raise UnsupportedError(f"{where}{str(error).removeprefix(where)}") from None
        self.turns.mark(_leaves(out))
        return out

    def _lifted(self, args: Any) -> Any:
        """Record that Python numbers become a tensor."""
        func = aten.lift_fresh.default
        out = func(*args)
        self.data.note(func, args, {}, out)
        with _disable_current_modes():
            numbers = args[0].tolist()
        made = func if isinstance(numbers, list) else aten.scalar_tensor.default
        self._record(made, (self.values.seen(numbers, self.known),), {"dtype": format_of(args[0].dtype)}, {}, out)
        return out

    def _joins(self, x: Any, y: Any) -> bool:
        """Whether autograd accumulates a gradient in place, into one that nothing else references.

        Fake tensors never take that path. The sum belongs to no node: the accumulated gradient was produced by an
        earlier node than the one that ran last.
        """
        node = torch._C._current_autograd_node()
        if node is None or torch.is_grad_enabled() or not all(isinstance(t, torch.Tensor) for t in (x, y)):
            return False
        storage = x.untyped_storage()
        maker = self._makers.get(self._numbers.get(storage._cdata, 0))
        if maker is None or maker == node._sequence_nr():
            return False
        alone = (
            getattr(x, "_use_count", int)() == _ALONE
            and torch._C._storage_Use_Count(storage._cdata) == _ALONE_IN_STORAGE
        )
        spec = self.values.spec(x)
        return alone and spec.touched == spec.numel and x.shape == y.shape

    def _is_new(self, x: torch.Tensor) -> bool:
        """Whether the current backward node produced the tensor itself, and so writes into it.

        For fake tensors, torch copies it instead.
        """
        node = torch._C._current_autograd_node()
        if node is None or isinstance(node, torch.autograd.function.BackwardCFunction):
            return False
        return self._makers.get(self._numbers.get(x.untyped_storage()._cdata, 0)) == node._sequence_nr()

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
        changed = [h for h in handles((*written, *_unsaid(func, args))) if h.numel]
        returned = {h for h, *_ in outputs}
        outputs += [(h, operands[h], -1, None) for h in changed if h not in returned]
        moves = bool(changed) or any(of is None for _, of, _, _ in outputs)
        unseen = bool(changed) and is_unseen(_leaves(out), self.stopped)
        if not outputs or (not moves and all(h in operands for h, *_ in outputs)):
            return  # it reads a number, or returns its operand
        call = _call(func, args, kwargs, results, self.device)
        for one, place in zip(
            one_by_one(call), places(call, ListPosition(args, kwargs, operands, outputs)), strict=True
        ):
            if place.outputs:
                tags = func.tags if one is call else tags_of(one.name)
                self._add(func, one, place, tags, moves=moves, unseen=unseen)

    def _add(
        self, func: OpOverload, call: Call, place: ListPosition, tags: Collection[Any], *, moves: bool, unseen: bool
    ) -> None:
        """Record a call on single tensors."""
        counts: Counts | None = Counts()
        if moves and func is not aten.lift_fresh.default:
            counts = None if is_derived(call) else self._counts(call, tags)
        scope, again = self.scopes.now()
        what = (
            f"{_name(func)}.{func._overloadname}",
            tuple(place.operands),
            place.outputs,
            counts,
            moves,
            _encoded(place.arguments, place.operands),
            {k: _encoded(v, place.operands) for k, v in place.keywords.items()},
            scope,
            "recompute" if again and self.phase == "backward" else self.phase,
            call,
            translation_of(call.name, call.overload, tags),
            tags,
        )
        # translations run when the graph is built; their errors name this line
        self.events.append(
            RecordedOp(*what, self.choices.now(), caller() if counts is None else "", unseen, bool(self.stopped))
        )

    def _outputs(
        self, out: Any, operands: dict[Handle, int]
    ) -> tuple[list[tuple[Handle, int | None, int, Poly | None]], tuple[Spec, ...]]:
        """Return the nonempty results, and all results as a rule sees them."""
        outputs: list[tuple[Handle, int | None, int, Poly | None]] = []
        results: list[Spec] = []
        node = torch._C._current_autograd_node()
        for place, t in enumerate(_leaves(out)):
            if not isinstance(t, torch.Tensor):
                continue
            number, new = self._number(t)
            handle = self.handle(t, number)
            results.append(handle)
            if not handle.numel:
                continue
            of = None if new else next((i for h, i in operands.items() if h.storage == number), None)
            if not new and of is None:
                if any(h.storage == number for h, *_ in outputs):
                    continue  # another view of a result's storage
                of = operands[handle] = len(operands)  # a view of a tensor that is no argument
            if self.stopped is not None and of is not None and handle not in operands:
                t.__dict__[_VIEW] = self._views[handle]
                self._views[handle] += 1
                results[-1] = handle = self.handle(t, number)
            base = None if of is None else next(h for h, i in operands.items() if i == of)
            if base is not None and base.barrier is not None and handle.barrier is None:
                self.barrier(t, base.barrier)
                handle = self.handle(t, number)
            bytes_ = self._bytes(t) if new else None
            if new and node is not None:
                self._makers[number] = node._sequence_nr()
            same = bytes_ is not None and bytes_ == handle.numel * handle.dtype.bytes
            outputs.append((handle, of, place, None if same else bytes_))
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
    if func in _INTO_NEW_OF_CLAMP:
        node = torch._C._current_autograd_node()
        return _INTO_NEW_OF_CLAMP[func] if node is not None and node.name().startswith("ClampBackward") else None
    return _INTO_NEW.get(func)


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


def _unsaid(func: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
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
        before = recorder.phase
        recorder.phase = "backward"
        try:
            return _ENGINE(*args, **options)
        finally:
            recorder.phase = before

    with patch.object(torch.autograd, _ENGINE.__name__, run), patch.object(torch.autograd.graph, _ENGINE.__name__, run):
        yield


@contextmanager
def barriers(recorder: Recorder) -> Iterator[None]:
    """Mark tensors in an inference trace whose gradient would stop, or be stated by the program."""
    recorder.stopped = False
    with ExitStack() as patched:
        for patches in (_switches(recorder), _inference(recorder), _functions(recorder)):
            patched.enter_context(patches)
        yield
    recorder.stopped = None


class _Mode(NamedTuple):
    """Whether gradients are on, as restored by a switch."""

    ran: bool
    meant: bool
    """the same if the trace had gradients on"""


@contextmanager
def _switches(recorder: Recorder) -> Iterator[None]:
    """Follow `no_grad`, `enable_grad` and `set_grad_enabled`, which all query the mode and then set it."""
    is_on, put = torch.is_grad_enabled, torch._C._set_grad_enabled

    def asked() -> bool | _Mode:
        by_switch = sys._getframe(1).f_code.co_filename == grad_mode.__file__
        return _Mode(is_on(), not recorder.stopped) if by_switch else is_on()

    def switched(mode: bool | _Mode) -> None:
        ran, meant = mode if isinstance(mode, _Mode) else (mode, mode)
        put(ran)
        recorder.stopped = not meant

    with patch.object(torch, "is_grad_enabled", asked), patch.object(torch._C, "_set_grad_enabled", switched):
        yield


@contextmanager
def _inference(recorder: Recorder) -> Iterator[None]:
    """Follow `inference_mode`, a separate switch; `inference_mode(False)` turns gradients on."""
    block = torch.inference_mode
    enter, leave = block.__enter__, block.__exit__
    before: list[bool | None] = []

    def entered(self: torch.inference_mode) -> None:
        before.append(recorder.stopped)
        enter(self)
        recorder.stopped = self.mode

    def left(self: torch.inference_mode, *error: Any) -> None:
        leave(self, *error)
        recorder.stopped = before.pop()

    with patch.object(block, "__enter__", entered), patch.object(block, "__exit__", left):
        yield


@contextmanager
def _functions(recorder: Recorder) -> Iterator[None]:
    """Mark results of custom autograd functions; a checkpoint keeps the gradients inside."""
    base = torch._C._FunctionBase.__dict__["apply"]

    def applied(function: type[Function], *args: Any) -> Any:
        apply = base.__get__(None, function)
        if function is CheckpointFunction:
            outside, run = recorder.stopped, args[0]

            def running(*given: Any) -> Any:
                with patch.object(recorder, "stopped", outside):
                    return run(*given)

            return apply(running, *args[1:])
        made = apply(*args)
        if not recorder.stopped and not function.__module__.startswith(__package__):  # not the tracer's own
            for t in made if isinstance(made, tuple) else (made,):
                if isinstance(t, torch.Tensor):
                    recorder.barrier(t, Barrier(function.__qualname__))
        return made

    # programs may hold bound `apply` methods, which resolve through `_SingleLevelFunction`
    with patch.object(_SingleLevelFunction, "apply", classmethod(applied)):
        yield
