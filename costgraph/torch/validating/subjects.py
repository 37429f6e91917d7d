"""What cases are of, and which settings each of them takes."""

from __future__ import annotations

from collections.abc import Sequence

from ...algebra.symbols import shown
from ...errors import BindingError, GraphError
from ...graph.arguments import need_choice
from ..lowering.formats import FORMATS
from .case import Case
from .kernels import KERNELS
from .models import CHECKPOINTS, MODELS, OPTIMIZERS, Model

__all__ = ["SUBJECTS", "check"]

SUBJECTS = {**KERNELS, **MODELS}
"""Subjects by name."""

_ATTENDING = ("gpt", "llama")


def check(cases: Sequence[Case]) -> None:
    """Refuse a suite that is none.

    Raises
    ------
    GraphError
        If there are no cases, one has an unknown subject, or a setting that its subject does not take.
    BindingError
        If a size is missing, or no positive integer.
    """
    if not cases:
        raise GraphError("validate: no cases, expected one at least")
    for case in cases:
        if not isinstance(case, Case):
            raise GraphError(f"validate: case {shown(case, 100)}, expected a costgraph.torch.validating.Case")
        need_choice("validate: subject", case.subject, tuple(SUBJECTS))
        _settings(case, f"validate: {case.subject}")
        _sizes(case, f"validate: {case.subject}")


def _settings(case: Case, place: str) -> None:
    modes: tuple[str, ...] = ("kernel",)
    if case.subject in MODELS:
        modes = ("forward", "step") if isinstance(MODELS[case.subject], Model) else ("forward",)
    step = case.mode == "step"
    need_choice(f"{place}: mode", case.mode, modes)
    need_choice(f"{place}: dtype", case.dtype, tuple(FORMATS))
    need_choice(f"{place}: program", case.program, ("module", "lowered") if step else ("module",))
    need_choice(f"{place}: attention", case.attention, ("eager", "flash") if case.subject in _ATTENDING else ("",))
    need_choice(f"{place}: optimizer", case.optimizer, tuple(OPTIMIZERS) if step else ("",))
    need_choice(f"{place}: checkpoint", case.checkpoint, tuple(CHECKPOINTS) if step else ("",))
    if step and case.program == "module" and OPTIMIZERS[case.optimizer][1] is None:
        raise GraphError(f"{place}: torch has no {case.optimizer} for it, expected program='lowered'")


def _sizes(case: Case, place: str) -> None:
    needed = SUBJECTS[case.subject].sizes
    for name in needed:
        if name not in case.sizes:
            raise BindingError(f"{place}: no size {name}, expected {', '.join(needed)}")
    for name, size in case.sizes.items():
        if name not in needed:
            raise BindingError(f"{place}: size {shown(name)}, expected {', '.join(needed)}")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise BindingError(f"{place}: {name}={shown(size)}, expected a positive integer")
