"""Every registered op kind keeps every law; new kinds need no line here.

`test_every_kind` asks for the reason if a kind has no semantics.
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
