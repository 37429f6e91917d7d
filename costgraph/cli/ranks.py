"""Options of a step that ranks share: the axes of their mesh, what is split over these, and what they meet over."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..algebra.symbols import shorten, size_or_name
from ..errors import FormatError
from ..graph.graph import Graph
from ..transforms.offload import OFFLOADED
from ..transforms.shard.parallelize import CONTEXTS, parallelize
from . import options as opt

__all__ = ["Context", "Cp", "Dp", "Ep", "Network", "Offload", "Overlap", "Reduce", "Sequence", "Tp", "Zero", "rank_of"]

REDUCES = ("each", "last")


def _degree(option: str, of: str) -> Any:
    return typer.Option(option, metavar="N", help=f"Degree of {of} parallelism: a number, or a name that stays open.")


def _choice(option: str, of: str, what: str, words: tuple[str, ...]) -> Any:
    help_ = f"{what}: {', or '.join(words)}."
    return typer.Option(option, metavar=of, help=help_, autocompletion=opt.one_of(lambda: words))


Dp = Annotated[str, _degree("--dp", "data")]
Cp = Annotated[str, _degree("--cp", "context")]
Tp = Annotated[str, _degree("--tp", "tensor")]
Ep = Annotated[str, _degree("--ep", "expert")]
Zero = Annotated[int, typer.Option("--zero", metavar="N", min=0, max=3, help="Stage of ZeRO over dp and cp.")]
Sequence = Annotated[bool, typer.Option("--sequence", help="Split the sequence between products over tp.")]
Context = Annotated[str, _choice("--context", "HOW", "Attention over cp", CONTEXTS)]
Reduce = Annotated[str, _choice("--reduce", "WHEN", "Gradients, by micro-batches", REDUCES)]
Offload = Annotated[
    str, typer.Option("--offload", metavar="WHAT,WHAT", help=f"What lies on the host, of {', '.join(OFFLOADED)}.")
]
Network = Annotated[str | None, typer.Option("--network", metavar="NAME", help="Between domains of devices.")]
Overlap = Annotated[str, typer.Option("--overlap", metavar="HOW", help="Of collectives: none, or ideal.")]


def rank_of(step: Graph, degrees: dict[str, str], zero: int, sequence: bool, context: str, reduce: str) -> Graph:
    """Return the graph of one of the ranks that share a step; the step itself where there is one rank.

    Parameters
    ----------
    step : Graph
        Of the whole model.
    degrees : dict of str to str
        As they stand on the command line, by axis.
    zero : int
        Stage of ZeRO.
    sequence : bool
        Whether the sequence is split over tp.
    context : str
        What attention does along cp.
    reduce : str
        each or last: the micro-batch behind which gradients are reduced.

    Returns
    -------
    Graph
        What `parallelize` makes.

    Raises
    ------
    BindingError, FormatError, GraphError
        If a degree is neither a size nor a name, a word is unknown, or nothing is split over an axis.
    """
    for option, word, known in (("--reduce", reduce, REDUCES), ("--context", context, CONTEXTS)):
        if word not in known:
            raise FormatError(f"{option} {shorten(word)}: expected {' or '.join(known)}")
    if set(degrees.values()) == {"1"} and not (zero or sequence):
        return step
    given: dict[str, Any] = {axis: size_or_name(n, f"--{axis}") for axis, n in degrees.items()}
    return parallelize(step, **given, zero=zero, sequence=sequence, context=context, reduce_each=reduce == "each")
