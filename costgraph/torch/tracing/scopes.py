"""Which module an op belongs to: in the backward pass, the one whose forward pass made it necessary."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ...algebra.symbols import is_level

__all__ = ["Scopes", "path_of"]


def path_of(name: str) -> str:
    """Return the path of a parameter or a module; a compiled module has that of the one inside it.

    A key may be any text: what a name has not is an underscore, as in front of a digit that begins a word.
    """
    parts = (re.sub(r"\W", "_", part, flags=re.ASCII) for part in name.split(".") if part not in ("", "_orig_mod"))
    return "/".join(part if is_level(part) else f"_{part}" for part in parts)


class Scopes:
    """The path of the module that runs: its submodules give the levels."""

    def __init__(self, module: nn.Module) -> None:
        self.paths = {id(m): path_of(name) for name, m in module.named_modules()}
        self.stack: list[str] = []
        self.made: dict[int, str] = {}
        """Scope in which each node of the backward pass came to be, by its number."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow the modules that are called."""
        before = register_module_forward_pre_hook(self._enter)
        after = register_module_forward_hook(self._leave, always_call=True)
        try:
            with warnings.catch_warnings():
                # a compiled module says that such hooks see it twice: both have one path
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
        """Return the scope of an op that runs now, and whether it is a part of the forward pass that runs again."""
        node = torch._C._current_autograd_node()
        again = node is not None and torch.is_grad_enabled()
        if node is not None and not self.stack:
            return self.made.get(node._sequence_nr(), ""), again
        scope = self.stack[-1] if self.stack else ""
        if node is None and torch.is_grad_enabled():  # the node of this op was made just before the op itself runs
            self.made[torch.autograd._get_sequence_nr() - 1] = scope
        return scope, again
