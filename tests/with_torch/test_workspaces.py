"""Kernel workspaces on a CPU: none for kernels with exact peaks, and a page with the others."""

import re
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from workspaces import case, elementwise, lookups, matmuls, norms, rand, reductions, workspaces

PAGE = Path(__file__).resolve().parents[2] / "docs" / "accuracy" / "workspaces.md"

#: fp32 kernels with a workspace of a few numbers, a Python scalar, or a row-wide buffer.
SMALL = {"mul": 12, "mean": 12, "native_layer_norm_backward": 2 * 4096 * 4}
#: Kernels with larger workspaces: listed on the page, and exempt from peak tolerances of a few KiB.
LARGE = (
    "add", "add_", "clone", "logsumexp", "native_batch_norm", "native_batch_norm_backward", "native_dropout",
    "native_group_norm_backward", "sort",
)  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


def test_logsumexp_workspace_by_hand():
    x = rand(16, 64)
    (measured,) = workspaces([case("logsumexp", "", x, [1])[2]])
    assert measured == 4 * 16 * 64 + 4 * 16  # all exponentials, and each row's maximum


def test_kernels_with_exact_peaks_have_no_workspace():
    families = (matmuls, norms, reductions, elementwise, lookups)
    cases = [c for family in families for c in family() if not re.match("bf16|fp16", c[1]) and c[0] not in LARGE]
    measured = workspaces(call for _, _, call in cases)
    some = {op: n for (op, _, _), n in zip(cases, measured, strict=True) if n > SMALL.get(op, 0)}
    assert len(cases) > 80
    assert some == {}


def test_page_lists_kernels_with_workspaces():
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| ([\d,]+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    fp32 = {op for op, condition, _ in rows if not re.match("bf16|fp16", condition)}
    assert set(LARGE) <= fp32
    assert all(int(n.replace(",", "")) > 0 for _, _, n in rows)
    assert "`_scaled_dot_product_flash_attention_for_cpu`" in PAGE.read_text(encoding="utf-8")
