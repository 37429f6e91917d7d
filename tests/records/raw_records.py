"""Reader of raw records: measurements by a script independent of costgraph, validated key by key.

A file of `tests/measured/` is a raw record if its environment says `"command": "measure.py"`. Unknown cases, facts and
keys are errors that name them.
"""

import json
from dataclasses import dataclass
from datetime import date
from functools import cache
from math import isfinite
from pathlib import Path

__all__ = ["ELEMENTWISE", "FACTS", "FOLDER", "Record", "Row", "is_raw", "parse", "raw_records", "read"]

FOLDER = Path(__file__).parents[1] / "measured"

_ENVIRONMENT = {"torch": str, "device": str, "threads": int, "tf32": bool, "date": str, "command": str}
_OF_CUDA = {"total_memory": int, "sms": int, "l2_bytes": int, "cuda": str, "launch": dict}
_TIMES = {"median_s": float, "min_s": float, "max_s": float, "runs": int}
_MEMORY = {"baseline_bytes": int, "peak_bytes": int, "peak_above_baseline": int, "left_bytes": int}

#: Minimum values of keys that may be zero or negative; fewer bytes may be live afterwards than before.
_LEAST = {"dropout": 0, "flops": 0, "baseline_bytes": 0, "peak_above_baseline": 0, "left_bytes": -(2**63)}

ELEMENTWISE = ("copy", "add", "relu", "gelu", "silu", "tanh", "exp", "sum")
_HEADS = {"b": int, "h": int, "s": int, "k": int, "dtype": str}
#: Facts of each case by its name.
FACTS = {
    "matmul": {"m": int, "k": int, "n": int, "dtype": str},
    **{name: {"elements": int, "dtype": str} for name in ELEMENTWISE},
    **{name: {"rows": int, "cols": int, "dtype": str} for name in ("softmax", "layer_norm", "rms_norm")},
    "sdpa": {**_HEADS, "causal": bool},
    "attention_eager": _HEADS,
    "sdpa_decode": {**_HEADS, "t": int},
    "conv2d": {**dict.fromkeys(("b", "c", "o", "hw", "window", "groups"), int), "dtype": str},
    "embedding": {"v": int, "d": int, "tokens": int, "dtype": str},
    "cross_entropy": {"rows": int, "v": int, "dtype": str},
    "train_step": {
        **dict.fromkeys(("v", "d", "h", "f", "layers", "b", "s"), int),
        "optimizer": str, "precision": str, "dropout": float, "fused_attention": bool, "checkpoint": bool,
    },
    "forward": {},
}  # fmt: skip
_KINDS = {"train_step": "step", "forward": "forward"}
_CHOICES = {
    "optimizer": ("sgd", "adamw-for-loop", "adamw-foreach", "adamw-fused"),
    "precision": ("fp32", "bf16", "bf16-mixed"),
    "dtype": ("fp32", "bf16", "fp16", "bf16->fp32"),
}


@dataclass(frozen=True, eq=False)  # identity equality, so that predictions are cached per row
class Row:
    """One measured case; a step and the forward pass of its model are separate rows."""

    place: str
    """which case of the file"""
    name: str
    facts: dict
    """sizes and settings; a forward pass has those of its step"""
    times: dict
    """seconds `median_s`, `min_s`, `max_s`, and `runs`"""
    flops: int | None
    """FlopCounterMode's"""
    memory: dict
    """bytes, empty where the device does not count them"""
    parameters: int | None = None
    """of a step"""
    error: str | None = None
    """what the device said instead"""


@dataclass(frozen=True, eq=False)
class Record:
    """A raw record."""

    path: Path
    environment: dict
    rows: tuple[Row, ...]

    @property
    def device(self):
        """Return cpu or cuda."""
        return "cuda" if "cuda" in self.environment else "cpu"


def _need(condition, place, found, expected):
    if not condition:
        raise ValueError(f"{place}: {found}, expected {expected}")


