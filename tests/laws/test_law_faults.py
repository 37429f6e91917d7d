"""The laws detect faults: a law catches each of the deliberate faults, three or more per rule family."""

from collections import Counter
from pathlib import Path

import pytest
from faults import FAULTS, broken
from hypothesis import HealthCheck, Phase, given, settings

from costgraph import testing
from costgraph.errors import CostGraphError
from costgraph.ops.registry import KINDS


def table():
    """Return the rows of the page: family, fault, and the law that detects it."""
    page = Path(__file__).parents[2] / "docs" / "accuracy" / "laws.md"
    rows = [line.strip("|").split(" | ") for line in page.read_text().splitlines() if line.startswith("| ")]
    return [(row[0].strip(), row[1], row[2].strip()) for row in rows if len(row) == 3][1:]


NOTICED_BY = {(family, what): law.replace(" ", "_") for family, what, law in table()}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.family}-{f.what}".replace(" ", "_"))
def test_a_law_detects_the_fault(fault):
    law = NOTICED_BY[fault.family, fault.what]
    assert caught(fault, [law]), f"law {law!r} did not notice: {fault.what}"


NESTED = {"most": 3, "kinds": ("repeat", "repeat", "einsum", "pointwise")}
#: The strategies for faults that name no op kind.
DRAWN = {"training": testing.losses(**NESTED), "nested": testing.graphs(**NESTED)}


def drawn_around(kind):
    return DRAWN[kind] if kind in DRAWN else testing.ops(kind)


def caught(fault, laws):
    """Return whether a fault breaks one of the laws or raises; only these laws run, as most others take longer."""
    for kind in fault.kinds:
        holds = testing.check_training if kind == "training" else testing.check

        @settings(
            max_examples=4000,
            phases=[Phase.generate],  # any failing graph will do
            report_multiple_bugs=False,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=drawn_around(kind))
        def drawn(case):
            holds(case.graph, laws, **case.point)  # noqa: B023  # it runs in this iteration

        try:
            with broken(fault):
                drawn()
        except (AssertionError, CostGraphError):
            return True
    return False


def test_faulty_attributes_exist():
    owners = [(KINDS[owner] if isinstance(owner, str) else owner, name) for owner, name in (f.where for f in FAULTS)]
    assert [f"{owner.__name__}.{name}" for owner, name in owners if not hasattr(owner, name)] == []


def test_page_lists_all_faults():
    assert [row[:2] for row in table()] == [(f.family, f.what) for f in FAULTS]


def test_every_rule_family_has_three_faults():
    assert min(Counter(f.family for f in FAULTS).values()) >= 3
