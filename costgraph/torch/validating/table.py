"""The tables of a validation, and what its rows come to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import median
from typing import TYPE_CHECKING

from ...hardware.units import format_quantity

if TYPE_CHECKING:
    from .record import Row, Validation

__all__ = ["Cells", "bytes_and_flops", "markdown", "summary", "times"]

Cells = tuple[list[str], list[list[str]]]
"""Head and rows of a table, as texts."""

_EXACT = 4096
"""Bytes up to which a difference is shown as such, and not as a part of the peak."""


def bytes_and_flops(validation: Validation) -> Cells:
    """Return the table of matmul FLOPs and bytes at the peak: measured, and how far predictions are off."""
    head = ["case", "matmul FLOPs", "peak", "declared", "traced"]
    return head, [
        [
            row.case.name,
            _flops(row),
            format_quantity(row.measured.peak, "B"),
            _off(row, "declared"),
            _off(row, "traced"),
        ]
        for row in validation.rows
    ]


def times(validation: Validation) -> Cells:
    """Return the table of times: the fastest run, how often the lower bound goes into it, and what it follows.

    In parentheses where the last-level cache may hold what has to move, so that the bound need not hold.
    """
    head = ["case", "fastest run", "/ bound", "/ estimate", "follows"]
    return head, [
        [
            row.case.name,
            format_quantity(row.seconds.min, "s"),
            _times(row.seconds.min, row.modelled.bound, "{}" if validation.beyond(row) else "({})"),
            _times(row.seconds.min, row.modelled.estimate),
            _follows(row),
        ]
        for row in validation.rows
    ]


def _times(seconds: float, of: float, form: str = "{}") -> str:
    return form.format(f"{seconds / of:.2f}") if of else ""


def _flops(row: Row) -> str:
    wrong = row.counted("declared") is False or row.counted("traced") is False
    marks = [mark for mark, there in (("(*)", row.declared.uncounted), ("(!)", wrong)) if there]
    return " ".join([format_quantity(row.declared.flops, "FLOP"), *marks])


def _off(row: Row, which: str) -> str:
    more = row.off(which)
    if more is None:
        return ""
    if abs(more) <= _EXACT:
        return f"{more:+d} B" if more else "equal"
    return f"{100 * more / row.measured.peak:+.2f} %"


def _follows(row: Row) -> str:
    if row.case.mode != "kernel":
        return ""
    return f"{row.outcome} (!)" if row.agrees is False else row.outcome


# -- what it comes to ----------------------------------------------------------------------------------------------


def summary(validation: Validation) -> list[str]:
    """Return what the rows come to, in a sentence each."""
    failed = [f"Could not run: {row.case.name}: {row.error}" for row in validation.failed]
    if not validation.rows:
        return failed
    told = (_predictions(validation, "declared"), _predictions(validation, "traced"), _speeds(validation))
    return [*(text for texts in told for text in texts), *failed]


def _predictions(v: Validation, which: str) -> Iterator[str]:
    told = [row.counted(which) for row in v.rows if row.counted(which) is not None]
    if not told:
        return
    uncounted = sum(row.declared.uncounted > 0 for row in v.rows)
    but = f", but for attention in {uncounted} of them, which it counts as none (*)" if uncounted else ""
    but += "" if all(told) else "; (!) marks the others"
    yield f"Matmul FLOPs, {which}: {sum(map(bool, told))} of {len(told)} cases equal torch's counter{but}."
    for mode, what in (("kernel", "ops"), ("forward", "forward passes"), ("step", "training steps")):
        found = [(row.off(which), row.measured.peak) for row in v.rows if row.case.mode == mode]
        offs = [(abs(off), abs(off) / peak) for off, peak in found if off is not None]
        if offs:
            shares = [share for _, share in offs]
            yield (
                f"Peak of {what}, {which}: off by {100 * median(shares):.3f} % in the median of {len(offs)}, "
                f"{100 * max(shares):.2f} % at most; {sum(n <= _EXACT for n, _ in offs)} of them within 4 KiB."
            )


def _speeds(v: Validation) -> Iterator[str]:
    beyond = [row for row in v.rows if v.beyond(row)]
    below = [row for row in v.rows if row.seconds.min < row.modelled.bound]
    inside = sum(not v.beyond(row) for row in below)
    yield (
        f"Time: {len(below) - inside} of {len(beyond)} cases beyond the last-level cache ran below the lower bound, "
        f"{inside} of {len(v.rows) - len(beyond)} within it."
    )
    told = [row.agrees for row in v.rows if row.agrees is not None]
    kernels = sum(row.case.mode == "kernel" for row in v.rows)
    if kernels:
        yield (
            f"Classification: {sum(map(bool, told))} of {len(told)} ops follow what the roofline says bounds them; "
            f"{kernels - len(told)} more are bound by overhead, or faster than memory and units are."
        )


# -- as text -------------------------------------------------------------------------------------------------------


def markdown(validation: Validation) -> str:
    """Return what the rows come to and both tables, in Markdown."""
    lines = [f"- {text}" for text in summary(validation)]
    for head, rows in (bytes_and_flops(validation), times(validation)):
        lines += ["", _line(head), _line(["---"] * len(head)), *map(_line, rows)]
    return "\n".join(lines) + "\n"


def _line(texts: Iterable[str]) -> str:
    return f"| {' | '.join(text.replace('|', '/') for text in texts)} |"