def _checked(place, given, wanted):
    """Return the values of the given keys with their types checked; a bool is no int, an int may be a float."""
    for key, kind in wanted.items():
        _need(key in given, place, f"no {key!r}", "it")
        value, kinds = given[key], (int, float) if kind is float else (kind,)
        _need(type(value) in kinds, place, f"{key} {value!r}", f"of type {kind.__name__}")
        if key in _CHOICES:
            _need(value in _CHOICES[key], place, f"{key} {value!r}", f"one of {', '.join(_CHOICES[key])}")
        elif kind in (int, float):
            low = _LEAST.get(key, 1 if kind is int else 1e-12)
            _need(isfinite(value) and value >= low, place, f"{key} {value!r}", "a positive number")
    return {key: given[key] for key in wanted}


def _only(place, given, *known):
    extra = sorted(set(given) - set().union(*known))
    _need(not extra, place, f"key {extra[0]!r}" if extra else "", f"one of {', '.join(sorted(set().union(*known)))}")


def _row(place, case, cuda, outer=None):
    _need(isinstance(case, dict), place, repr(case)[:60], "a case")
    name = case.get("name")
    _need(name in FACTS and (name == "forward") == (outer is not None), place, f"case {name!r}", "one of FACTS")
    place = f"{place} ({name})"
    kind = _KINDS.get(name, "kernel")
    _need(case.get("kind") == kind, place, f"kind {case.get('kind')!r}", kind)
    extra_keys = {"parameters": int} if kind == "step" else {}
    facts = _checked(place, case, FACTS[name]) if outer is None else outer
    facts_found = _checked(place, case, extra_keys)
    wanted = {**_TIMES, "flops": int} | (_MEMORY if cuda else {})
    _only(
        place, case, FACTS[name], extra_keys, wanted, {"name", "kind"}, {"error"}, {"forward"} if kind == "step" else ()
    )
    if "error" in case:
        return Row(place, name, facts, {}, None, {}, facts_found.get("parameters"), str(case["error"]))
    flops, times = _checked(place, case, {"flops": int})["flops"], _checked(place, case, _TIMES)
    _need(times["min_s"] <= times["median_s"] <= times["max_s"], place, f"times {times}", "them in order")
    memory = _checked(place, case, _MEMORY) if cuda else {}
    if memory:
        above = memory["peak_bytes"] - memory["baseline_bytes"]
        _need(above == memory["peak_above_baseline"], place, f"{above} B from baseline to peak", "peak_above_baseline")
    return Row(place, name, facts, times, flops, memory, facts_found.get("parameters"))


def _rows(cases, cuda):
    _need(isinstance(cases, list) and cases, "cases", repr(cases)[:60], "a list of them")
    for i, case in enumerate(cases):
        row = _row(f"case {i}", case, cuda)
        yield row
        if row.name == "train_step":
            yield _row(f"case {i}, forward", case.get("forward"), cuda, row.facts)


def parse(text, path):
    """Parse a raw record.

    Raises
    ------
    ValueError
        If the record differs from the output of `measure.py`; the text names the file, the case and the key.
    """
    try:
        data = json.loads(text)
        _need(isinstance(data, dict), "record", type(data).__name__, "an object")
        _only("record", data, {"environment", "cases"})
        given = data["environment"]
        cuda = given.get("device") != "cpu"
        wanted = _ENVIRONMENT | (_OF_CUDA if cuda else {})
        environment = _checked("environment", given, wanted)
        _only("environment", given, wanted, {"cut_short"})
        date.fromisoformat(environment["date"])
        if cuda:
            environment["launch"] = _checked("environment, launch", given["launch"], _TIMES)
        return Record(path, environment, tuple(_rows(data.get("cases"), cuda)))
    except (ValueError, KeyError) as error:
        raise ValueError(f"{path.name}: {error}") from None


def is_raw(text):
    """Whether a file is a raw record or broken: costgraph's own measurements state another command."""
    try:
        data = json.loads(text)
        return data["environment"]["command"] == "measure.py"
    except (ValueError, TypeError):
        return True
    except KeyError:
        return "cases" in data  # without a command it is not one of costgraph's own


def read(path):
    """Read the raw record in a file."""
    return parse(path.read_text(), path)


@cache
def raw_records():
    """Return all raw records of the folder, sorted by name."""
    return [read(path) for path in sorted(FOLDER.glob("*.json")) if is_raw(path.read_text())]
