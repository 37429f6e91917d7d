"""The validation suite: its runs, the evaluation of measured times, and the record file."""

import json
import math
import re
from dataclasses import replace

import pytest

pytest.importorskip("torch.utils.flop_counter")

import torch
from outside_cache import shortly
from validation_causes import CAUSES, causes

import costgraph as cg
from costgraph.cli import app as cli
from costgraph.errors import FormatError, GraphError, SpecError, UnsupportedError
from costgraph.torch.validation import (
    FOLLOWS,
    OUTCOMES,
    SCHEMA,
    SUBJECTS,
    Attained,
    Validation,
    agrees,
    check,
    declared,
    outcome,
    predicted,
    suite,
    traced,
    validate,
)
from costgraph.torch.validation_programs import Case

META = torch.device("meta")
MATMUL = Case("matmul", {"M": 17, "K": 29, "N": 31})
SMALL = {
    "gpt": {"B": 2, "S": 13, "D": 24, "H": 3, "F": 59, "L": 2, "V": 97, "P": 17},
    "perceptron": {"B": 11, "D": 7, "F": 29, "L": 3, "C": 5},
}


def small(subject, **settings):
    settings = {"mode": "step", "optimizer": "AdamW", "implementation": "foreach"} | settings
    return Case(subject, SMALL[subject], **settings)


def error_of(kind, call, *args, **options):
    with pytest.raises(kind) as error:
        call(*args, **options)
    return str(error.value)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def found(one_thread):
    cases = [
        MATMUL,
        Case("softmax", {"R": 31, "C": 17}),
        Case("attention flash", {"B": 2, "H": 3, "S": 19, "K": 8}),
        small("perceptron"),
        small("perceptron", mode="forward", optimizer="", implementation=""),
        small("perceptron", optimizer="Lion", implementation="for-loop", program="lowered"),
    ]
    return validate("cpu", cases, hardware="h100-sxm", quick=True, progress=False, command="a test")


# -- the suite -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_suite_covers_all_subjects_and_optimizers(device):
    cases = suite(device)
    assert len(cases) >= 40
    assert len({c.name for c in cases}) == len(cases)
    assert {c.subject for c in cases} == SUBJECTS.keys()
    assert {c.mode for c in cases} == {"kernel", "forward", "step"}
    every = {(name, i) for name in ("SGD", "Adam", "AdamW", "AdaGrad", "RMSProp", "Adafactor", "Lion", "Muon")
             for i in getattr(cg, name)().available}  # fmt: skip
    missing = every - {(c.optimizer, c.implementation) for c in cases}
    assert missing == (set() if device == "cpu" else {("AdaGrad", "fused")})
    assert {"", "fp32", "bf16", "bf16-master", "bf16-mixed", "fp16-mixed", "megatron-bf16", "fp8"} <= {
        c.precision for c in cases
    }
    assert {"", "every-block", "every-2", "selective", "from-start"} == {c.checkpoint for c in cases}
    products = [c for c in cases if c.subject == "matmul"]
    assert {"fp32", "bf16", "fp64"} <= {c.dtype for c in products}
    # on both sides of the target device's ridge point
    limits = {cg.roofline(declared(c, device), "h100-sxm", **c.sizes).bound for c in products}
    assert limits == {"memory", "compute"}
    assert set(suite(device, quick=True)) < set(cases)


STEPS = [pytest.param(case, id=case.name) for case in suite("cuda") if case.mode == "step"]
OTHERS = [pytest.param(case, id=case.name) for case in suite("cuda") if case.mode != "step"]


@pytest.mark.parametrize("case", [*OTHERS, *STEPS])
def test_gpu_programs_hold_the_declared_bytes(case):
    """On the meta device: parameters, buffers and inputs have the declared bytes."""
    if "L" in case.sizes:  # layers are alike
        case = replace(case, sizes={**case.sizes, "L": 2})
    program, graph = SUBJECTS[case.subject].program(case, META), declared(case, "cuda")
    lives = [life for life in cg.lifetimes(graph, **case.sizes) if life.born is None]
    if case.program == "module":  # its optimizer has no state yet
        lives = [life for life in lives if life.role != "state"]
    there = [*program.module.parameters(), *program.module.buffers(), *program.inputs]
    assert sum(t.numel() * t.element_size() for t in there) == sum(life.bytes for life in lives)


