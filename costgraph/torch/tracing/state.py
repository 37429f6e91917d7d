"""What a program holds: tensors without data for the time of a run, and everything as it was after it."""

from __future__ import annotations

import copy
import functools
import gc
import operator
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import compress, repeat
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes

from ...algebra.symbols import shown
from ...errors import UnsupportedError
from ...ir.graph import Graph

__all__ = [
    "initialized",
    "unpack_linears",
    "attributes",
    "borrowed",
    "elements",
    "forgetting",
    "is_a",
    "is_theirs",
    "swap",
]


# -- lazy --------------------------------------------------------------------------------------------------------------
# Lazy modules: their parameters get shapes from a run of a copy on the meta device.


def initialized(module: nn.Module, inputs: Sequence[object], keywords: Mapping[str, object]) -> nn.Module:
    """Return a module without lazy parameters: the same one, or a copy without data that has run once.

    UnsupportedError if the copy does not run.
    """
    lazy = {n: t for n, t in (*module.named_parameters(), *module.named_buffers()) if is_lazy(t)}
    if not lazy:
        return module
    try:
        kinds: dict[int, Any] = {id(t): type(t) for t in lazy.values()}
        copies = {
            id(t): kinds[id(t)](t.requires_grad, "meta", t.dtype) for t in lazy.values()
        }  # buffers refuse `deepcopy`
        made = copy.deepcopy(module, copies).to("meta")
        with torch.no_grad():
            made(*map(_on_meta, inputs), **{k: _on_meta(v) for k, v in keywords.items()})
    except Exception as error:
        raise UnsupportedError(
            f"trace: parameter {min(lazy)!r} of {type(module).__name__} is lazy, and a run on the meta device, to "
            f"give it a shape, fails ({type(error).__name__}: {shown(str(error), 120)}); call the module once on a "
            f"batch before the trace"
        ) from error
    return made


def _on_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) else value


# -- quantized ---------------------------------------------------------------------------------------------------------
# Layers of `quantize_dynamic`: their packed weights have no dense tensors, which a run takes in their place.

_LIBRARY: Any = torch.library.Library("costgraph", "DEF")  # type: ignore[no-untyped-call]  # torch has no types for it
_LIBRARY.define("linear_dynamic(Tensor input, Tensor weight, Tensor? bias) -> Tensor")


