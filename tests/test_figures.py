"""The figures script guards refactorings: it records models' figures and detects one changed digit."""

import pytest
from figures import canonical, main, read
from figures_text import numbers
from shared import load

import costgraph as cg

MODELS = ["mlp", "gpt2"]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("figures") / "before.txt"
    assert main([str(path), *MODELS]) == 0
    return path


def test_figures_match_library_answers(written):
    figures = read(written)
    assert {key.partition("\t")[0] for key in figures} == set(MODELS)
    assert figures["mlp\tforward params"] == "C + C*F + D*F + F + F**2*L + F*L"
    assert figures["gpt2\tforward params small"] == str(cg.param_count(load("gpt2")))
    assert figures["gpt2\tdecode cache bytes"] == "4*B*D*L*S"
    assert figures["mlp\tdecode"] == "GraphError"
    assert not [value for value in figures.values() if value.startswith("too slow")]


def test_files_are_sorted_and_reproducible(written, tmp_path, capsys):
    assert main([str(tmp_path / "again.txt"), *reversed(MODELS)]) == 0
    text = written.read_text(encoding="utf-8")
    assert (tmp_path / "again.txt").read_text(encoding="utf-8") == text
    assert text.splitlines() == sorted(text.splitlines())
    assert main(["--diff", str(written), str(tmp_path / "again.txt")]) == 0
    assert capsys.readouterr().out == "0 lines differ\n"


def test_one_changed_digit_is_detected(written, tmp_path, capsys):
    text = written.read_text(encoding="utf-8")
    changed = text.replace("gpt2\tdecode cache bytes\t4*B*D*L*S\n", "gpt2\tdecode cache bytes\t5*B*D*L*S\n")
    (tmp_path / "after.txt").write_text(changed, encoding="utf-8")
    assert main(["--diff", str(written), str(tmp_path / "after.txt")]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "- gpt2\tdecode cache bytes\t4*B*D*L*S",
        "+ gpt2\tdecode cache bytes\t5*B*D*L*S",
        "2 lines differ",
    ]


def test_missing_figure_is_detected(written, tmp_path, capsys):
    lines = written.read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "after.txt").write_text("".join(lines[1:]), encoding="utf-8")
    assert main(["--diff", str(written), str(tmp_path / "after.txt")]) == 1
    assert capsys.readouterr().out.splitlines()[0] == f"- {lines[0].rstrip()}"


def test_operand_order_does_not_change_figures():
    B, D, F = cg.dims("B D F")
    assert canonical(cg.Max(B * D, F**2 + 3)) == canonical(cg.Max(3 + F**2, D * B)) == "Max(3 + F**2, B*D)"
    assert canonical(D * (B + F) / 2) == "(1/2)*(B + F)*D"


@pytest.mark.parametrize("words", [[], ["out.txt", "no-such-model"]])
def test_missing_or_unknown_arguments_are_reported(words, capsys):
    with pytest.raises(SystemExit):
        main(words)
    assert "expected a file" in (said := capsys.readouterr().err) or "no model of the zoo" in said


def test_subset_records_numbers_and_signatures(tmp_path):
    pytest.importorskip("torch")
    path = tmp_path / "net.txt"
    assert main([str(path), "hardware", "signature", "--subset", "net"]) == 0
    figures = read(path)
    assert {key.partition("\t")[0] for key in figures} == {"hardware", "signature"}
    assert figures["hardware\tformat bf16"] == "16"
    assert figures["signature\tevery"] == "(k, *, inside=None, early_stop=True)"
    assert figures["signature\tGraph.input"] == "(self, name, shape, dtype=None, *, grad=False)"
    assert not [
        value for value in figures.values() if value == "missing" or value.startswith("unexpected") or " at 0x" in value
    ]


def test_numbers_are_independent_of_names_and_order():
    B, D = cg.dims("B D")
    assert numbers({"peak": B * D, "rows": [2.0, (1, "text")]}) == numbers([1, {"bytes": 2.0}, D * B]) == "1 | 2 | B*D"
