"""The run that is recorded: forward, and if asked backward and a step of the optimizer."""

from __future__ import annotations

import gc
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...algebra.symbols import shown
from ...errors import CostGraphError, GraphError, UnsupportedError
from ...graph.graph import Graph
from .build import Builder
from .functions import SymbolicSizes
from .higher_order import uncompiled
from .recorder import Handle, Recorder
from .shapes import HERE, TORCH

__all__ = ["Factory", "Run", "plain_errors", "replaced"]

Factory = Callable[[Any], torch.optim.Optimizer]

# they write out what the error says
_LOGGERS = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")


class Run:
    """One run of a module.

    Parameters
    ----------
    module : torch.nn.Module
        With parameters that hold no data.
    recorder : Recorder
        What looks on.
    optimizer : callable or None
        Makes the optimizer of a list of parameters.
    """

    def __init__(self, module: nn.Module, recorder: Recorder, optimizer: Factory | None) -> None:
        self.module = module
        self.recorder = recorder
        self.optimizer = optimizer
        self.params: dict[str, torch.Tensor] = {}
        self.outputs: list[Handle] = []
        self.gradients: dict[Handle, Handle] = {}

    def declare(self, state: Mapping[str, torch.Tensor], inputs: Mapping[str, object]) -> None:
        """Say what is there before the first op: parameters, buffers and inputs."""
        for name, t in state.items():
            self.recorder.source(t, "param" if isinstance(t, nn.Parameter) else "buffer", name.replace(".", "/"))
        self.params = {k: t for k, t in state.items() if isinstance(t, nn.Parameter) and t.requires_grad}
        for name, value in inputs.items():
            if isinstance(value, torch.Tensor):
                self.recorder.source(value, "input", name)

    def __call__(self, args: list[object], kwargs: dict[str, object], *, train: bool) -> None:
        """Run forward, and if asked the rest of a training step."""
        collecting = gc.isenabled()
        gc.disable()  # what only a cycle holds would be given back at any time
        try:
            with torch.set_grad_enabled(train), uncompiled(), SymbolicSizes(), self.recorder:
                out = self.module(*args, **kwargs)
                made = list(_tensors(out))
                if train:
                    self._train(made)
                self.outputs = [self.recorder.known(t) for t in made]
        finally:
            if collecting:
                gc.enable()

    def _train(self, made: list[torch.Tensor]) -> None:
        if len(made) != 1 or made[0].numel() != 1 or not made[0].requires_grad:
            raise GraphError(
                f"trace: with train=True {type(self.module).__name__} returns {shown(made, 200)}, expected one scalar "
                f"loss that depends on a parameter"
            )
        (loss,) = made
        self.recorder.phase = "backward"
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
        self.gradients = {
            self.recorder.known(p): self.recorder.known(p.grad) for p in self.params.values() if p.grad is not None
        }
        if self.optimizer is not None:
            self._update(self.optimizer)

    def _update(self, make: Factory) -> None:
        self.recorder.phase = "optimizer"
        with self.recorder.pausing():
            optimizer = make(list(self.params.values()))
            optimizer.step()  # makes the state
        names = {id(p): name.replace(".", "/") for name, p in self.params.items()}
        for p, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    self.recorder.source(value, "state", f"optimizer/{names[id(p)]}/{key}")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def build(self, graph: Graph) -> None:
        """Add what was recorded to a graph."""
        builder = Builder(graph, self.recorder.sources)
        builder.run(self.recorder.events)
        graph.output(*(builder.tensor(h) for h in self.outputs if h.numel))
        graph.gradients.update({builder.first[p.storage]: builder.tensor(g) for p, g in self.gradients.items()})
        builder.finish()
        graph.freeze()


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in what a module returned, whatever holds them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for v in value.values():
            yield from _tensors(v)
    elif isinstance(value, tuple | list):
        for v in value:
            yield from _tensors(v)
    elif hasattr(value, "__dict__"):
        for v in vars(value).values():
            yield from _tensors(v)


@contextmanager
def replaced(module: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Let a module have parameters and buffers without data for a while; yields them by name, tied ones once."""
    before = [(m, dict(m.__dict__)) for m in module.modules()]
    memo: dict[int, torch.Tensor] = {}
    try:
        for m, attributes in before:
            for kind in ("_parameters", "_buffers"):
                own = attributes[kind]
                m.__dict__[kind] = {k: None if t is None else memo.setdefault(id(t), _fake(t)) for k, t in own.items()}
        yield {**dict(module.named_parameters()), **dict(module.named_buffers())}
    finally:
        for m, attributes in before:
            m.__dict__.clear()
            m.__dict__.update(attributes)


def _fake(t: torch.Tensor) -> torch.Tensor:
    device = torch.device("cpu") if t.device.type == "meta" else t.device
    fake = torch.empty_strided(tuple(t.shape), t.stride(), dtype=t.dtype, device=device)
    return nn.Parameter(fake, requires_grad=t.requires_grad) if isinstance(t, nn.Parameter) else fake


@contextmanager
def plain_errors() -> Iterator[None]:
    """Say which line of the program failed, and why, in one error of the library."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        yield
    except CostGraphError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        at = [f for f in frames if not f.filename.startswith((TORCH, HERE))][-1:] or frames[-1:]
        raise UnsupportedError(
            f"{at[0].filename}:{at[0].lineno}, in {at[0].name}, {shown(at[0].line, 120)}: {type(error).__name__}: "
            f"{shown(str(error), 300)}; expected a program that runs on tensors without data"
        ) from error
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
