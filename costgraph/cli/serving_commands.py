"""Inference commands: decode throughput for several batches, and the latency of an answer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import sympy
import typer

from ..algebra.symbols import is_name, read_size
from ..analysis.params import cache_bytes, param_bytes
from ..analysis.regimes import crossover
from ..errors import FormatError, UnsupportedError
from ..hardware.specs import load_hardware
from ..hardware.units import format_bytes, format_quantity
from ..ir.graph import Graph
from ..plan.capacity import largest
from ..plan.serving import Latency, Throughput, latency, throughput
from ..report.formula import formula_text, with_legend
from ..text_file import as_csv, as_json
from ..transforms.inference import (
    decode,
    prefill,
)
from ..transforms.quantize import quantize
from ..transforms.shard.parallelize import parallelize
from . import options as opt
from . import parallelism as ranks
from .loading import load_model
from .output import check_files, say, write_files
from .registry import command

__all__ = ["LATENCY_SCHEMA", "THROUGHPUT_SCHEMA", "decode_command", "latency_command"]

THROUGHPUT_SCHEMA = "costgraph/throughput/2"
"""Schema of the JSON output; the number changes with the keys."""
LATENCY_SCHEMA = "costgraph/latency/1"
"""Schema of the JSON output of `latency`."""

_COLUMNS = (
    "size", "tokens", "seconds", "lower_bound", "tokens_per_second", "devices", "tokens_per_device", "memory", "fits",
    "bound",
)  # fmt: skip
_TIMES = ("first_token", "next_token", "last_token", "per_token", "total")

_Tokens = Annotated[str, typer.Option("--tokens", metavar="N", help="New tokens per sequence and step.")]
_Vary = Annotated[str, typer.Option("--vary", metavar="NAME", help="Dimension to vary.")]
_Values = Annotated[
    str | None,
    typer.Option(
        "--values",
        metavar="N,N",
        help="Sizes of the varied dimension; by default powers of two up to the largest that fits.",
    ),
]
_Weights = Annotated[
    str | None, typer.Option("--weights", metavar="FORMAT", help="Format of weights, such as int4 or Q4_K_M.")
]
_Activations = Annotated[
    str | None, typer.Option("--activations", metavar="FORMAT", help="Format of the activations that they multiply.")
]
_Cache = Annotated[
    str | None, typer.Option("--cache", metavar="FORMAT", help="Format of the KV cache, such as fp8_e4m3.")
]
_Group = Annotated[str | None, typer.Option("--group", metavar="N", help="Number of weights that share a scale.")]
_Batches = Annotated[str, typer.Option("--micro-batches", metavar="N", help="Micro-batches in flight in a pipeline.")]
_Prompt = Annotated[str, typer.Option("--prompt", metavar="N", help="Prompt length in tokens.")]
_Steps = Annotated[str, typer.Option("--steps", metavar="N", help="Decode steps after the first token.")]
_Curve = Annotated[str | None, typer.Option("--plot", metavar="FILE", help="Draw the curve: .png, .svg or .pdf.")]


def _quantized_and_sharded(
    graph: Graph, formats: Mapping[str, str | None], group: str | None, degrees: Mapping[str, str]
) -> Graph:
    """Quantize an inference graph, and parallelize it, if requested."""
    options: dict[str, Any] = {k: v for k, v in formats.items() if v is not None}
    if group is not None:
        options["group"] = read_size(group, "--group")
    quantized = quantize(graph, **options) if options else graph
    mesh: dict[str, Any] = {axis: read_size(n, f"--{axis.replace('_', '-')}") for axis, n in degrees.items()}
    return parallelize(quantized, **mesh) if any(n != 1 for n in mesh.values()) else quantized


def _tokens(text: str) -> Any:
    return text if is_name(text) else read_size(text, "--tokens")


def _values(text: str | None) -> list[int] | None:
    return None if text is None else [read_size(item, "--values") for item in text.split(",")]


def throughput_records(result: Throughput) -> list[dict[str, Any]]:
    """Return a row for each size, by column."""
    return [{c: getattr(r, c) for c in _COLUMNS} for r in result.rows]


def _json(result: Throughput) -> str:
    data = {
        "graph": result.graph,
        "hardware": {"id": result.hardware.id, "name": result.hardware.name},
        "varied": result.symbol,
        "sizes": dict(result.sizes),
        "rows": throughput_records(result),
    }
    return as_json(THROUGHPUT_SCHEMA, data)


def _head(step: Graph, result: Throughput, dims: Mapping[str, int], fallback: str | None) -> Iterator[str]:
    sizes: dict[str, Any] = dict(dims)
    name = result.symbol
    yield f"{result.graph} on {result.hardware.name}"
    yield f"sizes    {' '.join(f'{k}={v}' for k, v in result.sizes.items())}"
    yield f"weights  {format_bytes(param_bytes(step, **sizes))}"
    cache = cache_bytes(step, **sizes)
    text = formula_text(cache, grouped=True) + "  [B]" if isinstance(cache, sympy.Expr) else format_bytes(cache)
    yield f"cache    {text}"
    yield f"largest {name} that fits: {largest(step, name, hardware=result.hardware, **sizes)}"
    devices = result.rows[0].devices
    yield _crossover_line(step, result, sizes, fallback) if devices == 1 else f"per device, on {devices} devices"


def _crossover_line(step: Graph, result: Throughput, sizes: Mapping[str, Any], fallback: str | None) -> str:
    """Return the crossover of compute and memory time, in words."""
    name = result.symbol
    try:
        threshold = crossover(step, result.hardware, name, fallback=fallback, **sizes)
    except UnsupportedError as error:
        return str(error)
    if isinstance(threshold, sympy.Expr):
        return f"compute time equals memory time at {name} = {formula_text(threshold, grouped=True)}"
    if threshold in (0, math.inf):
        return f"{'compute' if threshold == 0 else 'memory'}-bound at every {name}, all ops together"
    return f"compute time equals memory time at {name} = {float(threshold):.6g}, all ops together"


@command("decode")
def decode_command(
    model: opt.Model, hardware: opt.Device, sizes: opt.Sizes = None, tokens: _Tokens = "1", vary: _Vary = "B",
    values: _Values = None, dp: ranks.Dp = "1", tp: ranks.Tp = "1", pp: ranks.Pp = "1", cp: ranks.Cp = "1",
    ep: ranks.Ep = "1", micro_batches: _Batches = "1", network: ranks.Network = None, weights: _Weights = None,
    activations: _Activations = None, cache: _Cache = None, group: _Group = None, attention: opt.Attention = None,
    dtype: opt.Format = None, symbolic: opt.Symbolic = False, fallback: opt.Fallback = None, json: opt.Json = None,
    csv: opt.Csv = None, plot: _Curve = None,
) -> None:  # fmt: skip
    """Print the time, tokens per second and memory of a decode step for several batch sizes.

    S is the context length, including the new tokens; B is the number of sequences on all devices.

    Examples
    --------
      costgraph decode llama-3-70b --hardware b200 --weights int4 --group 128
        --cache fp8_e4m3 S=8192
      costgraph decode llama-3-70b --hardware h200-sxm --tp 8 S=4096
    """
    check_files(json, csv, plot)
    dims: dict[str, Any] = dict(opt.read_sizes(sizes))  # Any: passed together with keywords of other types
    if vary in dims:
        raise FormatError(f"--vary {vary}: the dimension also has a size, expected either --vary or a size")
    graph = load_model(model, attention, dtype, None, False, symbolic)
    formats = {"weights": weights, "activations": activations, "cache": cache}
    mesh = {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "ep": ep, "micro_batches": micro_batches}
    step = _quantized_and_sharded(decode(graph, _tokens(tokens)), formats, group, mesh)
    result = throughput(step, hardware, vary, _values(values), network=network, fallback=fallback, **dims)
    if plot is not None:
        result.plot(plot)
    if not write_files(
        (json, lambda: _json(result)),
        (csv, lambda: as_csv(_COLUMNS, (row.values() for row in throughput_records(result)))),
    ):
        # the table has the legend of the varied dimension
        legend = {name: text for name, text in step.legend.items() if name != vary}
        say("\n".join([*with_legend(_head(step, result, dims, fallback), legend), "", str(result)]))


def _times(result: Latency) -> dict[str, float]:
    return {name: getattr(result, name) for name in _TIMES}


@command("latency")
def latency_command(
    model: opt.Model, hardware: opt.Device, prompt: _Prompt, steps: _Steps, sizes: opt.Sizes = None,
    tokens: _Tokens = "1", dp: ranks.Dp = "1", tp: ranks.Tp = "1", pp: ranks.Pp = "1", cp: ranks.Cp = "1",
    ep: ranks.Ep = "1", micro_batches: _Batches = "1", network: ranks.Network = None, weights: _Weights = None,
    activations: _Activations = None, cache: _Cache = None, group: _Group = None, attention: opt.Attention = None,
    dtype: opt.Format = None, fallback: opt.Fallback = None, json: opt.Json = None, csv: opt.Csv = None,
) -> None:  # fmt: skip
    """Print the time to first token, for the whole prompt, and the time of the following decode steps.

    Examples
    --------
      costgraph latency llama-3-70b --hardware h200-sxm --tp 8
        --prompt 2048 --steps 255 B=8
    """
    check_files(json, csv)
    dims: dict[str, Any] = dict(opt.read_sizes(sizes))  # Any: passed together with keywords of other types
    graph = load_model(model, attention, dtype, None)
    formats = {"weights": weights, "activations": activations, "cache": cache}
    mesh = {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "ep": ep, "micro_batches": micro_batches}
    passes = (prefill(graph, logits="last"), decode(graph, _tokens(tokens)))
    first, step = (_quantized_and_sharded(g, formats, group, mesh) for g in passes)
    lengths: dict[str, Any] = {"prompt": read_size(prompt, "--prompt"), "steps": read_size(steps, "--steps")}
    result = latency(first, step, hardware, network=network, fallback=fallback, **lengths, **dims)
    device = load_hardware(hardware)
    head = {"graph": graph.name, "hardware": {"id": device.id, "name": device.name}, **lengths, "sizes": dims}
    if not write_files(
        (json, lambda: as_json(LATENCY_SCHEMA, {**head, **_times(result)})),
        (csv, lambda: as_csv(_TIMES, [_times(result).values()])),
    ):
        times = (f"{name.replace('_', ' '):12} {format_quantity(t, 's')}" for name, t in _times(result).items())
        say("\n".join((f"{graph.name} on {device.name}", *times)))
