"""What a program says of gradients: where a backward pass runs, where none would, and where it states one itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.autograd import grad_mode
from torch.autograd.function import Function, _SingleLevelFunction
from torch.utils.checkpoint import CheckpointFunction

from .marks import Barrier
from .recorder import Recorder

__all__ = ["backward_passes", "barriers"]

#: Through it each backward pass goes.
_ENGINE = torch.autograd.graph._engine_run_backward


@contextmanager
def backward_passes(recorder: Recorder) -> Iterator[None]:
    """Let what autograd runs be the backward pass, also where the program itself asks for it."""

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
    """Note where a forward pass would let no gradient pass, or state one itself, of a run that has none at all."""
    recorder.stopped = False
    with ExitStack() as patched:
        for patches in (_switches(recorder), _inference(recorder), _functions(recorder)):
            patched.enter_context(patches)
        yield
    recorder.stopped = None


class _Mode(NamedTuple):
    """Whether gradients are on, which a switch goes back to."""

    ran: bool
    meant: bool
    """the same, of a run that has gradients where the program does not switch them off"""


@contextmanager
def _switches(recorder: Recorder) -> Iterator[None]:
    """Follow `no_grad`, `enable_grad` and `set_grad_enabled`, which all ask for what is, and set what is to be."""
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
    """Follow `inference_mode`, which is a switch of its own; `inference_mode(False)` has gradients on."""
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
    """Mark what functions return that state their gradient; a checkpoint has that of what it runs."""
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
        if not recorder.stopped and not function.__module__.startswith(__package__):  # what stands for torch's own
            for t in made if isinstance(made, tuple) else (made,):
                if isinstance(t, torch.Tensor):
                    recorder.barrier(t, Barrier(function.__qualname__))
        return made

    # programs have `apply` of their functions from before, which goes on to that of a class between
    with patch.object(_SingleLevelFunction, "apply", classmethod(applied)):
        yield
