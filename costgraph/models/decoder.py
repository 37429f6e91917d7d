"""What decoders share: the frame around their layers, and the layers' halves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import costgraph as cg

from .composed import KERNELS, Kernels

__all__ = ["Block", "Tables", "attending", "decoder", "gated", "half", "logits", "mixed"]

#: Cosines and sines.
Tables = tuple[cg.Tensor, cg.Tensor]

_Part = Callable[[cg.Tensor], cg.Tensor]


class _Norm(Protocol):
    def __call__(self, x: cg.Tensor, /, *, name: str) -> cg.Tensor: ...


def decoder(
    name: str,
    dtype: str,
    stack: Callable[..., cg.Tensor],
    *,
    rope: object = None,
    norm: _Norm = cg.rms_norm,
    tied: bool = False,
    head_bias: bool = False,
    end: _Part | None = None,
    assume: Sequence[str] = ("H >= G",),
    run: Kernels = KERNELS,
) -> cg.Graph:
    """Declare a decoder: tokens (B, S) to logits (B, S, V).

    Parameters
    ----------
    name, dtype : str
        As a family's declaration gets them.
    stack : callable
        All layers, `stack(x) -> x` of embeddings (B, S, D), or `stack(x, tables) -> x`.
    rope : sympy.Expr, optional
        How many elements of a head rotary positions turn, by tables that are made before anything else.
    norm : callable
        The last one.
    tied, head_bias : bool
        As `logits` takes them.
    end : callable, optional
        What logits go through.
    assume : sequence of str
        What holds of the sizes.
    run : Kernels
        How functions of the module run.
    """
    B, S, D, V = cg.dims("B S D V")
    with cg.Graph(name, dtype=dtype) as g:
        for fact in assume:
            g.assume(fact)
        tokens = g.input("tokens", (B, S), dtype="int64")
        table = g.param("tokens/table", (V, D))
        tables = () if rope is None else (cg.nn.rotary_tables(cg.ops.arange(S), rope),)
        x = stack(run.named(cg.embedding(tokens, table)), *tables)
        x = run.normed(norm(x, name="norm"), x)
        x = logits(x, table, tied=tied, bias=head_bias)
        g.output(x if end is None else end(x))
        g.loss = "cross_entropy"
    return g


def logits(x: cg.Tensor, table: cg.Tensor, *, tied: bool, bias: bool = False) -> cg.Tensor:
    """Return (b, s, V), by the table of embeddings if it is tied or by a layer, which may have a bias."""
    if tied:
        return cg.nn.tied_head(x, table)
    return cg.linear(x, "b s d -> b s v", v=table.shape[0], bias=bias, name="head")


def half(
    x: cg.Tensor,
    part: _Part,
    name: str,
    *,
    norm: _Norm = cg.rms_norm,
    norms: Literal["before", "after", "both", "behind"] = "before",
    p: float = 0,
    run: Kernels = KERNELS,
) -> cg.Tensor:
    """Add what a part makes of a tensor to it.

    Parameters
    ----------
    x : Tensor
        What the part reads, and what its result is added to.
    part : callable
        Attention, a feed-forward layer and the like.
    name : str
        Scope of the norms.
    norm : callable
        Which norm.
    norms : str
        before: of what the part reads. after: of what it makes. both. behind: of the sum.
    p : float
        Dropout of what is added.
    run : Kernels
        How functions of the module run.
    """
    y = norm(x, name=f"{name}/norm") if norms in ("before", "both") else x
    made = part(y)
    made = norm(made, name=f"{name}/norm_after") if norms in ("after", "both") else made
    made = run.add(x, cg.dropout(made, p), y)
    return norm(made, name=f"{name}/norm") if norms == "behind" else made


@dataclass(frozen=True)
class Block:
    """A layer: what mixes tokens, and then what mixes channels."""

    mixer: _Part
    channels: _Part
    names: tuple[str, str] = ("attention", "mlp")
    """Scopes of the norms of both."""
    norm: _Norm = cg.rms_norm
    norms: Literal["before", "after", "both", "behind"] = "before"
    """As `half` takes it."""
    p: float = 0
    """Dropout of what each of both adds."""
    run: Kernels = KERNELS

    def __call__(self, x: cg.Tensor) -> cg.Tensor:
        """Run the layer."""
        y = x
        for part, name in zip((self.mixer, self.channels), self.names, strict=True):
            y = half(y, part, name, norm=self.norm, norms=self.norms, p=self.p, run=self.run)
        return self.run.left(y, x)


def attending(kernel: str, p: float, rope: Tables, **facts: Any) -> _Part:
    """Return attention of H heads of K elements, G of them with keys and values, with rotary positions."""
    H, G, K = cg.dims("H G K")
    return partial(cg.nn.self_attention, heads=H, size=K, groups=G, rope=rope, kernel=kernel, p=p, **facts)


def gated(activation: str, **facts: Any) -> _Part:
    """Return a feed-forward layer of F elements with a gate."""
    return partial(cg.nn.gated_mlp, f=cg.dims("F"), activation=partial(cg.ops.pointwise, activation), **facts)


def mixed(routing: str, capacity: float | None, **facts: Any) -> _Part:
    """Return E experts of Fe elements, of which a token meets k."""
    E, k, Fe = cg.dims("E k Fe")
    return partial(cg.nn.moe, experts=E, chosen=k, f=Fe, routing=routing, capacity=capacity, **facts)
