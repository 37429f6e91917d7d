"""Reports: format costs as text, files, plots and interactive pages."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..ir.graph import Graph
from ..notation.lazy_imports import lazy_getattr

if TYPE_CHECKING:
    from ..hardware.networks import Network
    from ..hardware.specs import Hardware
    from . import plots
    from .collect import Report
    from .data import Part, Peak
    from .formula import common_part, formula_latex, formula_python, formula_text
    from .plots import plot_roofline, plot_timeline
    from .quantities import Figure

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
    "quantities": "Figure",
}

if not TYPE_CHECKING:
    __getattr__ = lazy_getattr(__name__, _LATER)


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
    """Collect the costs of a graph, and times on a device if one is given.

    Parameters
    ----------
    graph : Graph
        The graph.
    hardware : str, path-like or Hardware, optional
        The device. Without one the report has no times.
    count : str
        Matmul FLOPs in the tables by scope and phase, "executed" or "full". Times always use executed FLOPs.
    fallback : str or mapping, optional
        Rates for formats that the device does not support, as in `roofline`.
    depth : int
        Module scope levels in the tables.
    device : str, optional
        "cuda" adds the memory that torch's libraries and kernels allocate to the peak, as in `peak_memory`.
    arch : str, optional
        Compute capability. The default is the hardware's, or sm_90 without hardware.
    overlap : str
        Overlap of collectives with compute for a sharded graph, "none" or "ideal", as in `roofline`.
    network : str, path-like or Network, optional
        Network between the device's interconnect domains, as in `roofline`.
    hierarchical : bool
        Model every level of the memory hierarchy, as in `roofline`.
    **dims : int
        Sizes of dimensions. Figures with unbound sizes are formulas.

    Returns
    -------
    Report
        Print it, or call `.to_json(path)`, `.to_csv(path)` or `.plot(path)`. Every figure is an attribute.

    Raises
    ------
    BindingError, GraphError, SpecError, UnsupportedError
        As raised by the underlying analyses.

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
    # `report` is imported eagerly because its package has the same name, so its dependencies load on the first call
    from .collect import collect

    return collect(graph, hardware, dims, count, fallback, depth, (device, arch), (overlap, network, hierarchical))
