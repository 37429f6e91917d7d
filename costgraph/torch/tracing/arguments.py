"""Arguments of the traced module: fake tensors with named axes."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...algebra.symbols import is_name, shown
from ...errors import GraphError, ShapeError, UnsupportedError
from .data import Data
from .state import swap

__all__ = ["Axes", "NamedArguments"]

Axes = Sequence[str | None] | None
#: Types that contain no cached tensors.
_LEAF_TYPES = (type, nn.Module, str, bytes, int, float, type(None), torch.dtype, torch.device)


class NamedArguments:
    """A module's arguments, and the axis names for tensors among them.

    Arguments in `cached` are kept between inference steps: tensors, or objects that hold tensors with these axis names.
    GraphError or ShapeError if names do not fit.
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: Sequence[object],
        dims: Sequence[Axes] | None,
        keywords: dict[str, object],
        keyword_dims: dict[str, Axes],
        cached: Sequence[str] = (),
    ) -> None:
        if dims is not None and (isinstance(dims, str) or len(dims) != len(inputs)):
            raise ShapeError(
                f"trace: dims is {shown(dims)} for {len(inputs)} inputs; expected axis names, or None, for each input"
            )
        unknown = next((k for k in keyword_dims if k not in keywords), None)
        if unknown is not None:
            raise ShapeError(f"trace: keyword_dims names axes of {unknown!r}, which is not in keywords")
        self.count = len(inputs)
        self.values = [*inputs, *keywords.values()]
        self.keywords = tuple(keywords)
        self.names = [*_positional_names(module, len(inputs)), *keywords]
        if isinstance(cached, str) or not set(cached) <= set(self.names):
            raise GraphError(f"trace: cached is {shown(cached)}; expected names of arguments among {shown(self.names)}")
        axes = [*(dims or [None] * len(inputs)), *(keyword_dims.get(k) for k in keywords)]
        self.cached = tuple(cached)
        self.nested: dict[str, tuple[torch.Tensor, tuple[str | None, ...]]] = {}
        """Tensors inside cached arguments by path, with their axis names."""
        for i, (name, value, value_axes) in enumerate(zip(self.names, self.values, axes, strict=True)):
            if name in cached and not isinstance(value, torch.Tensor):
                self.nested |= _nested_tensors(name, value, value_axes)
                axes[i] = None
        self.axes = [
            () if n in cached and not isinstance(v, torch.Tensor) else _checked_axes(n, v, a)
            for n, v, a in zip(self.names, self.values, axes, strict=True)
        ]

    def sizes(self) -> dict[str, int]:
        """Return the size of each name in the given tensors."""
        out: dict[str, int] = {}
        labelled = [
            *zip(self.names, self.values, self.axes, strict=True),
            *((n, *pair) for n, pair in self.nested.items()),
        ]
        for label, value, axes in labelled:
            shape: tuple[int, ...] = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
            for name, size in zip(axes, shape, strict=True):
                if name is not None and out.setdefault(name, int(size)) != size:
                    raise ShapeError(
                        f"trace: {name} is {out[name]}, but {size} in {label}; equal names must denote equal sizes"
                    )
        return out

    def fakes(self, sizes: Mapping[str, Any], data: Data, *, host: bool) -> dict[str, object]:
        """Return the arguments by name, with fake tensors of symbolic sizes, on the host or on the original devices."""
        for t, axes in self.nested.values():
            swap(t, _fake_argument(t, axes, sizes, host))
        fake_values = {
            n: _fake_argument(v, a, sizes, host) for n, v, a in zip(self.names, self.values, self.axes, strict=True)
        }
        for value, fake in zip(self.values, fake_values.values(), strict=True):
            if isinstance(value, torch.Tensor) and isinstance(fake, torch.Tensor):
                data.declare(fake, value)
        return fake_values

    def cache_tensors(self, fakes: Mapping[str, object]) -> dict[str, torch.Tensor]:
        """Return the tensors kept between inference steps, by name."""
        tensors = {n: v for n in self.cached if isinstance(v := fakes[n], torch.Tensor)}
        return tensors | {n: t for n, (t, _) in self.nested.items()}

    def non_tensors(self) -> list[object]:
        """Return the arguments that are not tensors."""
        return [v for v in self.values if not isinstance(v, torch.Tensor)]

    def arguments(self, fakes: Mapping[str, object]) -> tuple[list[object], dict[str, object]]:
        """Return positional and keyword arguments."""
        values = list(fakes.values())
        return values[: self.count], dict(zip(self.keywords, values[self.count :], strict=True))