@pytest.mark.parametrize("name", ["matmul bf16 M=128", "embedding", "gpt block", "gpt step fp32 flash AdamW foreach B"])
def test_gpu_size_traces_match_declarations(name):
    case = next(c for c in suite("cuda") if c.name.startswith(name))
    if "L" in case.sizes:  # layers are alike
        case = replace(case, sizes={**case.sizes, "L": 2})
    program = SUBJECTS[case.subject].program(case, META)
    by_declaration, by_trace = predicted(declared(case, "cuda"), case.sizes, "cuda"), traced(case, program, "cuda")
    assert by_trace.flops == by_declaration.flops
    assert by_declaration.uncounted == by_trace.uncounted == 0
    share = 0.1 if "variables" in causes(case, "cuda") else 0.001
    assert 0 <= by_trace.peak - by_declaration.peak <= share * by_trace.peak


def test_case_names_state_all_options():
    case = small("gpt", attention="eager", precision="bf16-mixed", checkpoint="every-block")
    assert case.name == "gpt step fp32 eager AdamW foreach bf16-mixed every-block " + " ".join(
        f"{k}={v}" for k, v in SMALL["gpt"].items()
    )
    assert replace(case, program="lowered").name.split()[7:9] == ["every-block", "lowered"]


@pytest.mark.parametrize(("checkpoint", "forward"), [(None, 1), (cg.every_block(), 2)])
def test_uncounted_flops_are_those_of_attention_kernels(checkpoint, forward):
    """Two matmuls per attention forward, as often as it runs, and five in backward; other kernels are counted."""
    B, S = cg.dims("B S")
    with cg.Graph("g") as g:
        x = g.input("x", (B, S, 6))

        def block(x):
            q = cg.rearrange(cg.linear(x, "b s d -> b s e", e=6), "b s (h k) -> b h s k", k=2)
            x = cg.rearrange(cg.attention(q, q, q), "b h s k -> b s (h k)")
            with cg.kernel("mlp"):
                return cg.linear(cg.relu(cg.linear(x, "b s d -> b s f", f=10)), "b s f -> b s d", d=6)

        g.output(cg.reduce(cg.repeat(3, block, x, name="blocks"), "b s d -> ", "sum"))
    step = cg.training_step(g, optimizer=cg.SGD(), checkpoint=checkpoint)
    sizes = {"B": 5, "S": 7}
    assert predicted(step, sizes, "cpu").uncounted == 3 * (2 * forward + 5) * 2 * 5 * 7 * 7 * 6
    assert predicted(step, sizes, "cuda").uncounted == 0


# -- what is measured ----------------------------------------------------------------------------------------------


def test_matmul_case_by_hand(found):
    row = found.rows[0]
    assert row.measured.flops == row.declared.flops == row.traced.flops == 2 * 17 * 29 * 31
    # the operands exist before, the result lives afterwards
    assert (row.measured.held, row.measured.above) == (4 * (17 * 29 + 29 * 31), 4 * 17 * 31)
    assert row.measured.left == 4 * 17 * 31
    assert row.off("declared") == row.off("traced") == 0
    assert row.counted("declared") is row.counted("traced") is True
    assert row.modelled.fused == row.modelled.moved == 4 * (17 * 29 + 29 * 31 + 17 * 31)
    assert row.modelled.bound == pytest.approx(max(row.modelled.fused / 3.35e12, row.declared.flops / 66.9e12), 0.01)


def test_uncounted_attention_flops_are_reported(found):
    row = found.rows[2]
    flops = 4 * 2 * 3 * 19 * 19 * 8  # 2 each for the scores and the weighted values
    assert row.measured.flops == 0
    assert row.declared.flops == row.declared.uncounted == row.traced.flops == row.traced.uncounted == flops
    assert row.counted("declared")
    assert causes(row.case, "cpu", "traced") == ["workspace"]


