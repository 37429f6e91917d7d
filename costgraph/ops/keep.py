"""What variables of a program do to memory: a tensor that one still names is not given back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import GraphError
from ..graph.arguments import need_tensor
from ..graph.graph import apply
from ..graph.op import OpKind, Result
from ..graph.tensor import Tensor
from . import rules
from .registry import register

__all__ = ["Keep", "keep"]


@register
@dataclass(frozen=True, kw_only=True)
class Keep(OpKind):
    """A view of its first operand, before which the others cannot be given back."""

    name = "keep"
    restricted = True
    flops, reads, writes = rules.free, rules.nothing, rules.nothing

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Return the first operand."""
        if not operands:
            raise GraphError("keep of nothing, expected one operand at least")
        x = operands[0]
        return [Result(x.sizes, x.dtype, x.strides, of=0, offset=x.offset, domain=x.domain)]


def keep(x: Tensor, *others: Tensor, name: str = "keep") -> Tensor:
    """Let other tensors live until here, as what a variable of a program still names.

    A tensor dies at the last op that reads it. In eager code a variable, or the arguments of a call that has not
    returned, can name it longer: `keep` stands where they let go.

    Parameters
    ----------
    x : Tensor
        What is returned.
    *others : Tensor
        What lives at least as long as it takes to make `x`.
    name : str
        Name of the op.

    Returns
    -------
    Tensor
        A view of `x`: no FLOPs and no bytes. Gradients pass to `x` alone.

    Raises
    ------
    GraphError
        If something else than tensors is given.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, D = cg.dims("B D")
    >>> def peak(hold):
    ...     with cg.Graph("g") as g:
    ...         residual = cg.relu(g.input("x", (B, D)))
    ...         y = cg.tanh(cg.tanh(residual))
    ...         g.output(cg.ops.keep(y, residual) if hold else y)
    ...     return cg.peak_memory(g)
    >>> peak(False), peak(True)
    (12*B*D, 16*B*D)
    """
    need_tensor("keep", x, *others)
    return apply(Keep(), [x, *others], name)[0]
