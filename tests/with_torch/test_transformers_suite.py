"""A sample of the suite over classes of transformers: `python tests/with_torch/transformers_suite.py` runs them all."""

import pytest

pytest.importorskip("transformers")

from transformers_classes import SAMPLE  # of what is there
from transformers_suite import SLACK, run

#: Of the plain run: a step, and spectra.
PLAIN = ("GPT2LMHeadModel", "FNetForMaskedLM")


@pytest.mark.filterwarnings("ignore")  # of transformers, about its own configurations
@pytest.mark.parametrize("name", [n if n in PLAIN else pytest.param(n, marks=pytest.mark.long) for n in SAMPLE])
def test_a_class_is_traced_as_it_runs(name):
    row = run(name, SAMPLE[name])
    assert (row.problem, row.refused, row.parameters) == ("", "", True)
    assert row.found.keys() == set(SAMPLE[name])
    assert 10 * row.stated <= row.calls
    for peak, flops in row.found.values():
        assert flops == 0
        assert abs(peak) <= SLACK
