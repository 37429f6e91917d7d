"""A sample of the suite over transformers classes: `python tests/with_torch/transformers_suite.py` runs all of them."""

import pytest
from lazy import lazy_import
from transformers_classes import SAMPLE  # limited to the installed classes
from transformers_suite import SLACK, run

lazy_import("transformers")

#: Classes of a plain run: a training step, and Fourier transforms.
PLAIN = ("GPT2LMHeadModel", "FNetForMaskedLM")


@pytest.mark.filterwarnings("ignore")  # transformers warns about its own configs
@pytest.mark.parametrize("name", [n if n in PLAIN else pytest.param(n, marks=pytest.mark.long) for n in SAMPLE])
def test_traced_class_matches_its_run(name):
    row = run(name, SAMPLE[name])
    assert (row.problem, row.refused, row.parameters) == ("", "", True)
    assert row.found.keys() == set(SAMPLE[name])
    assert 10 * row.stated <= row.calls
    for peak, flops in row.found.values():
        assert flops == 0
        assert abs(peak) <= SLACK
