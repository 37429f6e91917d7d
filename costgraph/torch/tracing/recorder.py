"""What a program does, call by call: the aten ops that it runs, and when each storage is given back."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ...algebra.polynomial import Poly, poly
from ...algebra.symbols import symbol
from ...errors import UnsupportedError
from .call import Call, Counts, Spec
from .choices import Choices
from .composites import COMPOSITES, is_composed
from .counted import Loops
from .data import Data
from .events import Asked, Death, Event, Handle, Made, Source, Turn
from .higher_order import run_eagerly
from .joins import JOINS, joined
from .leaves import Leaves
from .lists import Place, handles, one_by_one, places, tags_of
from .marks import BARRIER, NONE, Barrier, is_unseen
from .rules.counts import counts_of, is_derived
from .scopes import Scopes
from .shapes import caller
from .stand_ins import STAND_INS
from .translations import translation_of
from .values import Values, format_of

__all__ = ["Recorder"]

aten = torch.ops.aten
# References to a tensor, and to its storage, that an op meets whose operand nothing but autograd's buffer holds: the
# buffer, and those that calling the op takes.
_ALONE, _ALONE_IN_STORAGE = 4, 2

# what gradients of lookups are written with: into new zeros
_INTO_NEW = {
    aten.index_put.default: aten.index_put_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.index_fill.int_Scalar: aten.index_fill_.int_Scalar,
    aten.put.default: aten.put_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter_add.default: aten.scatter_add_.default,
}
#: The same in the nodes of `clamp` alone: others do call these for a new tensor.
_INTO_NEW_OF_CLAMP = {
    aten.logical_and.default: aten.logical_and_.default,
    aten.logical_or.default: aten.logical_or_.default,
}

# they ask for facts of tensors, or mark a region of a profile
_SILENT = ("prim", "profiler")


@dataclass(eq=False)
class Recorder(TorchDispatchMode):
    """Records every aten op below autograd.

    `scopes` say which module an op belongs to, `data` what is known of the data of tensors, `choices` by which rule a
    call is what the device runs, which kernels run on. `kernels` are ops that a CPU is without and that are composed
    there, of which the device has a kernel; `stand_ins` run instead of an op. `symbols` says whether an op without a
    rule counts as a symbol named after it; it is an error else.
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
    """whether the program has gradients off, of a run that has none anywhere; None of a step"""
    events: list[Event] = field(default_factory=list)
    sources: dict[int, Source] = field(default_factory=dict)
    leaves: Leaves = field(default_factory=Leaves)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types for it
        self._numbers: dict[int, int] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._makers: dict[int, int] = {}  # node of the backward pass that made each storage
        self._count = 0
        self.turns.note = lambda path: self.events.append(Turn(path))

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Let ops run unseen."""
        self.paused = True
        try:
            yield
        finally:
            self.paused = False

    supports_higher_order_operators = True

    # -- storages ------------------------------------------------------------------------------------------------

    def _number(self, t: torch.Tensor) -> tuple[int, bool]:
        """Return the number of the storage behind a tensor, and whether it is seen for the first time."""
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
                self.events.append(Death(number))

        self._alive[number] = weakref.ref(storage, gone)
        return number, True

    def made(self, t: torch.Tensor) -> Handle:
        """Return what a tensor is that the program has made just now."""
        return self.handle(t, self._number(t)[0])

    def left(self) -> bool:
        """Whether a storage that the run made is still there."""
        return not self._alive.keys() <= self.sources.keys()

    def handle(self, t: torch.Tensor, storage: int) -> Handle:
        """Return what a tensor is."""
        spec, size = self.values.spec(t), self.values.translator.size
        signs = t.is_conj(), t.is_neg()
        handle = Handle(spec.sizes, spec.strides, spec.dtype, storage, size(t.storage_offset()), signs)
        if self.stopped is not False:
            return handle
        barrier = self.leaves.barrier(t, handle) if t.is_leaf else t.__dict__.get(BARRIER)
        return handle if barrier is None else replace(handle, barrier=barrier)

    @staticmethod
    def barrier(t: torch.Tensor, mark: Barrier = NONE) -> None:
        """Note that no gradient passes to the producer of a tensor, or which function of the program states it."""
        t.__dict__[BARRIER] = mark

    def known(self, t: torch.Tensor) -> Handle:
        """Return what a tensor is; a storage that nothing made while it was looked at has always been there."""
        return self.source(t, "buffer", "")

    def source(self, t: torch.Tensor, role: str, name: str) -> Handle:
        """Declare a tensor that is there before the first op; a storage has the first name that it is given."""
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

    def stated(self, t: torch.Tensor, made: torch.Tensor) -> Asked:
        """Note that a program states the format of a tensor, and what it has from there on."""
        event = Asked(self.known(t), self.made(made), self.scopes.now()[0], self.phase)
        self.events.append(event)
        return event

    # -- calls ---------------------------------------------------------------------------------------------------

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing compiles here, and a guard against it in each call takes its time

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.device == "cpu":
            return self._dispatched(func, args, kwargs)
        with torch._C.DisableTorchFunction():  # which tell of a device that is not there
            return self._dispatched(func, args, kwargs)

    def _dispatched(self, func: Any, args: Any, kwargs: Any) -> Any:
        # over 40 lines: one case for each kind of call that is not recorded as it is
        if func is torch.ops.prim.device.default:  # asked several times for each op
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
        if func.namespace == "prims" and hasattr(func, "impl_aten"):  # of formulas of forward mode
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
            with self:  # without autograd, and inside of an op, nothing has taken it apart yet
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
            if not detaches:  # of which the tensor itself is the same one
                self._record(func, positional, keywords, operands, out)
        except UnsupportedError as error:
            where = f"{caller()}: "
            raise UnsupportedError(f"{where}{str(error).removeprefix(where)}") from None
        self.turns.mark(_leaves(out))
        return out

    def _lifted(self, args: Any) -> Any:
        """Record that numbers of Python become a tensor."""
        func = aten.lift_fresh.default
        out = func(*args)
        self.data.note(func, args, {}, out)
        with _disable_current_modes():
            numbers = args[0].tolist()
        made = func if isinstance(numbers, list) else aten.scalar_tensor.default
        self._record(made, (self.values.seen(numbers, self.known),), {"dtype": format_of(args[0].dtype)}, {}, out)
        return out

    def _joins(self, x: Any, y: Any) -> bool:
        """Whether autograd adds a gradient to another one that nothing else has, which it does in place.

        With tensors without data it would not, as they are no ordinary ones. The sum belongs to no node: what is added
        to was made by an earlier node than the one that ran last.
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
        """Whether one of torch's own nodes of the backward pass has made a tensor, which it writes into.

        Of tensors without data it makes a copy instead.
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
            return  # it reads a number, or returns a tensor as it was
        call = _call(func, args, kwargs, results, self.device)
        for one, place in zip(one_by_one(call), places(call, Place(args, kwargs, operands, outputs)), strict=True):
            if place.outputs:
                tags = func.tags if one is call else tags_of(one.name)
                self._add(func, one, place, tags, moves=moves, unseen=unseen)

    def _add(
        self, func: OpOverload, call: Call, place: Place, tags: Collection[Any], *, moves: bool, unseen: bool
    ) -> None:
        """Note a call of single tensors."""
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
        # what its translation says is found when the graph is built: what it refuses is said of this line
        self.events.append(
            Made(*what, self.choices.now(), caller() if counts is None else "", unseen, bool(self.stopped))
        )

    def _outputs(
        self, out: Any, operands: dict[Handle, int]
    ) -> tuple[list[tuple[Handle, int | None, int, Poly | None]], tuple[Spec, ...]]:
        """Return the results that hold anything, and all results as a rule sees them."""
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
                    continue  # another part of a storage that the call has made: a view of that result
                of = operands[handle] = len(operands)  # a view of something that is no argument
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
    """Return the op in place that autograd calls for tensors that have data."""
    if func in _INTO_NEW_OF_CLAMP:
        node = torch._C._current_autograd_node()
        return _INTO_NEW_OF_CLAMP[func] if node is not None and node.name().startswith("ClampBackward") else None
    return _INTO_NEW.get(func)


def _call(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], results: tuple[Spec, ...], device: str
) -> Call:
    """Return what a rule sees."""
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
    """Return what an op writes into though its schema does not say so: running statistics, in training."""
    return args[3:5] if func is aten.native_batch_norm.default and args[5] else ()


def _encoded(value: Any, operands: Mapping[Handle, int]) -> Any:
    """Return an argument as an op keeps it: a tensor by its place among the operands."""
    if isinstance(value, Handle):
        return {"operand": operands[value]} if value.numel else {"empty": value.sizes, "dtype": value.dtype}
    if isinstance(value, tuple):
        return tuple(_encoded(v, operands) for v in value)
    return value
