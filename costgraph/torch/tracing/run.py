"""The run that is recorded: forward, and if asked backward and a step of the optimizer."""

from __future__ import annotations

import gc
import logging
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from ...algebra.symbols import shown
from ...errors import CostGraphError, GraphError, UnsupportedError
from ...graph.graph import Graph
from ...transforms.folding.turns import fold_turns
from .build import Builder
from .events import Handle
from .formats import Formats
from .functions import SymbolicSizes
from .gradients import backward_passes, barriers
from .higher_order import uncompiled
from .recorder import Recorder
from .scopes import path_of
from .shapes import is_program, place
from .state import attributes, elements, is_a

__all__ = ["Factory", "Run", "plain_errors"]

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
    device : callable
        Lets the program run as on a device.
    """

    def __init__(
        self,
        module: nn.Module,
        recorder: Recorder,
        optimizer: Factory | None,
        device: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.module = module
        self.device = device
        self.recorder = recorder
        self.optimizer = optimizer
        self.params: dict[str, torch.Tensor] = {}
        self.outputs: list[Handle] = []
        self.gradients: dict[Handle, Handle] = {}
        self.formats = Formats(recorder)

    def declare(self, inputs: Mapping[str, object], kept: Mapping[str, torch.Tensor]) -> None:
        """Say what is there before the first op: parameters, buffers, gradients that were there before, and inputs."""
        taken = set[str]()
        for name, t in (*self.module.named_parameters(), *self.module.named_buffers()):
            path = path_of(name)
            while path in taken:  # by a key that differs in other characters
                path += "_"
            taken.add(path)
            self.recorder.source(t, "param" if isinstance(t, nn.Parameter) else "buffer", path)
            if isinstance(t, nn.Parameter) and t.requires_grad:
                self.params[path] = t
                if t.grad is not None:
                    self.recorder.source(t.grad, "buffer", f"{path}/grad")
        for name, t in kept.items():
            self.recorder.source(t, "cache", name)
        for name, value in inputs.items():
            if isinstance(value, torch.Tensor) and name not in kept:
                self.recorder.source(value, "input", name)

    def __call__(self, args: list[object], kwargs: dict[str, object], *, train: bool) -> None:
        """Run forward, and if asked the rest of a training step."""
        collecting = gc.isenabled()
        gc.disable()  # what only a cycle holds would be given back at any time
        try:
            with (
                torch.set_grad_enabled(train), uncompiled(),
                SymbolicSizes(self.recorder.turns, None if train else self.formats),
                self.device(), self.recorder, backward_passes(self.recorder),
                nullcontext() if train else self.recorder.turns.watching(),
                nullcontext() if train else barriers(self.recorder),
            ):  # fmt: skip
                if train and any(p._post_accumulate_grad_hooks for p in self.params.values()):
                    with self.recorder.pausing():
                        self._warm(args, kwargs)
                made = list(_tensors(self.module(*args, **kwargs)))
                if train:
                    self._train(made)
                self.outputs = [self.recorder.known(t) for t in made]
        finally:
            if collecting:
                gc.enable()

    def _warm(self, args: list[object], kwargs: dict[str, object]) -> None:
        """Run forward and backward unseen: an optimizer that a hook calls makes its state in the first step."""
        before = {p: p.grad for p in self.params.values()}
        for loss in self._loss(list(_tensors(self.module(*args, **kwargs)))):
            loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
        for p, grad in before.items():
            p.grad = grad

    def _loss(self, made: list[torch.Tensor]) -> list[torch.Tensor]:
        if len(made) != 1 or made[0].numel() != 1 or not made[0].requires_grad:
            raise GraphError(
                f"trace: with train=True {type(self.module).__name__} returns {shown(made, 200)}, expected one scalar "
                f"loss that depends on a parameter"
            )
        return made

    def _train(self, made: list[torch.Tensor]) -> None:
        (loss,) = self._loss(made)
        self.recorder.phase = "backward"
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
        self.recorder.leaves.need_same((p, self.recorder.known(p)) for p in self.params.values())
        self.gradients = {
            self.recorder.known(p): self.recorder.known(p.grad)
            for p in self.params.values()
            if p.grad is not None and p.numel()
        }
        if self.optimizer is not None:
            self._update(self.optimizer)

    def _update(self, make: Factory) -> None:
        self.recorder.phase = "optimizer"
        with self.recorder.pausing():
            optimizer = make(list(self.params.values()))
            optimizer.step()  # makes the state
        names = {id(p): name for name, p in self.params.items()}
        for p, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    self.recorder.source(value, "state", f"optimizer/{names[id(p)]}/{key}")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def build(self, graph: Graph, known: Sequence[str]) -> Graph:
        """Add what was recorded to a graph; turns of loops over sizes are loops of the graph that is returned."""
        graph.assume(*known)
        builder = Builder(graph, self.recorder.sources)
        builder.run(self.recorder.events)
        graph.output(*(builder.tensor(h) for h in self.outputs if h.numel))
        graph.gradients.update({builder.sources[p.storage]: builder.tensor(g) for p, g in self.gradients.items()})
        builder.finish()
        graph.freeze()
        counts = self.recorder.turns
        if not counts.loops:
            return graph
        if counts.broken:
            raise counts.refused("is left before the last of its turns")
        try:
            return fold_turns(graph, builder.turns.counted(counts, self.recorder.values.translator))
        except GraphError as error:
            raise counts.refused(str(error)) from error


def _tensors(value: Any, seen: tuple[int, ...] = ()) -> Iterator[torch.Tensor]:
    """Yield the tensors in what a module returned, whatever holds them."""
    if id(value) in seen:
        return
    if is_a(value, torch.Tensor):
        yield value
        return
    if is_a(value, dict | list | tuple):
        inside = [v for _, v in elements(value)] if is_a(value, dict) else elements(value)
    else:
        inside = list(value.values() if is_a(value, Mapping) else (attributes(value) or {}).values())
    for v in inside:
        yield from _tensors(v, (*seen, id(value)))


@contextmanager
def plain_errors() -> Iterator[None]:
    """Say which line of the program failed, and why, in one error of the library."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings():  # `deepcopy` compares data pointers, which are all 0 here
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            yield
    except CostGraphError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        at = [f for f in frames if is_program(f.filename)][-1:] or frames[-1:]
        raise UnsupportedError(f"{place(at[0].filename, at[0].lineno, at[0].name)}: {_cause(error)}") from error
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _cause(error: Exception) -> str:
    """Return what is wrong in words, and what would do."""
    if isinstance(error, GuardOnDataDependentSymNode | DataDependentOutputException | DynamicOutputShapeException):
        return (
            "goes by the data of a tensor, which has none, expected a program that runs on tensors without data; what "
            "is known are buffers, and whether something holds of inputs that are whole numbers or truth values"
        )
    if "symbolic sizes" in str(error):
        return (
            "runs in torch on sizes that are numbers alone, expected no dimensions there; name none (None) for the "
            "axes of what it is given"
        )
    said = f"{type(error).__name__} {error}".lower()
    if any(word in said for word in ("nestedint", "nestedtensor", "nested tensor", "nested_tensor")):
        return (
            "makes a nested tensor, the lengths of whose rows are data, expected dense tensors; pad the rows to one "
            "length, or pack them along one axis"
        )
    if "sparsetensor" in said or "sparse_" in said or "sparse csr" in said or "sparsecsr" in said:
        return "takes a sparse tensor, the places of whose elements are data, expected a dense one; call `.to_dense()`"
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {shown(first, 300)}; expected a program that runs on tensors without data"
