"""Families of programs of plain torch: traced, which needs torch, where a record of them is predicted."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from importlib.util import find_spec
from typing import Annotated

from ...errors import UnsupportedError
from ...notation.door import Rule
from ...notation.records import one_of
from .case import Case, Run, device_of, family
from .record import Record, facts

_PHASES = {"forward": ("forward",), "backward": ("backward",), "full": ()}
#: Who runs the program as it is written; others bring kernels of their own.
_PLAIN = ("huggingface", "torch")


def _is_date(text: object) -> bool:
    return isinstance(text, str) and re.fullmatch(r"\d{4}-\d{2}-\d{2}", text) is not None


@dataclass(frozen=True)
class _Called:
    kernel: str
    provider: str
    mode: Annotated[str, one_of(_PHASES)]
    dtype: str = ""
    measured: Annotated[str, Rule("a date, such as 2026-05-15", _is_date)] = ""


@family("liger", subject="kernels")
def called(record: Record) -> Case:
    """Predict a call of plain torch and its backward pass, in eager mode; caches are flushed before each run."""
    given = facts(record, _Called)
    if given.provider not in _PLAIN:
        raise UnsupportedError(f"inputs: provider {given.provider!r} has kernels of its own, expected plain torch")
    if find_spec("torch") is None:
        raise UnsupportedError("torch is not installed, expected it for a program that is traced")
    from ...torch.validating.published import PROGRAMS, UNTRACED, benchmarked, traced

    if given.kernel in UNTRACED:
        raise UnsupportedError(f"inputs: kernel {given.kernel!r}: {UNTRACED[given.kernel]}")
    if given.kernel not in PROGRAMS:
        raise UnsupportedError(f"inputs: kernel {given.kernel!r} has no plain program here, expected one that has")
    program = PROGRAMS[given.kernel].at(given.measured)
    if record.what != "peak memory":
        graph = traced(program, given.dtype)
        return Case(
            (Run(graph, program.bound(record.inputs), Fraction(1), _PHASES[given.mode]),), subject=program.subject
        )
    arch = device_of(record.device).arch
    if arch is None:
        raise UnsupportedError(f"device {record.device!r} states no compute capability, expected a GPU of NVIDIA")
    graph = benchmarked(program, given.dtype, given.mode, arch)
    # what was there before a backward pass is not counted
    phases = ("backward",) if given.mode == "backward" else ()
    return Case(subject=program.subject, peak=Run(graph, program.bound(record.inputs), phases=phases))
