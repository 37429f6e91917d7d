"""Every op kind of the registry is held to every law: a new one is, without a line here.

Of a kind without a meaning another test asks for the reason, `test_every_kind`.
"""

import pytest
from budget import examples, is_plain, seed

from costgraph import testing
from costgraph.ops.registry import KINDS

DRAWN = sorted(
    name for name, kind in KINDS.items() if not {"reference_semantics", "strategy"} & {*testing.missing(kind)}
)


@pytest.mark.parametrize("kind", DRAWN)
def test_every_op_kind_keeps_the_laws(kind):
    several = {"einsum": 4, "repeat": 3, "kernel": 3, "pointwise": 2, "rearrange": 2}.get(kind, 1)
    testing.check_op(kind, examples(40 if is_plain() else 40 * several), seed=seed())