def test_step_baseline_includes_optimizer_state(found):
    row = found.rows[3]
    B, D, F, L, C = SMALL["perceptron"].values()
    params = D * F + F + L * (F * F + F) + F * C + C
    tensors = 2 * (L + 2)
    # weights and two moments in fp32, a 4-byte counter per tensor, features and classes
    assert row.measured.held == 12 * params + 4 * tensors + 4 * B * D + 8 * B
    assert row.measured.left == 0
    # forward, weight gradients, and activation gradients except for the input features
    assert row.measured.flops == 3 * 2 * B * (D * F + L * F * F + F * C) - 2 * B * D * F
    assert abs(row.off("traced")) <= 64
    assert abs(row.off("declared") + 4 * tensors) <= 64


def test_lowered_graph_has_no_trace(found):
    row = found.rows[5]
    assert (row.traced, row.off("traced"), row.counted("traced")) == (None, None, None)
    assert row.untraced == "the lowered graph ran"
    assert row.off("declared") == 0


def test_untraceable_module_states_the_reason(monkeypatch):
    def refuses(*args, **options):
        raise UnsupportedError("the shape of its result depends on data")

    monkeypatch.setattr("costgraph.torch.validation.trace", refuses)
    (row,) = validate("cpu", [small("perceptron")], hardware="h100-sxm", quick=True, progress=False).rows
    assert row.traced is None
    assert "depends on data" in row.untraced


def test_failed_cases_are_reported(tmp_path):
    huge = Case("add", {"R": 2**40, "C": 2**20})
    validation = validate("cpu", [huge, MATMUL], hardware="h100-sxm", quick=True, progress=False)
    assert [row.case for row in validation.rows] == [MATMUL]
    assert [row.case for row in validation.failed] == [huge]
    validation.save(tmp_path / "record.json")
    assert Validation.load(tmp_path / "record.json").failed == validation.failed
    assert f"- Could not run: {huge.name}: " in validation.table()
    nothing = replace(validation, rows=())
    assert nothing.summary() == [f"Could not run: {huge.name}: {validation.failed[0].error}"]
    assert all(rows == [] for _, rows in nothing.tables())


def test_time_bounds_use_attained_rates():
    hardware = cg.load_hardware("h100-sxm")
    graph = declared(MATMUL, "cpu")
    times = Attained.of(graph, hardware, {}, MATMUL.sizes)
    assert times.memory == pytest.approx(4 * (17 * 29 + 29 * 31 + 17 * 31) / 3.35e12)
    assert times.compute == pytest.approx(2 * 17 * 29 * 31 / float(hardware.rate("fp32").value))


@pytest.mark.parametrize(
    ("seconds", "memory", "compute", "expected"),
    [
        (1.0, 1.0, 0.1, "memory"), (1.9, 1.0, 0.1, "memory"), (0.6, 1.0, 0.1, "memory"),
        (1.0, 0.1, 1.0, "compute"), (1.9, 0.1, 1.0, "compute"),
        (1.0, 0.9, 1.1, "both"), (FOLLOWS, 1.0, 1.5, "both"),
        (2.1, 1.0, 0.1, "overhead"), (5.0, 1.0, 1.0, "overhead"), (1.0, 0.0, 0.0, "overhead"),
        (0.4, 1.0, 0.1, "faster"), (0.4, 1.0, 0.9, "faster"), (0.1, 1.0, 0.1, "compute"),
    ],
)  # fmt: skip
def test_outcome_of_measured_times(seconds, memory, compute, expected):
    assert outcome(seconds, memory, compute) == expected
    assert expected in OUTCOMES


def test_agreement_with_the_roofline():
    assert [agrees("memory", o) for o in OUTCOMES] == [True, False, True, None, None]
    assert [agrees("compute", o) for o in OUTCOMES] == [False, True, True, None, None]


