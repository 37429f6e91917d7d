"""The command that reads checkpoints, and holds them to a model."""

from __future__ import annotations

from typing import Annotated

import typer

from ..analysis.weights import compare_weights
from ..files.weights import read_weights
from . import options as opt
from .frame import command
from .loading import load_model
from .terminal import say

__all__ = ["weights_command"]


@command("weights")
def weights_command(
    path: Annotated[str, typer.Argument(metavar="FILE",
          help="A safetensors file, an index, a folder with one, or a GGUF file.")],
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="What it is held to, as of report.",
        autocompletion=opt.one_of(opt.presets))] = None,
    sizes: opt.Sizes = None, dtype: opt.Format = None,
) -> None:  # fmt: skip
    """Print which tensors a checkpoint holds, from its headers alone; with a model, in what the two differ.

    The exit code is 1 where they differ.

    Examples
    --------
      costgraph weights model.safetensors
      costgraph weights folder llama-3-8b
    """
    found = read_weights(path)
    if model is None:
        say(str(found))
        return
    compared = compare_weights(load_model(model, None, dtype, None), found, **opt.read_sizes(sizes))
    say(str(compared))
    if not compared.agree:
        raise typer.Exit(1)
