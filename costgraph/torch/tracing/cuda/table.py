"""The table of rules: functions of torch that do something else on a GPU, and where torch says so."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from ....hardware.arch import Arch
from ....ops.registry import adding
from ..choices import Choices

__all__ = ["RULES", "SOURCES", "Here", "Rule", "rule", "source"]


@dataclass(frozen=True)
class Here:
    """The device that a program is told it runs on."""

    arch: Arch
    choices: Choices

    def by(self, rule: str, why: str) -> AbstractContextManager[None]:
        """Let the calls inside follow from a rule that has a source."""
        assert rule in SOURCES, rule
        return self.choices.by(rule, why)


#: From the device and what a function was called with to what it returns; None where the function itself has to run.
Rule = Callable[..., Any]

#: Rules by the function of torch.
RULES: dict[Any, Rule] = {}

#: Where torch's sources say so, by the name of a rule.
SOURCES: dict[str, str] = {}


def source(name: str, where: str) -> str:
    """Register where a rule of this name comes from; returns the name."""
    adding(SOURCES, "a source", name, what="rule")(where)
    return name


def rule(*functions: Any) -> Callable[[Rule], Rule]:
    """Register a rule for functions of torch."""

    def register(found: Rule) -> Rule:
        RULES.update(dict.fromkeys(functions, found))
        return found

    return register
