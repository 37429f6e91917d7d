"""The tables of a validation, and what its rows come to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import median

from ...hardware.units import format_quantity
from .rows import Failed, Row

__all__ = ["Cells", "bytes_and_flops", "markdown", "summary", "times"]

Cells = tuple[list[str], list[list[str]]]
"""Head and rows of a table, as texts."""

_EXACT = 4096
"""Bytes up to which a difference is shown as such, and not as a part of the peak."""


def bytes_and_flops(rows: Sequence[Row]) -> Cells:
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
        for row in rows
    ]


def times(rows: Sequence[Row], cache: int | None) -> Cells:
    """Return the table of times: the fastest run, how often the lower bound goes into it, and what it follows.

    In parentheses where the last-level cache may hold what has to move, so that the bound need not hold.
    """
    head = ["case", "fastest run", "/ bound", "/ estimate", "follows"]
    return head, [
        [
            row.case.name,
            format_quantity(row.seconds.min, "s"),
            _times(row.seconds.min, row.modelled.bound, "{}" if row.beyond(cache) else "({})"),
            _times(row.seconds.min, row.modelled.estimate),
            _follows(row),
        ]
        for row in rows
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


def summary(rows: Sequence[Row], failed: Iterable[Failed], cache: int | None) -> list[str]:
    """Return what the rows come to, in a sentence each."""
    told = (_predictions(rows, "declared"), _predictions(rows, "traced"), _speeds(rows, cache)) if rows else ()
    left = (f"Could not run: {row.case.name}: {row.error}" for row in failed)
    return [*(text for texts in told for text in texts), *left]


def _predictions(rows: Sequence[Row], which: str) -> Iterator[str]:
    told = [row.counted(which) for row in rows if row.counted(which) is not None]
    if not told:
        return
    uncounted = sum(row.declared.uncounted > 0 for row in rows)
    but = f", but for attention in {uncounted} of them, which it counts as none (*)" if uncounted else ""
    but += "" if all(told) else "; (!) marks the others"
    yield f"Matmul FLOPs, {which}: {sum(map(bool, told))} of {len(told)} cases equal torch's counter{but}."
    for mode, what in (("kernel", "ops"), ("forward", "forward passes"), ("step", "training steps")):
        found = [(row.off(which), row.measured.peak) for row in rows if row.case.mode == mode]
        offs = [(abs(off), abs(off) / peak) for off, peak in found if off is not None]
        if offs:
            shares = [share for _, share in offs]
            yield (
                f"Peak of {what}, {which}: off by {100 * median(shares):.3f} % in the median of {len(offs)}, "
                f"{100 * max(shares):.2f} % at most; {sum(n <= _EXACT for n, _ in offs)} of them within 4 KiB."
            )


def _speeds(rows: Sequence[Row], cache: int | None) -> Iterator[str]:
    beyond = [row for row in rows if row.beyond(cache)]
    below = [row for row in rows if row.seconds.min < row.modelled.bound]
    inside = sum(not row.beyond(cache) for row in below)
    yield (
        f"Time: {len(below) - inside} of {len(beyond)} cases beyond the last-level cache ran below the lower bound, "
        f"{inside} of {len(rows) - len(beyond)} within it."
    )
    told = [row.agrees for row in rows if row.agrees is not None]
    kernels = sum(row.case.mode == "kernel" for row in rows)
    if kernels:
        yield (
            f"Classification: {sum(map(bool, told))} of {len(told)} ops follow what the roofline says bounds them; "
            f"{kernels - len(told)} more are bound by overhead, or faster than memory and units are."
        )


# -- as text -------------------------------------------------------------------------------------------------------


def markdown(texts: Iterable[str], tables: Iterable[Cells]) -> str:
    """Return sentences and tables in Markdown."""
    lines = [f"- {text}" for text in texts]
    for head, rows in tables:
        lines += ["", _line(head), _line(["---"] * len(head)), *map(_line, rows)]
    return "\n".join(lines) + "\n"


def _line(texts: Iterable[str]) -> str:
    return f"| {' | '.join(text.replace('|', '/') for text in texts)} |"