def test_every_cause_is_explained_and_used():
    used = {name for device in ("cpu", "cuda") for case in suite(device) for name in causes(case, device)}
    assert used == CAUSES.keys()


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cases", "text"),
    [
        ([], "validate: no cases, expected one at least"),
        (["matmul"], "validate: case 'matmul', expected a costgraph.torch.validation.Case"),
        ([Case("product", {"M": 3})], "validate: subject 'product', expected one of matmul, .*"),
        ([replace(MATMUL, mode="step")], "validate: matmul: mode 'step', expected one of kernel"),
        ([replace(MATMUL, dtype="fp7")], "validate: matmul: dtype 'fp7', expected one of fp64, .*"),
        ([replace(MATMUL, checkpoint="every-2")], "validate: matmul: checkpoint 'every-2', expected one of "),
        ([small("perceptron", optimizer="Adm")], "validate: perceptron: optimizer 'Adm', expected one of SGD, .*"),
        ([small("perceptron", optimizer="Muon")], "validate: perceptron: torch has no Muon for it, expected .*"),
        ([small("perceptron", attention="eager")], "validate: perceptron: attention 'eager', expected one of "),
        ([small("gpt")], "validate: gpt: attention '', expected one of eager, flash"),
        ([Case("matmul", {"M": 3, "K": 5})], "validate: matmul: no size N, expected M, K, N"),
        ([Case("matmul", {**MATMUL.sizes, "X": 5})], "validate: matmul: size 'X', expected M, K, N"),
        ([Case("matmul", {**MATMUL.sizes, "K": 0})], "validate: matmul: K=0, expected a positive integer"),
        ([Case("matmul", {**MATMUL.sizes, "K": True})], "validate: matmul: K=True, expected a positive integer"),
        ([Case("embedding", {"V": 3, "C": 2})], "validate: embedding: no size R, expected R, V, C"),
    ],
)
def test_invalid_suites_are_refused(cases, text):
    assert re.fullmatch(text, error_of(cg.CostGraphError, check, cases))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_device_suites_are_valid(device):
    check(suite(device))


def test_unknown_policies_of_a_module_are_refused():
    case = small("gpt", attention="eager", checkpoint="from-start")
    text = error_of(GraphError, SUBJECTS["gpt"].program, case, torch.device("cpu"))
    assert text.startswith("validate: gpt: checkpoint 'from-start', expected one of ")
    case = small("gpt", attention="eager", precision="fp8")
    text = error_of(GraphError, SUBJECTS["gpt"].program, case, torch.device("cpu"))
    assert text.startswith("validate: gpt: precision 'fp8', expected one of ")


def test_missing_devices_are_refused():
    assert "expected cpu or cuda" in error_of(UnsupportedError, validate, "meta", [MATMUL])
    assert "expected one of them" in error_of(UnsupportedError, validate, "cuda:99", [MATMUL])


# -- the record ----------------------------------------------------------------------------------------------------


def test_validation_record_survives_save_and_load(found, tmp_path):
    found.save(tmp_path / "record.json")
    again = Validation.load(tmp_path / "record.json")
    assert again.rows == found.rows
    assert again.environment == found.environment
    assert again.cache == found.cache
    assert again.table() == found.table()
    assert again.hardware.rate("bf16") == found.hardware.rate("bf16")
    assert again.hardware.bandwidth == found.hardware.bandwidth
    data = json.loads((tmp_path / "record.json").read_text())
    assert data["schema"] == SCHEMA == "costgraph/validation/1"
    assert data["environment"]["command"] == "a test"


def broken(change):
    def apply(data):
        change(data)
        return json.dumps(data)

    return apply


