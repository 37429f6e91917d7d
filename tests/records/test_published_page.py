"""The page of published measurements matches current predictions, checked on the families that are fast to predict."""

import published_page

from costgraph.report.records.predictions import Held, predict
from costgraph.report.records.record import column, last_digits

TEXT = published_page.PAGE.read_text(encoding="utf-8")
QUICK = ("squares", "squares-best", "mamf", "azure-gemm", "fp8-gemm", "bandwidth", "attention", "allreduce", "serving")


def test_published_page_table_is_current(measured):
    last = last_digits(measured)
    rows = tuple(predict(r, last[column(r)]) for r in measured if r.family in QUICK)
    lines = [*published_page.table(Held("gpus.json", rows))]
    assert len(lines) > 20
    assert [line for line in lines if line not in TEXT] == []


def test_published_page_states_limits_and_all_families(measured):
    assert published_page.HEAD.format(count=len(measured)) in TEXT
    assert "- holds: no time is below its lower bound: 0 of " in TEXT
    assert [f for f in {r.family for r in measured} if f"| {f} |" not in TEXT] == []
