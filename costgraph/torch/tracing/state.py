"""Swap a program's tensors for fake ones during a run, and restore all state afterwards."""

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
    "clearing_caches",
    "is_a",
    "is_program_module",
    "swap",
]


# -- lazy modules ------------------------------------------------------------------------------------------------------


def initialized(module: nn.Module, inputs: Sequence[object], keywords: Mapping[str, object]) -> nn.Module:
    """Return a module without lazy parameters: the module itself, or a copy that ran once on the meta device.

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
        lazy_copy = copy.deepcopy(module, copies).to("meta")
        with torch.no_grad():
            lazy_copy(*map(_on_meta, inputs), **{k: _on_meta(v) for k, v in keywords.items()})
    except Exception as error:
        raise UnsupportedError(
            f"trace: parameter {min(lazy)!r} of {type(module).__name__} is lazy, and inferring its shape by a run on "
            f"the meta device failed ({type(error).__name__}: {shown(str(error), 120)}); call the module once on a "
            f"batch before the trace"
        ) from error
    return lazy_copy


def _on_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) else value


# -- quantized linear layers -------------------------------------------------------------------------------------------
# `quantize_dynamic` packs weights into opaque objects; a run uses dense fake tensors instead.

_LIBRARY: Any = torch.library.Library("costgraph", "DEF")  # type: ignore[no-untyped-call]  # torch has no types for it
_LIBRARY.define("linear_dynamic(Tensor input, Tensor weight, Tensor? bias) -> Tensor")


def _linear_dynamic(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return input.new_empty([*input.shape[:-1], weight.shape[0]])


torch.library.register_fake("costgraph::linear_dynamic", _linear_dynamic, lib=_LIBRARY)


def _packed(module: nn.Module) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    for m in module.modules():
        if type(m).__module__.startswith("torch.ao.nn.") and ".dynamic." in type(m).__module__:
            unpack = getattr(getattr(m, "_packed_params", None), "_weight_bias", None)
            if unpack is not None:
                yield m, unpack


def unpack_linears(module: nn.Module) -> None:
    """Give each dynamically quantized linear layer its unpacked weights as fake parameters, and a matching forward.

    Weights keep their format, int8 or fp16. `borrowed` restores the layers afterwards.
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


def _forward(m: nn.Module, relu: bool, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = torch.ops.costgraph.linear_dynamic(x, m._parameters["weight"], m._parameters["bias"])
    return out.relu_() if relu else out


# -- state -------------------------------------------------------------------------------------------------------------

_ATOMS = (int, float, str, bytes, bool, complex, type(None), torch.dtype, torch.device, torch.Size)
_CONTAINERS = (dict, list, set, deque)
_BASES: tuple[Any, ...] = (OrderedDict, *_CONTAINERS, tuple, frozenset)
_CACHE: Any = functools._lru_cache_wrapper  # by identity, since other classes may pretend to be this one
_LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "numpy", "sympy", "costgraph"}) - {"__main__"}
_OPAQUE = (type, types.ModuleType, types.FunctionType, nn.Module, Graph)
_MAX_DEPTH = 8  # nesting depth searched within a cache


def is_program_module(module: str | None) -> bool:
    """Whether a module is the program's, not torch's or Python's."""
    return (module if isinstance(module, str) else "").partition(".")[0] not in _LIBRARIES


def is_a(value: object, kinds: Any) -> bool:
    """Return whether a value has one of these types; unlike `isinstance`, this runs no code of the value."""
    return issubclass(type(value), kinds)


def _base_class(container: object) -> Any:
    """Return a container's builtin base class: the program's own class may override its methods."""
    return next(base for base in _BASES if is_a(container, base))


def elements(container: object) -> list[Any]:
    """Return a container's elements, or a dict's items, by its builtin base class's methods."""
    base = _base_class(container)
    return list(base.items(container) if issubclass(base, dict) else base.__iter__(container))


def attributes(value: object) -> Any:
    """Return the attributes of an object; None if it has none, or raises when asked for them."""
    try:
        attrs = vars(value)
    except Exception:  # a property or `__getattr__` of the program may raise anything
        return None
    return attrs if is_a(attrs, dict) else None


