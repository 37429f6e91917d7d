"""The common structure of decoders: token embedding, layers, a final norm, and a head."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import costgraph as cg

from .blocks import Branch, Norm
from .eager_ops import KERNELS, Kernels

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
    end: Branch | None = None,
    assume: Sequence[str] = ("H >= G",),
    run: Kernels = KERNELS,
) -> cg.Graph:
    """Declare a decoder: tokens (B, S) to logits (B, S, V).

    `stack(x) -> x` runs all layers on embeddings (B, S, D). With `rope`, the number of rotated elements of a head, it
    is `stack(x, tables) -> x`, and tables are computed before anything else. `norm` is the final norm, `end` is applied
    to the logits, and `assume` lists conditions on sizes.
    """
    B, S, D, V = cg.dims("B S D V")
    with cg.Graph(name, dtype=dtype) as g:
        for fact in assume:
            g.assume(fact)
        tokens = g.input("tokens", (B, S), dtype="int64")
        table = g.param("tokens/table", (V, D))
        tables = () if rope is None else (cg.nn.rotary_tables(cg.ops.arange(S), rope),)
        x = stack(run.keep_for_model(cg.embedding(tokens, table)), *tables)
        x = x if norm is None else run.end_model(norm(x, name="norm"), x)
        x = logits(x, table, tied=tied, bias=head_bias)
        g.output(x if end is None else end(x))
        g.loss = "cross_entropy"
    return g


def logits(x: cg.Tensor, table: cg.Tensor, *, tied: bool, bias: bool = False) -> cg.Tensor:
    """Return logits (b, s, V) from a linear head, or from the embedding table if it is tied."""
    if not tied:
        return cg.linear(x, "b s d -> b s v", v=table.shape[0], bias=bias, name="head")
    y = cg.nn.tied_head(x, table)
    return y + x.graph.param("head/bias", table.shape[:1]) if bias else y