def at(data, *keys):
    for key in keys:
        data = data[key]
    return data


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda d: "[]", r"\[\], expected a record with schema, environment, hardware, rows, failed"),
        (lambda d: "{", "expected JSON"),
        (lambda d: '{"schema": NaN}', "NaN, which is no number of JSON, expected JSON"),
        (broken(lambda d: d.update(schema="costgraph/validation/2")), "schema 'costgraph/validation/2', expected 'cos"),
        (broken(lambda d: d.update(extra=1)), "key 'extra' is unknown, expected schema"),
        (broken(lambda d: d.pop("rows")), "no 'rows', expected schema"),
        (broken(lambda d: d.update(rows={})), r"rows \{\}, expected a list"),
        (
            broken(lambda d: d.update(failed=[{"case": d["rows"][0]["case"]}])),
            r"failed\[0\]: no 'error', expected case, error",
        ),
        (broken(lambda d: d["environment"].pop("torch")), "environment: no 'torch', expected device"),
        (
            broken(lambda d: d["environment"].update(device="tpu")),
            "environment: device 'tpu', expected one of cpu, cuda",
        ),
        (broken(lambda d: d["hardware"].update(specification="../x.toml")), "expected the file beside the record"),
        (broken(lambda d: d["hardware"].update(cache_bytes=-1)), "cache_bytes -1, expected an integer of at least"),
        (broken(lambda d: d["rows"][0].update(note="")), r"rows\[0\]: key 'note' is unknown"),
        (broken(lambda d: d["rows"][1].pop("outcome")), r"rows\[1\]: no 'outcome'"),
        (broken(lambda d: d["rows"][0].update(outcome="fast")), r"rows\[0\]: outcome 'fast', expected one of memory,"),
        (
            broken(lambda d: d["rows"][0]["case"].update(mode="train")),
            r"rows\[0\]: case: mode 'train', expected one of",
        ),
        (
            broken(lambda d: d["rows"][0]["case"].update(sizes={})),
            r"rows\[0\]: case: sizes \{\}, expected sizes by name",
        ),
        (broken(lambda d: d["rows"][0]["case"]["sizes"].update(M=0)), "case: sizes: M 0, expected an integer of"),
        (broken(lambda d: d["rows"][0]["case"]["sizes"].update(M=True)), "case: sizes: M True, expected an integer"),
        (broken(lambda d: d["rows"][0]["measured"].update(flops=1.5)), "measured: flops 1.5, expected an integer"),
        (broken(lambda d: d["rows"][0]["declared"].pop("peak")), r"rows\[0\]: declared: no 'peak'"),
        (broken(lambda d: d["rows"][0]["seconds"].update(min="1 s")), "seconds: min '1 s', expected a number of"),
        (broken(lambda d: d["rows"][0]["seconds"].update(min=9e9)), r"rows\[0\]: seconds .*, expected them in order"),
        (broken(lambda d: d["rows"][0]["modelled"].update(bound=math.inf)), "Infinity, which is no number of JSON"),
    ],
)
def test_damaged_records_are_refused(found, tmp_path, damage, text):
    path = tmp_path / "record.json"
    found.save(path)
    path.write_text(damage(json.loads(path.read_text())))
    message = error_of(FormatError, Validation.load, path)
    assert re.search(text, message), message
    assert message.startswith(repr(str(path)))


def test_invalid_record_files_are_refused(found, tmp_path):
    assert "expected a record of a validation" in error_of(FormatError, Validation.load, tmp_path / "none.json")
    assert "expected a path that ends in .json" in error_of(FormatError, found.save, "record.toml")
    assert "no such folder" in error_of(FormatError, found.save, tmp_path / "nowhere" / "record.json")
    found.save(tmp_path / "record.json")
    (tmp_path / "record.toml").unlink()
    assert "No such file" in error_of(SpecError, Validation.load, tmp_path / "record.json")
    (tmp_path / "record.json").write_bytes(b"\xff")
    assert "byte 0 is no UTF-8, expected a record of a validation" in error_of(
        FormatError, Validation.load, tmp_path / "record.json"
    )


# -- what is shown -------------------------------------------------------------------------------------------------