class _ReachableState:
    """All state reachable from a module and its classes' modules, with a way to restore it."""

    def __init__(self, roots: Iterable[object]) -> None:
        self.tensors: list[torch.Tensor] = []
        self._containers: list[Any] = []
        self._undo: list[Callable[[], None]] = []
        self._visited: dict[int, object] = {}
        self._next = list(roots)
        while self._next:
            value = self._next.pop()
            if not is_a(value, _ATOMS) and id(value) not in self._visited:
                self._visited[id(value)] = value
                self._next += self._children(value)

    def restore(self) -> None:
        """Restore all state."""
        for undo in self._undo:
            undo()

    def replace(self, others: Mapping[int, torch.Tensor]) -> None:
        """Replace tensors in all containers until `restore`; `others` maps ids to replacements."""
        for container in self._containers if others else ():
            pairs = elements(container) if is_a(container, dict) else list(enumerate(elements(container)))
            for key, value in pairs if is_a(container, (dict, list)) else ():
                if id(value) in others:
                    container[key] = others[id(value)]
        self.tensors = [others.get(id(t), t) for t in self.tensors]

    def _children(self, value: object) -> Iterable[object]:
        """Return the values inside a value, and register how to restore it."""
        if is_a(value, torch.Tensor):
            tensor: Any = value
            self.tensors.append(tensor)
            hooks = [tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)]
            return [*hooks, tensor.grad if tensor.is_leaf else None]
        if is_a(value, _CONTAINERS):
            return self._register_container(value)
        if is_a(value, (tuple, frozenset)):
            return elements(value)
        if is_a(value, types.MethodType):
            return (value.__self__, value.__func__)  # type: ignore[attr-defined]
        if is_a(value, types.FunctionType):
            function: Any = value
            return [c.cell_contents for c in function.__closure__ or () if _has_contents(c)]
        if is_a(value, functools.partial):
            return (value.func, value.args, value.keywords)  # type: ignore[attr-defined]
        attrs = None if is_a(value, (type, types.ModuleType)) else attributes(value)
        if attrs is None:
            return ()
        if is_a(value, nn.Module):
            return [attrs, *self._class_state(type(value))]
        is_program = is_program_module(type(value).__module__) or is_a(
            value, (torch.optim.Optimizer, types.SimpleNamespace)
        )
        return [attrs] if is_program else ()

    def _register_container(self, container: Any) -> Iterable[object]:
        """Return the elements of a container and register its restoration; dict keys may be tensors too."""
        before = elements(container)
        self._containers.append(container)

        def undo() -> None:
            now = elements(container)
            if len(now) != len(before) or any(not _same_element(a, b) for a, b in zip(now, before, strict=True)):
                base = _base_class(container)
                base.clear(container)
                (base.update if issubclass(base, dict | set) else base.extend)(container, before)

        self._undo.append(undo)
        return [v for pair in before for v in pair] if is_a(container, dict) else before

    def _class_state(self, kind: type) -> Iterator[object]:
        """Yield containers and tensors in a module's classes and in their files, such as caches shared by instances."""
        for cls in kind.__mro__:
            if cls is not object and is_program_module(cls.__module__) and id(cls) not in self._visited:
                self._visited[id(cls)] = cls
                for namespace in (cls, sys.modules.get(cls.__module__)):
                    if namespace is not None and (namespace is cls or id(namespace) not in self._visited):
                        self._visited[id(namespace)] = namespace
                        self._undo.append(_attribute_restorer(namespace))
                        yield from (v for v in vars(namespace).values() if is_a(v, (*_CONTAINERS, torch.Tensor)))


def _attribute_restorer(namespace: type | types.ModuleType) -> Callable[[], None]:
    """Return a function that restores the current attributes of a class or module."""
    before = dict(vars(namespace))

    def undo() -> None:
        now = dict(vars(namespace))
        for name in now.keys() - before.keys():
            delattr(namespace, name)
        for name, value in before.items():
            if now.get(name) is not value:
                setattr(namespace, name, value)

    return undo


