"""The command that writes the page with sliders."""

from __future__ import annotations

from typing import Annotated

import typer

from ..report.explore import explore
from . import options as opt
from .frame import command
from .loading import load_model
from .terminal import say

__all__ = ["explore_command"]

_Out = Annotated[str, typer.Option("--out", metavar="FILE", help="HTML file to write.")]
_Views = Annotated[
    list[str] | None,
    typer.Option("--views", metavar="VIEW", help="One view; may be given several times. forward, prefill, decode or "
                 "train, then optimizer=, precision=, checkpoint=, accumulate=, clip=, and of one rank dp=, tp=, cp=, "
                 "ep=, pp=, zero=, sequence, context=, reduce_each=, schedule=."),
]  # fmt: skip


@command("explore")
def explore_command(
    model: opt.Model, out: _Out, views: _Views = None, attention: opt.Attention = None, dtype: opt.Format = None,
    dropout: opt.Dropout = None, composed: opt.Composed = False, symbolic: opt.Symbolic = False,
) -> None:  # fmt: skip
    """Write one HTML file that shows in a browser what follows from sizes: memory, FLOPs and time, without a server.

    Examples
    --------
      costgraph explore llama-3-8b --out page.html
      costgraph explore llama-3-8b --out page.html --views forward
        --views "train precision=bf16 checkpoint=every-block dp=8 tp=T zero=3"
        --views "train precision=bf16 accumulate=8 pp=4"
    """
    page = explore(load_model(model, attention, dtype, dropout, composed, symbolic), out, views=views)
    say(f"{out}: {page.name}, {len(page.html):,} characters")