def test_the_tables(found):
    (head, rows), (_, times) = found.tables()
    assert head == ["case", "matmul FLOPs", "peak", "declared", "traced"]
    assert rows[0] == [MATMUL.name, "30.57 kFLOP", "7.676 kB", "equal", "equal"]
    assert rows[2][1] == "69.31 kFLOP (*)"  # 4 * 2 * 3 * 19**2 * 8
    assert len(rows) == len(times) == len(found.rows)
    text = found.table()
    assert "- Matmul FLOPs, declared: 6 of 6 cases equal torch's counter, but for attention in 1 of them" in text
    assert "- Matmul FLOPs, traced: 5 of 5 cases equal" in text
    assert "| matmul fp32 M=17 K=29 N=31 |" in text


def test_wrong_flops_are_shown(found):
    row = found.rows[0]
    wrong = replace(row, declared=replace(row.declared, flops=5))
    (_, rows), _ = replace(found, rows=(wrong,)).tables()
    assert rows[0][1] == "5 FLOP (!)"
    table = replace(found, rows=(wrong,)).table()
    assert "declared: 0 of 1 cases equal torch's counter; (!) marks the others." in table


def test_pictures(found, tmp_path):
    pytest.importorskip("matplotlib")
    drawn = found.plot(tmp_path / "new" / "pictures")
    assert [p.name for p in drawn] == ["peaks.png", "roof.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in drawn)
    (tmp_path / "file").write_text("")
    assert "expected a writable directory" in error_of(FormatError, found.plot, tmp_path / "file")
    assert error_of(FormatError, found.plot, None) == "plot: directory None, expected a path"


# -- the command ---------------------------------------------------------------------------------------------------


def run(capsys, *words):
    code = cli.main(list(words))
    done = capsys.readouterr()
    return code, done.out, done.err


def test_the_command_end_to_end(capsys, tmp_path, monkeypatch):
    shortly(monkeypatch)
    for needed in ("typer", "rich", "matplotlib"):
        pytest.importorskip(needed)
    record, pictures = tmp_path / "record.json", tmp_path / "pictures"
    # names with "soft" in them: one cheap case
    words = ["validate", "--quick", "--only", "soft", "--threads", "1", "--out", str(record), "--plots", str(pictures)]
    code, out, err = run(capsys, *words)
    assert code == 0, err
    validation = Validation.load(record)
    assert [row.case.subject for row in validation.rows] == ["softmax"]
    assert validation.environment["threads"] == 1
    # each case on one line with its figures, in both tables
    assert len(re.findall(r"softmax fp32 R=61 C=1024 .*equal", out)) == 1
    assert len(re.findall(r"softmax fp32 R=61 C=1024 .* us ", out)) == 1
    assert "Classification: " in out
    assert max(len(line) for line in out.split("\n") if "/" not in line) <= 80
    assert sorted(p.name for p in pictures.iterdir()) == ["peaks.png", "roof.png"]
    # the run calibrates, and writes the attained rates next to the record
    assert record.with_suffix(".toml").is_file()
    assert validation.hardware.attained().bandwidth == validation.hardware.bandwidth


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--out", "record.txt"], "expected a path that ends in .json"),
        (["--out", "record.json", "--only", "nothing like it"], "validate: no cases, expected one at least"),
        (["--out", "record.json", "--device", "tpu"], "expected cpu or cuda"),
        (["--out", "record.json", "--threads", "9999"], "expected at most that number"),
        (["--out", "record.json", "--hardware", "no such device", "--quick"], "no such device"),
    ],
)
def test_validate_command_rejects_invalid_arguments(capsys, tmp_path, monkeypatch, words, text):
    for needed in ("typer", "rich"):
        pytest.importorskip(needed)
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, "validate", *words)
    assert (code, out) == (2, "")
    assert text in err
    assert not (tmp_path / "record.json").exists()


# -- CUDA ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda(tmp_path):
    validation = validate("cuda", suite("cuda", quick=True), quick=True, progress=False)
    validation.save(tmp_path / "record.json")
    assert Validation.load(tmp_path / "record.json").rows == validation.rows
    for row in validation.rows:
        assert row.counted("declared"), row.case.name
        assert abs(row.off("declared")) <= 0.05 * row.measured.peak or causes(row.case, "cuda"), row.case.name
