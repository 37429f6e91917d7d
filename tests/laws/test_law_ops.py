"""Every op kind of the registry is held to every law: a new one is, without a line here."""

import zlib

import pytest
from budget import examples, multiplier

from costgraph import testing
from costgraph.ops.registry import KINDS


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_op_kind_keeps_the_laws(kind):
    several = {"einsum": 4, "repeat": 3, "kernel": 3, "pointwise": 2, "rearrange": 2}.get(kind, 1)
    # a larger budget draws other graphs than the fixed one
    seed = None if multiplier() == 1 else zlib.crc32(f"{kind}{multiplier()}".encode())
    testing.hold(kind, examples(40 * several), seed=seed)
