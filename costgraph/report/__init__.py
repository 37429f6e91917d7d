"""Reports: the only place where figures become text, files or pictures."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..ir.graph import Graph
from ..notation.lazy_imports import later

if TYPE_CHECKING:
    from ..hardware.networks import Network
    from ..hardware.specs import Hardware
    from . import plots
    from .collect import Report
    from .data import Part, Peak
    from .formatting import Figure
    from .formula import common_part, formula_latex, formula_python, formula_text
    from .plots import plot_roofline, plot_timeline

__all__ = [
    "Figure",
    "Part",
    "Peak",
    "Report",
    "common_part",
    "formula_latex",
    "formula_python",
    "formula_text",
    "plot_roofline",
    "plot_timeline",
    "plots",
    "report",
]

_LATER = {
    "collect": "Report",
    "data": "Part Peak",
    "formula": "common_part formula_latex formula_python formula_text",
    "plots": "plot_roofline plot_timeline plots",
    "formatting": "Figure",
}

if not TYPE_CHECKING:
    __getattr__ = later(__name__, _LATER)


def report(
    graph: Graph,
    hardware: str | os.PathLike[str] | Hardware | None = None,
    /,
    *,
    count: str = "executed",
    fallback: str | Mapping[str, str] | None = None,
    depth: int = 2,
    device: str | None = None,
    arch: str | None = None,
    overlap: str = "none",
    network: str | Network | None = None,
    hierarchical: bool = False,
    **dims: int,
) -> Report:
    """Collect what a graph costs, on a device if one is named.

    Parameters
    ----------
    graph : Graph
        What is asked.
    hardware : str, path-like or Hardware, optional
        The device; without one there are no times.
    count : str
        How matmul FLOPs of the tables by scope and phase are counted, executed or full; times are of what is executed.
    fallback : str or mapping, optional
        As `roofline`.
    depth : int
        Levels of module scope to tell apart.
    device : str, optional
        cuda: the peak is that with what torch's libraries and kernels allocate there, as `peak_memory` has it.
    arch : str, optional
        Compute capability, by default that of the hardware, or sm_90 without one.
    overlap : str
        Of collectives with the rest, of the graph of one rank: none or ideal, as in `roofline`.
    network : str, path-like or Network, optional
        Between the domains of the device's interconnect, as in `roofline`.
    hierarchical : bool
        Times take each level of memory into account, as in `roofline`.
    **dims : int
        Sizes; what is left open stays a formula.

    Returns
    -------
    Report
        `print` it, or `.to_json(path)`, `.to_csv(path)`, `.plot(path)`; every figure is an attribute.

    Raises
    ------
    BindingError, GraphError, SpecError, UnsupportedError
        As the questions of which it consists.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, D, F = cg.dims("B D F")
    >>> with cg.Graph("g", dtype="bf16") as g:
    ...     g.output(cg.relu(cg.linear(g.input("x", (B, D)), "b d -> b f", f=F, name="up")))
    >>> r = report(g, "h100-sxm", B=8192, D=4096, F=4096)
    >>> r.figures["matmul-flops"].value, r.figures["matmul-flops"].formula
    (274877906944, 2*B*D*F)
    >>> [(part.name, part.bound) for part in r.scopes], r.fits
    ([('up', 'compute'), ('', 'memory')], True)
    """
    # imported at once, as this package has the name of the function; what a report needs, when one is asked for
    from .collect import collect

    return collect(graph, hardware, dims, count, fallback, depth, (device, arch), (overlap, network, hierarchical))
