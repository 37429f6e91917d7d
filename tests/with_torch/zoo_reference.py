"""Public torch modules that the zoo declares, and their counts on fake tensors of any size."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from shared import load
from torch._subclasses.fake_tensor import FakeTensorMode

import costgraph as cg
from costgraph.torch import trace


@dataclass(frozen=True)
class Reference:
    """A module and its inputs."""

    module: Callable[[], torch.nn.Module]
    """Builds the module, of the published size."""
    inputs: Callable[[], tuple[Any, ...]]
    """Builds its positional inputs."""
    sizes: dict[str, int]
    """Sizes of the declaration that make both counts comparable."""
    options: dict[str, Any] = field(default_factory=dict)
    """How the declaration is loaded, such as attention="eager"."""
    name: str = ""
    """Name of the module, for the table; its class by default."""
    keywords: Callable[[], dict[str, Any]] = dict
    """Builds its keyword inputs."""


def described(reference: Reference) -> str:
    """Return the module's name and source location."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        kind = type(reference.module())
    if reference.name:
        return reference.name
    package = kind.__module__.partition(".")[0]
    place = package if package in ("torch", "transformers") else f"`{kind.__module__}.py`"
    return f"{kind.__name__} of {place}"


def traced(reference: Reference) -> tuple[int, int]:
    """Return the parameters and matmul FLOPs of the traced module."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        module = reference.module().eval()
        count = sum(p.numel() for p in module.parameters())  # shared parameters count once
        graph = trace(module, *reference.inputs(), keywords=reference.keywords())
    return count, cg.matmul_flops(graph, count="full")


def declared(name: str, reference: Reference) -> tuple[int, int]:
    """Return the parameters and matmul FLOPs of the declaration."""
    graph = load(name, **reference.options)
    return cg.param_count(graph), cg.matmul_flops(graph, count="full", **reference.sizes)
