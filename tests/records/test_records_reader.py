"""The reader of raw records rejects unknown contents by name."""

import json
from pathlib import Path

import pytest
from each import each
from raw_records import FOLDER, is_raw, parse, raw_records

TIMES = {"median_s": 2e-3, "min_s": 1e-3, "max_s": 3e-3, "runs": 7}
BYTES = {"baseline_bytes": 5, "peak_bytes": 11, "peak_above_baseline": 6, "left_bytes": 0}
MATMUL = {"name": "matmul", "kind": "kernel", "m": 3, "k": 5, "n": 7, "dtype": "bf16", **TIMES, "flops": 210}
STEP = {
    "name": "train_step", "kind": "step", "v": 7, "d": 4, "h": 2, "f": 5, "layers": 3, "b": 1, "s": 2,
    "optimizer": "sgd", "precision": "fp32", "dropout": 0.0, "fused_attention": False, "checkpoint": True,
    "parameters": 11, **TIMES, "flops": 13, "forward": {"name": "forward", "kind": "forward", **TIMES, "flops": 1},
}  # fmt: skip
CPU = {
    "torch": "2.13.0", "device": "cpu", "threads": 2, "tf32": False, "date": "2026-11-21", "command": "measure.py",
}  # fmt: skip
CUDA = {
    **CPU, "device": "NVIDIA H200", "cuda": "13.0", "total_memory": 7, "sms": 132, "l2_bytes": 5, "launch": TIMES,
}  # fmt: skip


def record(*cases, environment=CPU):
    return parse(json.dumps({"environment": environment, "cases": cases}), Path("r.json"))


def without(case, *keys, **more):
    return {k: v for k, v in case.items() if k not in keys} | more


def test_step_and_forward_pass_are_two_rows():
    parsed = record(MATMUL, STEP)
    assert [r.name for r in parsed.rows] == ["matmul", "train_step", "forward"]
    assert parsed.rows[1].facts == parsed.rows[2].facts
    assert (parsed.device, parsed.rows[1].parameters, parsed.rows[2].flops) == ("cpu", 11, 1)


def test_gpu_rows_have_memory():
    parsed = record({**MATMUL, **BYTES}, environment=CUDA)
    assert (parsed.device, parsed.rows[0].memory["peak_above_baseline"]) == ("cuda", 6)


def test_failed_cases_keep_the_error():
    (row,) = record(without(MATMUL, "flops", *TIMES, error="OutOfMemoryError: 1 GiB")).rows
    assert (row.error, row.flops, row.times) == ("OutOfMemoryError: 1 GiB", None, {})


@each(
    ("case", "environment", "said"),
    [
        ({**MATMUL, "name": "fft"}, CPU, "r.json: case 0: case 'fft', expected one of FACTS"),
        ({**MATMUL, "kind": "step"}, CPU, "case 0 (matmul): kind 'step', expected kernel"),
        (without(MATMUL, "k"), CPU, "case 0 (matmul): no 'k', expected it"),
        ({**MATMUL, "m": 3.5}, CPU, "m 3.5, expected of type int"),
        ({**MATMUL, "m": True}, CPU, "m True, expected of type int"),
        ({**MATMUL, "m": 0}, CPU, "m 0, expected a positive number"),
        ({**MATMUL, "dtype": "fp8"}, CPU, "dtype 'fp8', expected one of fp32, bf16, fp16"),
        ({**MATMUL, "p": 1}, CPU, "key 'p', expected one of"),
        ({**MATMUL, "min_s": 9.0}, CPU, "expected them in order"),
        ({**MATMUL, "min_s": float("nan")}, CPU, "min_s nan, expected a positive number"),
        ({**MATMUL, **BYTES}, CPU, "key 'baseline_bytes', expected one of"),
        (MATMUL, CUDA, "no 'baseline_bytes', expected it"),
        ({**MATMUL, **BYTES, "peak_bytes": 12}, CUDA, "7 B from baseline to peak, expected peak_above_baseline"),
        (without(STEP, "forward"), CPU, "case 0, forward: None, expected a case"),
        ({**STEP, "forward": MATMUL}, CPU, "case 0, forward: case 'matmul', expected one of FACTS"),
        ({**STEP, "optimizer": "lion"}, CPU, "optimizer 'lion', expected one of sgd"),
        (STEP["forward"], CPU, "case 'forward', expected one of FACTS"),
        (7, CPU, "case 0: 7, expected a case"),
        (MATMUL, without(CPU, "torch"), "environment: no 'torch', expected it"),
        (MATMUL, {**CPU, "host": "here"}, "environment: key 'host', expected one of"),
        (MATMUL, {**CPU, "date": "yesterday"}, "Invalid isoformat string: 'yesterday'"),
    ],
)
def test_malformed_cases_are_refused(case, environment, said):
    with pytest.raises(ValueError, match=r"r\.json: ") as error:
        record(case, environment=environment)
    assert said in str(error.value)


@each("text", ["[]", "{", '{"environment": {}}', '{"environment": {"device": "cpu"}, "cases": []}'])
def test_non_records_are_refused(text):
    with pytest.raises(ValueError, match=r"r\.json: "):
        parse(text, Path("r.json"))


@each(
    ("text", "raw"),
    [
        ('{"environment":{"command":"measure.py"},"cases":[]}', True),
        ('{"environment": {"command": "costgraph validate"}, "cases": []}', False),
        ('{"schema": 1, "rows": []}', False),
        ('{"environment": {}, "cases": []}', True),
        ("{", True),
        ("[]", True),
    ],
)
def test_broken_files_count_as_raw_records(text, raw):
    assert is_raw(text) == raw


def test_all_records_are_read():
    records = raw_records()
    assert records
    assert {r.path.parent for r in records} == {FOLDER}
    assert all(r.path.name in (FOLDER / "README.md").read_text() for r in records)
