"""Reports: the only place where figures become text, files or pictures."""

from . import plots
from .collect import Report, report
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
