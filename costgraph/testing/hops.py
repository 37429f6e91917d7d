"""What stages of a pipeline hand to each other: one stage alone sends to nobody, and gets zeros."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..algebra.polynomial import poly
from ..graph.graph import apply
from ..graph.tensor import Tensor
from ..ops.hops import Receive, Send
from .meanings import meaning
from .samples import sample
from .sketch import Sketch
from .values import At


@meaning(Send)
def _send(at: At[Send]) -> None:
    for index in at.operands[0].points():
        at.read(0, *index)
    at.view(np.asarray)


@meaning(Receive)
def _receive(at: At[Receive]) -> None:
    for index in np.ndindex(*at.result().array.shape):
        at.write(0, *index)


@sample(Send)
def _drawn_send(s: Sketch) -> Sequence[Tensor]:
    return apply(Send(), [s.tensor()], "send")


@sample(Receive)
def _drawn_receive(s: Sketch) -> Sequence[Tensor]:
    return apply(Receive(sizes=tuple(map(poly, s.shape())), dtype=s.fresh(()).dtype), [], "receive")
