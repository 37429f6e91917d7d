"""Parameters, buffers, caches and optimizer state of a lowered graph: their names in torch, and numbers for them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from keyword import iskeyword
from math import prod

import torch
from torch import nn

from ...graph.graph import Graph
from ...graph.tensor import Tensor

__all__ = ["Leaf", "Leaves", "numbers_for"]

#: Standard deviation of weights, as GPT-2 is initialised (Radford et al. 2019).
_WEIGHTS = 0.02


@dataclass(frozen=True)
class Leaf:
    """One tensor of the module."""

    tensor: Tensor
    """of the graph"""
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    where: tuple[int, ...]
    """iterations that it belongs to"""
    limit: int | None
    """rows of the table that its integers look up"""


class Leaves:
    """Tensors of a module, by the names that torch can have for them.

    The levels of a name of the graph are modules, its dots are underscores, and the number of an iteration is the last
    level: `layers/mlp/up/weight` of iteration 3 is `layers.mlp.up.weight.3`.
    """

    def __init__(self, graph: Graph) -> None:
        sources = [t for g in graph.bodies() for t in g.tensors if t.producer is None and t.role != "formal"]
        inputs = [t.name for t in sources if t.role == "input"]
        self._arguments = _distinct((name, name.replace("/", "_").replace(".", "_")) for name in inputs)
        others = [t.name for t in sources if t.role != "input"]
        leaves = set(others)
        self._names = _distinct((name, _dotted(name, leaves)) for name in others)
        self.found: dict[str, Leaf] = {}

    def argument(self, name: str) -> str:
        """Return the name of an input."""
        return self._arguments[name]

    def add(self, leaf: Leaf) -> str:
        """Note a tensor and return its name in torch."""
        target = ".".join([self._names[leaf.tensor.name], *map(str, leaf.where)])
        self.found[target] = leaf
        return target

    def module(self, device: torch.device, seed: int) -> nn.Module:
        """Return a module with all tensors in it, filled with numbers."""
        root = nn.Module()
        generator = torch.Generator().manual_seed(seed)
        for target, leaf in self.found.items():
            *levels, last = target.split(".")
            home = root
            for level in levels:
                if level not in home._modules:
                    home.add_module(level, nn.Module())
                home = home.get_submodule(level)
            values = numbers_for(leaf, device, generator)
            if leaf.tensor.role == "param" and (leaf.dtype.is_floating_point or leaf.dtype.is_complex):
                home.register_parameter(last, nn.Parameter(values, requires_grad=False))
            else:
                home.register_buffer(last, values)
        return root


def _dotted(name: str, leaves: set[str]) -> str:
    """Return the levels of a name joined by dots, by underscores where a tensor has the name of a module."""
    levels = name.split("/")
    out = ""
    for i, level in enumerate(levels):
        text = level.replace(".", "_")
        text += "_" if hasattr(nn.Module(), text) or iskeyword(text) else ""
        out += text if not i else f"{'_' if '/'.join(levels[:i]) in leaves else '.'}{text}"
    return out


def _distinct(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return a name for each name, none of them twice."""
    found: dict[str, str] = {}
    used: set[str] = set()
    for name, wanted in pairs:
        while wanted in used:
            wanted += "_"
        used.add(wanted)
        found[name] = wanted
    return found


def numbers_for(leaf: Leaf, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """Return random numbers that a tensor can have.

    Integers are valid indices of what they look up, else 0 or 1; inputs are normal with standard deviation 1; matrices
    and larger parameters normal with 0.02; vectors and scalars, which scale or shift, uniform from 0.5 to 1.5, as is
    the state of an optimizer, whose second moments are not negative. Gradients and caches are zeros.
    """
    made = torch.empty_strided(leaf.sizes, leaf.strides, dtype=leaf.dtype, device=device)
    return made if device.type == "meta" else made.copy_(_numbers(leaf, generator))


def _numbers(leaf: Leaf, generator: torch.Generator) -> torch.Tensor:
    sizes, role = leaf.sizes, leaf.tensor.role
    if role in ("gradient", "cache"):
        return torch.zeros(sizes)
    if not (leaf.dtype.is_floating_point or leaf.dtype.is_complex):
        return torch.randint(0, leaf.limit or 2, sizes, generator=generator)
    wide = leaf.dtype if leaf.dtype.itemsize >= 8 else torch.float32
    if role == "input":
        return torch.randn(sizes, generator=generator, dtype=wide)
    if role == "param" and len(sizes) > 1 and prod(sizes) > 1:
        return torch.randn(sizes, generator=generator, dtype=wide).mul_(_WEIGHTS)
    return torch.rand(sizes, generator=generator, dtype=wide).add_(0.5)