def _positional_names(module: nn.Module, count: int) -> list[str]:
    """Return the names of a module's first forward parameters."""
    schema = getattr(module.forward, "schema", None)  # TorchScript modules have no signature
    if schema is not None:
        names = [a.name for a in schema.arguments[1:]]
    else:
        parameters = inspect.signature(module.forward).parameters.values()
        names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [names[i] if i < len(names) else f"input_{i}" for i in range(count)]


def _checked_axes(label: str, value: object, axes: Axes) -> tuple[str | None, ...]:
    if not isinstance(value, torch.Tensor):
        if axes:
            raise ShapeError(
                f"trace: axis names {shown(axes)} for {label}, which is a {type(value).__name__}; expected a tensor"
            )
        nested: Iterable[object] = value.values() if isinstance(value, dict) else ()
        if isinstance(value, tuple | list):
            nested = value
        if any(isinstance(v, torch.Tensor) for v in nested):
            raise GraphError(f"trace: {label} contains tensors; pass each tensor as a separate argument")
        return ()
    if value.is_nested or value.layout is not torch.strided:
        kind = "nested tensor" if value.is_nested else f"tensor of layout {str(value.layout).removeprefix('torch.')}"
        raise UnsupportedError(
            f"trace: {label} is a {kind}, whose layout depends on its data; expected a dense tensor: "
            f"{'pad it, or pack its rows' if value.is_nested else 'call `.to_dense()`'} first"
        )
    names = (None,) * value.ndim if axes is None else tuple(axes)
    if isinstance(axes, str) or len(names) != value.ndim:
        raise ShapeError(
            f"trace: axis names {shown(axes)} for {label}, which has {value.ndim} axes; expected a name, or None, "
            f"per axis; dims lists one tuple per input, such as {('B', *[None] * (value.ndim - 1))[: value.ndim]}"
        )
    for name in names:
        if name is not None and not is_name(name):
            raise ShapeError(f"trace: axis name {shown(name)} of {label} is not an identifier")
    return names


def _nested_tensors(label: str, value: object, axes: Axes) -> dict[str, tuple[torch.Tensor, tuple[str | None, ...]]]:
    """Return the tensors inside an argument; only those with the right number of axes get names."""
    tensors: dict[str, torch.Tensor] = {}
    visited: set[int] = set()

    def visit(path: str, item: object) -> None:
        if id(item) in visited or isinstance(item, _LEAF_TYPES):
            return
        visited.add(id(item))
        if isinstance(item, torch.Tensor):
            tensors[path] = item
            return
        children = item if isinstance(item, dict) else getattr(item, "__dict__", {})
        children = dict(enumerate(item)) if isinstance(item, tuple | list) else children
        for key, child in children.items():
            visit(f"{path}/{key}", child)

    visit(label, value)
    rank = None if axes is None else len(axes)
    if not any(t.ndim == rank or (rank is None and t.numel()) for t in tensors.values()):
        expected = "tensors" if rank is None else f"tensors with {rank} axes"
        raise ShapeError(f"trace: cached argument {label} of type {type(value).__name__} contains no {expected}")
    return {n: (t, _checked_axes(n, t, axes if t.ndim == rank else None)) for n, t in tensors.items() if t.numel()}


def _fake_argument(value: Any, axes: Sequence[str | None], sizes: Mapping[str, Any], host: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    shape: list[Any] = [n if name is None else sizes[name] for n, name in zip(value.shape, axes, strict=True)]
    # axes in memory order
    order = sorted(range(value.ndim), key=lambda i: (-value.stride()[i], i))
    dense = torch.empty([shape[i] for i in order], dtype=value.dtype, device=_device(value, host))
    inverse = [order.index(i) for i in range(value.ndim)]
    fake = dense.permute(inverse) if inverse != sorted(inverse) else dense
    return fake.detach().requires_grad_(value.requires_grad)


def _device(value: torch.Tensor, host: bool) -> torch.device:
    return torch.device("cpu") if host or value.device.type == "meta" else value.device
