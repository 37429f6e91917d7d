"""Lines of a report on a step of training; needs rich."""

from __future__ import annotations

from collections.abc import Iterator

from .amounts import amount, percent
from .data import Facts

__all__ = ["training_rows"]

#: What stands below another figure.
_PARTS = {"model-flops-full": "full squares", "weight-bytes": "", "gradient-bytes": "", "optimizer-bytes": ""}
_PARTS["bytes-per-param"] = ""


def training_rows(r: Facts) -> Iterator[tuple[str, str]]:
    """Yield label and text of each figure that only a step of training has."""
    if r.training is None:
        return
    for name, figure in r.training.figures.items():
        label = f"  {_PARTS[name] or figure.title}" if name in _PARTS else figure.title
        yield label, amount(figure.value, figure.unit)
    if r.training.mfu is not None and r.training.hfu is not None and r.training.most_mfu is not None:
        yield (
            "MFU at the estimate",
            f"{percent(r.training.mfu)} of the {r.training.dtype} peak, at most {percent(r.training.most_mfu)}",
        )
        yield "HFU at the estimate", percent(r.training.hfu)
        for name, share in r.training.others.items():
            yield f"  matmuls in {name}", f"{percent(share)} of the matmul FLOPs"
