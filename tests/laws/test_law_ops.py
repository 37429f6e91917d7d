"""Every op kind of the registry is held to every law: a new one is, without a line here."""

import pytest
from budget import SHARES, examples, seed

from costgraph import testing
from costgraph.ops.registry import KINDS


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_op_kind_keeps_the_laws(kind, share):
    several = {"einsum": 4, "repeat": 3, "kernel": 3, "pointwise": 2, "rearrange": 2}.get(kind, 1)
    testing.hold(kind, examples(40 * several) // share, seed=seed())