def _has_contents(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # an empty cell has none
    except ValueError:
        return False
    return True


def _same_element(a: object, b: object) -> bool:
    """Whether an element, or a key-value pair, is identical to the earlier one."""
    if type(a) is tuple and type(b) is tuple and len(a) == len(b) == 2:
        return a[0] is b[0] and a[1] is b[1]
    return a is b


# -- tensors ---------------------------------------------------------------------------------------------------------


@contextmanager
def borrowed(
    module: nn.Module, *others: object, host: bool = False
) -> Iterator[Callable[[torch.Tensor], torch.Tensor | None]]:
    """Replace the data in all of a program's tensors by fake data, and restore everything on exit.

    Each tensor object keeps its identity, so optimizers and hooks that refer to it see the fake data; aliasing is
    preserved. Searched are the module's attributes, recursively, the files of its classes, and `others`, the
    arguments, which it may change. Yields a function from a tensor to its real data. With `host`, all fake tensors are
    on the CPU.
    """
    reached = _ReachableState([module, *others])
    swapped: list[tuple[torch.Tensor, torch.Tensor]] = []
    real: dict[int, torch.Tensor] = {}
    bases: dict[int, torch.Tensor] = {}
    torch.clear_autocast_cache()  # its weak references would forbid swapping
    try:
        with _disable_current_modes():
            reached.replace({id(t): _copy_of(t) for t in reached.tensors if _is_referenced_from_cpp(t)})
        pairs = [
            (t, _fake(t, bases, host)) for t in sorted(reached.tensors, key=lambda t: not isinstance(t, nn.Parameter))
        ]
        grads = [(t, t.grad) for t in reached.tensors if t.is_leaf and t.grad is not None]
        for t, fake in pairs:
            if fake is not None:
                swap(t, fake)
                swapped.append((t, fake))
                real[id(t)] = fake  # holds the real data after the swap
        for t, _ in swapped:
            if t._backward_hooks:
                t._backward_hooks = t._backward_hooks
            if t.is_leaf and t.requires_grad and t._post_accumulate_grad_hooks:
                t._post_accumulate_grad_hooks = t._post_accumulate_grad_hooks
        for t, grad in grads:
            t.grad = grad
        yield lambda t: real.get(id(t))
    finally:
        torch.clear_autocast_cache()  # it may hold tensors of the run
        for t, fake in swapped:
            swap(t, fake)
        reached.restore()


def _is_referenced_from_cpp(t: torch.Tensor) -> bool:
    """Whether C++ code, such as a profiler, holds a reference to a tensor: such a tensor cannot be swapped."""
    other = torch.empty(0)
    try:
        torch._C._swap_tensor_impl(t, other)
    except RuntimeError:
        return True
    torch._C._swap_tensor_impl(t, other)
    return False


def _copy_of(t: torch.Tensor) -> torch.Tensor:
    """Return a copy, with the same data and attributes, of a tensor that cannot be swapped."""
    if t._backward_hooks or (t.is_leaf and t.requires_grad and t._post_accumulate_grad_hooks) or t.grad_fn is not None:
        raise UnsupportedError(
            f"trace: a tensor of shape {tuple(t.shape)} has hooks or a grad_fn, and a profiler or another library "
            f"refers to it, so that it cannot be replaced for the run; delete the profile before the trace"
        )
    other = t.detach()
    copied = (
        nn.Parameter(other, t.requires_grad) if isinstance(t, nn.Parameter) else other.requires_grad_(t.requires_grad)
    )
    copied.__dict__.update(t.__dict__)
    copied.grad = t.grad
    return copied


def swap(t: torch.Tensor, other: torch.Tensor) -> None:
    """Exchange the contents of two tensor objects, including attributes set by the program."""
    torch._C._swap_tensor_impl(t, other)  # as in torch.utils.swap_tensors; an error leaves both unchanged
    t.__class__, other.__class__ = other.__class__, t.__class__
    t.__dict__, other.__dict__ = other.__dict__, t.__dict__


def _fake(t: torch.Tensor, bases: dict[int, torch.Tensor], host: bool) -> torch.Tensor | None:
    """Return a fake tensor; None if the layout has no strides."""
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
        dense_nbytes = fake.untyped_storage().nbytes()
        if not parameter and dense_nbytes < storage.nbytes() and not storage.nbytes() % t.element_size():
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
def clearing_caches(has_live_storages: Callable[[], bool]) -> Iterator[None]:
    """Allow sizes as cache keys during a run, and clear function caches that refer to the run afterwards.

    `has_live_storages` tells whether a storage of the run is still alive.
    """
    original, used_as_key = torch.SymInt.__hash__, False

    def hash_size(size: torch.SymInt) -> int:
        nonlocal used_as_key
        used_as_key = True
        return hash(size.node.expr)

    torch.SymInt.__hash__ = hash_size  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.SymInt.__hash__ = original  # type: ignore[method-assign]
        if used_as_key or has_live_storages():
            clean: set[int] = set()
            # `gc.get_objects` omits frozen objects
            for cached in (*_caches(gc.get_objects()), *_module_caches()):
                if is_program_module(cached.__module__) and _refers_to_run(cached, clean):
                    cached.cache_clear()


def _caches(values: Iterable[object]) -> list[Any]:
    """Return the nonempty function caches; vectorized, since there are many objects."""
    objects = list(values)
    wrappers: Iterator[Any] = compress(objects, map(operator.is_, map(type, objects), repeat(_CACHE)))
    return [cached for cached in wrappers if cached.cache_info().currsize]


def _module_caches() -> Iterator[Any]:
    """Yield the caches in the program's modules, and in their classes."""
    classes: dict[int, Any] = {}  # visited once, though several modules may import it
    for name, module in list(sys.modules.items()):
        if is_program_module(name) and isinstance(module, types.ModuleType):
            values = list(vars(module).values())
            yield from _caches(values)
            classes.update((id(value), value) for value in values if issubclass(type(value), type))
    for kind in classes.values():
        yield from _caches(vars(kind).values())


def _refers_to_run(cached: object, clean: set[int]) -> bool:
    """Whether a cache refers to a fake tensor or a symbolic size; `clean` collects objects known not to."""
    level, visited = [cached], {id(cached)}
    for _ in range(_MAX_DEPTH):
        referents = [v for value in level for v in gc.get_referents(value)]
        level = []
        for value in referents:
            if is_a(value, (FakeTensor, torch.SymInt)):
                return True
            if (
                gc.is_tracked(value)
                and not is_a(value, _OPAQUE)
                and id(value) not in visited
                and id(value) not in clean
            ):
                visited.add(id(value))
                level.append(value)
    clean |= visited.difference(map(id, level))  # the deepest level was not searched
    return False
