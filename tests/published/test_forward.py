"""Published numbers, each derived from a declared graph or its step at the digits that its source prints.

`forward.json` has the numbers with their sources, and those that need more than there is, with what will answer them.
"""

import runpy
from pathlib import Path

import derive_activations  # noqa: F401  # they register what answers each row
import derive_devices  # noqa: F401
import derive_experts  # noqa: F401
import derive_ops  # noqa: F401
import derive_sharding  # noqa: F401
import derive_training  # noqa: F401
import derive_transformers  # noqa: F401
import derive_vision  # noqa: F401
import pytest
import sympy
from each import each
from published_rows import DERIVED, FILE, LATER, ROWS, rounded


def numbers(kind):
    found = {"disagrees": [], "formula": [], "number": []}
    for row in ROWS.values():
        found[next((k for k in found if k in row), "number")].append(row)
    return pytest.mark.parametrize("row", found[kind], ids=lambda r: r["id"])


@numbers("number")
def test_number(row):
    derived = rounded(DERIVED[row["id"]](row), row)
    printed = rounded(str(row["expected"]), row) if "coarser" in row else rounded(str(row["expected"]), {})
    assert derived == printed


@numbers("formula")
def test_formula(row):
    derived, expected = DERIVED[row["id"]](row)
    assert sympy.simplify(derived - expected) == 0


@numbers("disagrees")
def test_where_a_source_rounds_or_errs_the_number_is_another_one(row):
    assert row["disagrees"]
    if "formula" in row:
        derived, expected = DERIVED[row["id"]](row)
        assert sympy.simplify(derived - expected) != 0
    else:
        assert rounded(DERIVED[row["id"]](row), row) != rounded(str(row["expected"]), row)


@each("row", [r for i, r in ROWS.items() if i.startswith("h200-")], ids=lambda r: r["id"])
def test_no_measured_rate_is_above_that_of_the_bound(row):
    assert 0.75 < row["expected"] / DERIVED[row["id"]](row) < 1


def test_every_row_is_derived_or_left_for_a_reason():
    assert DERIVED.keys() == ROWS.keys()
    assert not ROWS.keys() & LATER.keys()
    assert len(LATER) == sum(map(len, FILE["later"].values()))
    assert len(ROWS) + len(LATER) == 232
    for who, row in LATER.values():
        assert who == "not a question of this library"
        assert row["why"]


@pytest.mark.long
def test_the_page_is_what_the_script_makes_of_the_rows():
    script = runpy.run_path(str(Path(__file__).with_name("table.py")))
    page = script["page"]()
    assert script["PAGE"].read_text() == page
    assert all(f"| {script['cell'](i)} |" in page for i in (*ROWS, *LATER))
