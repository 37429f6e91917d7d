"""The table of all models against the public modules: the page is current, and modules are traced again."""

import os

import pytest
from zoo_page import PAGE, counted, declared, page, references
from zoo_reference import traced

from costgraph.models import names
from costgraph.models.registry import FAMILIES

KEPT = counted()["models"]
# the long tests trace each family's smallest model again, or all models if this is set
EVERY = "COSTGRAPH_ZOO" in os.environ
SMALLEST = [
    min((n for n in family.presets if n in KEPT), key=lambda n: KEPT[n]["matmul"])
    for family in FAMILIES
    if any(n in KEPT for n in family.presets)
]


def test_zoo_page_matches_recorded_counts():
    """The next test compares the recorded counts with the declarations."""
    expected_page = page(lambda name, row: (row["parameters"], row["matmul"]))
    assert PAGE.read_text(encoding="utf-8") == expected_page, "run: python tests/with_torch/zoo_page.py NAME"


@pytest.mark.parametrize("name", names())
def test_declaration_counts_equal_the_recorded_module(name):
    if name in KEPT:
        assert declared(name, KEPT[name]) == (KEPT[name]["parameters"], KEPT[name]["matmul"])
    else:
        assert name not in references()


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(KEPT) if EVERY else SMALLEST)
def test_module_counts_equal_the_record(name):
    reference = references()[name]()
    assert traced(reference) == (KEPT[name]["parameters"], KEPT[name]["matmul"])
    assert reference.sizes == KEPT[name]["sizes"]
