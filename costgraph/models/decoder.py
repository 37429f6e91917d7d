"""The frame that decoders share: tokens, embeddings, layers, a norm, and a head."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import costgraph as cg

from .blocks import Norm, Part
from .composed import KERNELS, Kernels

__all__ = ["decoder", "logits"]


def decoder(
    name: str,
    dtype: str,
    stack: Callable[..., cg.Tensor],
    *,
    rope: object = None,
    norm: Norm | None = cg.rms_norm,
    tied: bool = False,
    head_bias: bool = False,
    end: Part | None = None,
    assume: Sequence[str] = ("H >= G",),
    run: Kernels = KERNELS,
) -> cg.Graph:
    """Declare a decoder: tokens (B, S) to logits (B, S, V).

    All layers are `stack(x) -> x` of embeddings (B, S, D), or `stack(x, tables) -> x`: `rope` is how many elements of a
    head rotary positions turn, by tables that are made before anything else. `norm` is the last one, `end` what logits
    go through, and `assume` what holds of the sizes.
    """
    B, S, D, V = cg.dims("B S D V")
    with cg.Graph(name, dtype=dtype) as g:
        for fact in assume:
            g.assume(fact)
        tokens = g.input("tokens", (B, S), dtype="int64")
        table = g.param("tokens/table", (V, D))
        tables = () if rope is None else (cg.nn.rotary_tables(cg.ops.arange(S), rope),)
        x = stack(run.named(cg.embedding(tokens, table)), *tables)
        x = x if norm is None else run.normed(norm(x, name="norm"), x)
        x = logits(x, table, tied=tied, bias=head_bias)
        g.output(x if end is None else end(x))
        g.loss = "cross_entropy"
    return g


def logits(x: cg.Tensor, table: cg.Tensor, *, tied: bool, bias: bool = False) -> cg.Tensor:
    """Return (b, s, V), by the table of embeddings if it is tied or by a layer, either of which may have a bias."""
    if not tied:
        return cg.linear(x, "b s d -> b s v", v=table.shape[0], bias=bias, name="head")
    y = cg.nn.tied_head(x, table)
    return y + x.graph.param("head/bias", table.shape[:1]) if bias else y