def _result(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return input.new_empty([*input.shape[:-1], weight.shape[0]])


torch.library.register_fake("costgraph::linear_dynamic", _result, lib=_LIBRARY)


def _packed(module: nn.Module) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    for m in module.modules():
        if type(m).__module__.startswith("torch.ao.nn.") and ".dynamic." in type(m).__module__:
            unpack = getattr(getattr(m, "_packed_params", None), "_weight_bias", None)
            if unpack is not None:
                yield m, unpack


def unpack_linears(module: nn.Module) -> None:
    """Give each dynamically quantized linear layer its weights as parameters without data, and a call of them.

    Weights stay in their format: 8 bits, or fp16. The layers are as before once what `borrowed` has met is restored.
    """
    for m, unpack in _packed(module):
        with _disable_current_modes():
            weight, bias = unpack()
        dtype = torch.int8 if weight.is_quantized else torch.float16
        m._parameters["weight"] = nn.Parameter(torch.empty(tuple(weight.shape), dtype=dtype), requires_grad=False)
        m._parameters["bias"] = None
        if bias is not None:
            m._parameters["bias"] = nn.Parameter(torch.empty(tuple(bias.shape)), requires_grad=False)
        m.__dict__["forward"] = partial(_forward, m, "ReLU" in type(m).__name__)


def _forward(m: nn.Module, positive: bool, x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = torch.ops.costgraph.linear_dynamic(x, m._parameters["weight"], m._parameters["bias"])
    return made.relu_() if positive else made


# -- state -------------------------------------------------------------------------------------------------------------

_ATOMS = (int, float, str, bytes, bool, complex, type(None), torch.dtype, torch.device, torch.Size)
_CONTAINERS = (dict, list, set, deque)
_BASES: tuple[Any, ...] = (OrderedDict, *_CONTAINERS, tuple, frozenset)
_CACHE: Any = functools._lru_cache_wrapper  # what pretends to be of another class is not asked
_NOT_THEIRS = frozenset({*sys.stdlib_module_names, "torch", "numpy", "sympy", "costgraph"}) - {"__main__"}
_OPAQUE = (type, types.ModuleType, types.FunctionType, nn.Module, Graph)
_DEEPEST = 8  # containers within containers of what a cache holds


def is_theirs(module: str | None) -> bool:
    """Whether a module is the program's, neither torch's nor Python's own."""
    return (module if isinstance(module, str) else "").partition(".")[0] not in _NOT_THEIRS


def is_a(value: object, kinds: Any) -> bool:
    """Return whether a value has one of these types; unlike `isinstance`, this runs no code of the value."""
    return issubclass(type(value), kinds)


def _base(held: object) -> Any:
    """Return the builtin base class of a container: a program may have overridden the methods of the class itself."""
    return next(base for base in _BASES if is_a(held, base))


def elements(held: object) -> list[Any]:
    """Return the elements of a container, or the items of a dict, by the methods of its builtin base class."""
    base = _base(held)
    return list(base.items(held) if issubclass(base, dict) else base.__iter__(held))


def attributes(value: object) -> Any:
    """Return the attributes of an object; None if it has none, or raises when asked for them."""
    try:
        held = vars(value)
    except Exception:  # a property or `__getattr__` of the program may raise anything
        return None
    return held if is_a(held, dict) else None


class _Reached:
    """What can be reached from a module and from the files of its classes, and what it all was."""

    def __init__(self, roots: Iterable[object]) -> None:
        self.tensors: list[torch.Tensor] = []
        self._held: list[Any] = []
        self._undo: list[Callable[[], None]] = []
        self._seen: dict[int, object] = {}
        self._next = list(roots)
        while self._next:
            value = self._next.pop()
            if not is_a(value, _ATOMS) and id(value) not in self._seen:
                self._seen[id(value)] = value
                self._next += self._inside(value)

    def restore(self) -> None:
        """Let everything be what it was."""
        for undo in self._undo:
            undo()

    def replace(self, others: Mapping[int, torch.Tensor]) -> None:
        """Replace tensors in all containers until these are restored; `others` maps ids to replacements."""
        for held in self._held if others else ():
            pairs = elements(held) if is_a(held, dict) else list(enumerate(elements(held)))
            for key, value in pairs if is_a(held, (dict, list)) else ():
                if id(value) in others:
                    held[key] = others[id(value)]
        self.tensors = [others.get(id(t), t) for t in self.tensors]

    def _inside(self, value: object) -> Iterable[object]:
        """Return what a value holds, and remember how to bring it back."""
        if is_a(value, torch.Tensor):
            tensor: Any = value
            self.tensors.append(tensor)
            hooks = [tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)]
            return [*hooks, tensor.grad if tensor.is_leaf else None]
        if is_a(value, _CONTAINERS):
            return self._kept(value)
        if is_a(value, (tuple, frozenset)):
            return elements(value)
        if is_a(value, types.MethodType):
            return (value.__self__, value.__func__)  # type: ignore[attr-defined]
        if is_a(value, types.FunctionType):
            function: Any = value
            return [c.cell_contents for c in function.__closure__ or () if _filled(c)]
        if is_a(value, functools.partial):
            return (value.func, value.args, value.keywords)  # type: ignore[attr-defined]
        held = None if is_a(value, (type, types.ModuleType)) else attributes(value)
        if held is None:
            return ()
        if is_a(value, nn.Module):
            return [held, *self._files(type(value))]
        theirs = is_theirs(type(value).__module__) or is_a(value, (torch.optim.Optimizer, types.SimpleNamespace))
        return [held] if theirs else ()

    def _kept(self, held: Any) -> Iterable[object]:
        """Return the elements of a container that is brought back to them; keys may be tensors as well."""
        before = elements(held)
        self._held.append(held)

        def undo() -> None:
            now = elements(held)
            if len(now) != len(before) or any(not _is(a, b) for a, b in zip(now, before, strict=True)):
                base = _base(held)
                base.clear(held)
                (base.update if issubclass(base, dict | set) else base.extend)(held, before)

        self._undo.append(undo)
        return [v for pair in before for v in pair] if is_a(held, dict) else before

    def _files(self, kind: type) -> Iterator[object]:
        """Yield what the classes of a module, and the files in which they stand, hold: caches of all instances."""
        for cls in kind.__mro__:
            if cls is not object and is_theirs(cls.__module__) and id(cls) not in self._seen:
                self._seen[id(cls)] = cls
                for place in (cls, sys.modules.get(cls.__module__)):
                    if place is not None and (place is cls or id(place) not in self._seen):
                        self._seen[id(place)] = place
                        self._undo.append(_renaming(place))
                        yield from (v for v in vars(place).values() if is_a(v, (*_CONTAINERS, torch.Tensor)))


def _renaming(place: type | types.ModuleType) -> Callable[[], None]:
    """Return what lets a class or a module have the names that it has now."""
    before = dict(vars(place))

    def undo() -> None:
        now = dict(vars(place))
        for name in now.keys() - before.keys():
            delattr(place, name)
        for name, value in before.items():
            if now.get(name) is not value:
                setattr(place, name, value)

    return undo


def _filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # an empty cell has none
    except ValueError:
        return False
    return True


def _is(a: object, b: object) -> bool:
    """Whether an element, or a name with its value, is the one that was there."""
    if type(a) is tuple and type(b) is tuple and len(a) == len(b) == 2:
        return a[0] is b[0] and a[1] is b[1]
    return a is b


# -- tensors ---------------------------------------------------------------------------------------------------------


@contextmanager
def borrowed(
    module: nn.Module, *others: object, host: bool = False
) -> Iterator[Callable[[torch.Tensor], torch.Tensor | None]]:
    """Let all tensors that a program holds have no data for a while, and let nothing be changed after that.

    A tensor stays the object that it is, so whoever has it, an optimizer or a hook, has the one without data. Tensors
    of one storage have one. Yields what gives the data of a tensor. Looked through are the module's attributes, those
    of what they hold, and what the files of its classes hold; `others` are arguments, which it may change. With `host`
    the ones without data are all of a CPU, wherever the program has them.
    """
    reached = _Reached([module, *others])
    swapped: list[tuple[torch.Tensor, torch.Tensor]] = []
    real: dict[int, torch.Tensor] = {}
    bases: dict[int, torch.Tensor] = {}
    torch.clear_autocast_cache()  # whose weak references would forbid to lend tensors
    try:
        with _disable_current_modes():
            reached.replace({id(t): _again(t) for t in reached.tensors if _is_watched(t)})
        made = [
            (t, _fake(t, bases, host)) for t in sorted(reached.tensors, key=lambda t: not isinstance(t, nn.Parameter))
        ]
        grads = [(t, t.grad) for t in reached.tensors if t.is_leaf and t.grad is not None]
        for t, fake in made:
            if fake is not None:
                swap(t, fake)
                swapped.append((t, fake))
                real[id(t)] = fake  # what has the data now
        for t, _ in swapped:
            if t._backward_hooks:
                t._backward_hooks = t._backward_hooks
            if t.is_leaf and t.requires_grad and t._post_accumulate_grad_hooks:
                t._post_accumulate_grad_hooks = t._post_accumulate_grad_hooks
        for t, grad in grads:
            t.grad = grad
        yield lambda t: real.get(id(t))
    finally:
        torch.clear_autocast_cache()  # it knows tensors of the run
        for t, fake in swapped:
            swap(t, fake)
        reached.restore()


def _is_watched(t: torch.Tensor) -> bool:
    """Whether C++ code holds a reference to a tensor, as a profile does: such a tensor cannot be swapped."""
    other = torch.empty(0)
    try:
        torch._C._swap_tensor_impl(t, other)
    except RuntimeError:
        return True
    torch._C._swap_tensor_impl(t, other)
    return False


def _again(t: torch.Tensor) -> torch.Tensor:
    """Return a new tensor with the data and the attributes of one that cannot be swapped."""
    if t._backward_hooks or (t.is_leaf and t.requires_grad and t._post_accumulate_grad_hooks) or t.grad_fn is not None:
        raise UnsupportedError(
            f"trace: a tensor of shape {tuple(t.shape)} has hooks, or is computed, and a profiler or another library "
            f"refers to it, expected one that can be lent to the run; delete the profile before the trace"
        )
    other = t.detach()
    made = (
        nn.Parameter(other, t.requires_grad) if isinstance(t, nn.Parameter) else other.requires_grad_(t.requires_grad)
    )
    made.__dict__.update(t.__dict__)
    made.grad = t.grad
    return made


def swap(t: torch.Tensor, other: torch.Tensor) -> None:
    """Exchange what two tensors are; attributes that a program has set stay."""
    torch._C._swap_tensor_impl(t, other)  # which torch.utils.swap_tensors calls; refused, nothing has changed yet
    t.__class__, other.__class__ = other.__class__, t.__class__
    t.__dict__, other.__dict__ = other.__dict__, t.__dict__


def _fake(t: torch.Tensor, bases: dict[int, torch.Tensor], host: bool) -> torch.Tensor | None:
    """Return a tensor without data; None for what has no strides."""
    if t.layout is not torch.strided or t.is_nested:
        return None
    device = torch.device("cpu") if host or t.device.type == "meta" else t.device
    storage, parameter = t.untyped_storage(), isinstance(t, nn.Parameter)
    base = None if parameter else bases.get(storage._cdata)
    if base is not None and base.dtype == t.dtype:
        with torch.set_grad_enabled(t.grad_fn is not None):
            fake = base.as_strided(tuple(t.shape), t.stride(), t.storage_offset())
    else:
        fake = torch.empty_strided(tuple(t.shape), t.stride(), dtype=t.dtype, device=device)
        least = fake.untyped_storage().nbytes()
        if not parameter and least < storage.nbytes() and not storage.nbytes() % t.element_size():
            base = torch.empty(storage.nbytes() // t.element_size(), dtype=t.dtype, device=device)
            fake = base.as_strided(tuple(t.shape), t.stride(), t.storage_offset())
    fake = nn.Parameter(fake, requires_grad=t.requires_grad) if parameter else fake
    if t.requires_grad and not fake.requires_grad:
        fake.requires_grad_()
    if fake.untyped_storage().nbytes() == storage.nbytes():
        bases.setdefault(storage._cdata, fake)
    fake.__dict__.update({k: v for k, v in t.__dict__.items() if k not in fake.__dict__})
    return fake


# -- caches ----------------------------------------------------------------------------------------------------------


@contextmanager
def forgetting(left: Callable[[], bool]) -> Iterator[None]:
    """Let sizes be keys of caches, and let no cache of a function know of this run after it.

    `left` says whether anything that the run made is still there.
    """
    plain, asked = torch.SymInt.__hash__, False

    def hashed(size: torch.SymInt) -> int:
        nonlocal asked
        asked = True
        return hash(size.node.expr)

    torch.SymInt.__hash__ = hashed  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.SymInt.__hash__ = plain  # type: ignore[method-assign]
        if asked or left():
            clean: set[int] = set()
            # of which the former lacks what `gc.freeze` has met
            for cached in (*_caches(gc.get_objects()), *_in_modules()):
                if is_theirs(cached.__module__) and _of_a_run(cached, clean):
                    cached.cache_clear()


def _caches(values: Iterable[object]) -> list[Any]:
    """Return the caches of functions that hold something, without a line of Python for each of many objects."""
    held = list(values)
    found: Iterator[Any] = compress(held, map(operator.is_, map(type, held), repeat(_CACHE)))
    return [cached for cached in found if cached.cache_info().currsize]


def _in_modules() -> Iterator[Any]:
    """Yield the caches that stand in the program's files, and in classes there."""
    classes: dict[int, Any] = {}  # each one once, in however many files it stands
    for name, module in list(sys.modules.items()):
        if is_theirs(name) and isinstance(module, types.ModuleType):
            held = list(vars(module).values())
            yield from _caches(held)
            classes.update((id(value), value) for value in held if issubclass(type(value), type))
    for kind in classes.values():
        yield from _caches(vars(kind).values())


def _of_a_run(cached: object, clean: set[int]) -> bool:
    """Whether a cache holds a tensor without data, or a size of a run; `clean` has what was found to hold none."""
    level, seen = [cached], {id(cached)}
    for _ in range(_DEEPEST):
        inside = [v for value in level for v in gc.get_referents(value)]
        level = []
        for value in inside:
            if is_a(value, (FakeTensor, torch.SymInt)):
                return True
            if gc.is_tracked(value) and not is_a(value, _OPAQUE) and id(value) not in seen and id(value) not in clean:
                seen.add(id(value))
                level.append(value)
    clean |= seen.difference(map(id, level))  # what lies deepest was not looked into
    return False
