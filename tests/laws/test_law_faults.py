"""The laws notice: three deliberate faults or more for each family of rules are each caught by one of them."""

from collections import Counter
from pathlib import Path

import pytest
from faults import FAULTS, broken
from hypothesis import HealthCheck, Phase, given, settings

from costgraph import testing
from costgraph.errors import CostGraphError


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.family}-{f.what}".replace(" ", "_"))
def test_a_law_notices(fault):
    assert caught(fault), f"no law noticed: {fault.what}"


def drawn_around(kind):
    if kind == "training":
        return testing.losses(most=3, kinds=("repeat", "repeat", "einsum", "pointwise"))
    return testing.ops(kind)


def caught(fault):
    """Return the name of the law that a fault broke, or the error that it led to."""
    for kind in fault.kinds:
        holds = testing.check_training if kind == "training" else testing.check

        @settings(
            max_examples=1500,
            phases=[Phase.generate],  # which graph shows it does not matter here
            report_multiple_bugs=False,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=drawn_around(kind))
        def drawn(case):
            holds(case.graph, **case.point)  # noqa: B023  # it runs in this turn

        try:
            with broken(fault):
                drawn()
        except AssertionError as error:
            return str(error).split("'")[1]
        except CostGraphError as error:
            return type(error).__name__
    return None


def test_the_page_lists_them_all():
    page = Path(__file__).parents[2] / "docs" / "laws.md"
    rows = [line.strip("|").split(" | ") for line in page.read_text().splitlines() if line.startswith("| ")]
    listed = [(row[0].strip(), row[1]) for row in rows if len(row) == 3]
    assert listed[1:] == [(f.family, f.what) for f in FAULTS]


def test_every_family_has_three_faults():
    assert min(Counter(f.family for f in FAULTS).values()) >= 3
