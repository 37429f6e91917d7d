"""Device specifications: hostile TOML, and valid files with every line and value damaged."""

import random
from pathlib import Path

import pytest
from budget import examples
from guard import outcome, refused

import costgraph as cg

FOLDER = Path(cg.__file__).resolve().parent.parent / "hardware_specs"
if not FOLDER.is_dir():
    FOLDER = Path(cg.__file__).resolve().parent / "hardware_specs"
H100 = (FOLDER / "h100-sxm.toml").read_text(encoding="utf-8")

VALUES = [
    "0", "-1", "-0.0", "1.5", "1e400", "1e401", "1e-400", "1e-401", "1e999999999", "-1e999999999", "nan", "inf", "-inf",
    "9" * 5000, "0x" + "f" * 5000, "true", "false", '""', '"1"', "[]", "[1]", "{}", "{ value = 1 }", "1979-05-27",
    "07:32:00", "1979-05-27T07:32:00Z", '"""x"""', "'\\u0000'", '"\\u0000"', '"' + "x" * 10**5 + '"', "[[[[]]]]",
    "{ value = 1, unit = \"GB\", source = [\"x\"] }", "[" * 1000 + "]" * 1000, "[" * 10**5,
]  # fmt: skip

FILES = [
    b"", b"=", b"[", b"[[peak]]", b"[peak", b"a = 1\na = 2", b"\xff\xfe", b"\x00", "\ufeffname = 'x'".encode(),
    b"a." * 10**5 + b"b = 1", b"[" + b"a." * 10**5 + b"b]", b"a = " + b"[" * 10**5, b"a = " + b"{b = " * 10**5,
    b"a = " + b"9" * 10**6, b"a = '" + b"x" * 10**6, b"x" * 10**6 + b" = 1", b"# " * 10**6, b"name = 1979-05-27",
    b"[peak]\n" + b"\n".join(b"k%d = 1" % i for i in range(20_000)), b"a = 1e99999999999999999999", b"\r" * 1000,
    b"[peak.bf16]\nvalue = 1\nunit = 'FLOP/s'\nsource = ['A']\n[sources]\nA = 'x'\n", b"a = \"\\ud800\"",
]  # fmt: skip


def ask(path):
    """Load a specification and run every query of a report on it."""
    with cg.Graph("g", dtype="bf16") as g:
        g.output(cg.linear(g.input("x", (64, 64)), "b d -> b f", f=64))
    hardware = cg.load_hardware(path)
    for place, quantity in hardware.rows:
        assert quantity.value > 0, f"{place} = {quantity}"
        assert str(quantity)
    assert hardware.ridge(next(iter(hardware.peak)).partition("_")[0]) > 0
    times = cg.roofline(g, hardware, fallback="fp32")
    assert times.lower_bound > 0
    return hardware


def written(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    return path


@pytest.mark.parametrize("content", FILES, ids=range(len(FILES)))
def test_invalid_specifications_are_refused(tmp_path, content):
    error = refused(cg.load_hardware, written(tmp_path / "f.toml", content))
    assert isinstance(error, cg.SpecError)
    assert "f.toml" in str(error)


def test_every_number_replaced(tmp_path):
    """Replace one line of the file at a time, by every value."""
    lines = H100.split("\n")
    numbers = [i for i, line in enumerate(lines) if "value = " in line]
    assert len(numbers) > 10
    rng = random.Random(3)
    for i in numbers:
        before, _, rest = lines[i].partition("value = ")
        _, comma, after = rest.partition(",")
        for value in rng.sample(VALUES, min(len(VALUES), examples(3))):
            text = "\n".join([*lines[:i], f"{before}value = {value}{comma}{after}", *lines[i + 1 :]])
            outcome(ask, written(tmp_path / "f.toml", text), about=(i, value))


def test_every_line_deleted_repeated_or_replaced(tmp_path):
    lines = H100.split("\n")
    rng = random.Random(4)
    for i, line in enumerate(lines):
        key = line.partition("=")[0]
        for new in ([], [line, line], [f"{key}= {rng.choice(VALUES)}"], [f"{key.strip()}x ={line.partition('=')[2]}"]):
            text = "\n".join([*lines[:i], *new, *lines[i + 1 :]])
            outcome(ask, written(tmp_path / "f.toml", text), about=(i, new))


def test_texts_cut_and_altered(tmp_path):
    rng = random.Random(5)
    raw = H100.encode()
    for _ in range(examples(150)):
        i, n = rng.randrange(len(raw)), rng.choice([0, 1, 2, 40])
        new = rng.choice([b"", b"0", b"-", b"[", b"]", b'"', b"\xff", b"\x00", b"e9", b"=", b"\n", b"nan", b"."])
        outcome(ask, written(tmp_path / "f.toml", raw[:i] + new + raw[i + n :]), about=(i, n, new))


def test_specification_paths_without_file_are_refused(tmp_path):
    for path in (tmp_path, tmp_path / "none.toml", "a\0b.toml", "\ud800.toml", "x" * 10**6 + ".toml", "/" * 5000, ""):
        refused(cg.load_hardware, path)
        refused(cg.load, path)
