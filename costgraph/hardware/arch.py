"""Architectures of GPUs, by compute capability."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..algebra.symbols import shown
from ..errors import GraphError

__all__ = ["DEFAULT", "Arch", "arch_of"]

#: That of an H100 and an H200.
DEFAULT = "sm_90"
#: torch's kernels for attention know devices from the one to the other (`check_mem_efficient_hardware_support`).
_FIRST, _LAST = (5, 0), (12, 1)
_NAME = re.compile(r"sm_(\d{1,2})(\d)[af]?\Z", re.ASCII)


@dataclass(frozen=True, order=True)
class Arch:
    """A compute capability; earlier ones are smaller."""

    major: int
    minor: int = 0

    def __str__(self) -> str:
        return f"sm_{self.major}{self.minor}"


def arch_of(name: object, place: str) -> Arch:
    """Return the architecture of a name as `torch.cuda.get_arch_list` has it, such as `sm_90`.

    GraphError if it is no name of one, or of one that torch has no kernels for.
    """
    found = _NAME.match(name) if isinstance(name, str) else None
    number = (0, 0) if found is None else (int(found[1]), int(found[2]))
    if not _FIRST <= number <= _LAST:
        raise GraphError(
            f"{place}: arch {shown(name)}, expected a compute capability from sm_50 to sm_121, such as sm_80 or sm_90"
        )
    return Arch(*number)
