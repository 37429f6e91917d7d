"""What the library says of every model of the zoo, one line a figure, so that a restructuring can be held to it.

    python tests/figures.py OUT [MODEL ...] [--workers N] [--seconds S]
    python tests/figures.py --diff A B

The first writes `model <tab> figure <tab> value`, sorted, all models by default. The second prints what differs between
two such files, and exits with 1 if anything does. Only public names are asked, so that modules may move.

Each graph is asked with every size open and at two points. Formulas are in a form of their own, in which the order of
terms has no say; one of more than 2000 characters is its hash, and the points are there to be compared. Ops are
digests of the table of costs at both points: `ops` without names, so that it sees amounts alone, `named ops` with them.
Refusals are figures too: their texts.

Asked are the forward pass, a step of training with AdamW in the declared formats, one step of decoding and the pass
over a prompt. Left out is what multiplies the work and has tests of its own: eager attention, dropout, composed
declarations, other structures than the published one, formats other than bf16, checkpointing, micro-batches, other
optimizers, fused and quantized graphs, and timelines, of which that of a step of a Swin takes over a minute with all
sizes open.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path

import sympy
from limits import TooSlowError, limited

import costgraph as cg

#: Characters of a formula that is written out.
LONGEST = 2000
#: Seconds of the processor for all questions of one graph: some ten times what the slowest one takes.
SECONDS = 400.0

#: Regimes of a peak into whose formula sizes are put: with hundreds of them, whether it holds for small counts takes
#: minutes, as the graph is asked again for each.
MOST_REGIMES = 50

#: What a caller brings where the point is small: no two sizes alike, and none that a model has.
SMALL = {"B": 3, "S": 17, "M": 13}
#: Numbers of positions of the large point, the first of which a model takes: past all windows, else what tables hold.
LARGE = tuple({"B": 5, "S": s, "M": 101} for s in (8209, 1021, 397, 61))

Questions = Mapping[str, Callable[..., object]]

COSTS: Questions = {
    "flops": cg.flops,
    "matmul flops": cg.matmul_flops,
    "matmul flops full": partial(cg.matmul_flops, count="full"),
    "bytes": cg.bytes_moved,
    "bytes fused": partial(cg.bytes_moved, fused=True),
    "peak": cg.peak_memory,
}
FORWARD: Questions = {
    **COSTS,
    "params": cg.param_count,
    "params active": partial(cg.param_count, active=True),
    "param bytes": cg.param_bytes,
}
STEP: Questions = {
    **COSTS,
    "saved bytes": cg.saved_bytes,
    "state bytes": cg.state_bytes,
    "activation memory": cg.activation_memory,
}
CACHED: Questions = {**COSTS, "cache bytes": cg.cache_bytes}


# -- text ------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1 << 16)
def canonical(formula: sympy.Expr) -> str:
    """Return a formula as text: operands that commute are sorted by their own texts."""
    if not formula.args:
        return str(formula)
    parts = [canonical(a) for a in formula.args]
    if formula.is_Add:
        return " + ".join(sorted(parts))
    if formula.is_Mul or formula.is_Pow:
        parts = [
            p if a.is_Symbol or a.is_Integer or a.is_Pow else f"({p})" for p, a in zip(parts, formula.args, strict=True)
        ]
        return "**".join(parts) if formula.is_Pow else "*".join(sorted(parts))
    if isinstance(formula, cg.Max | cg.Min):
        parts.sort()
    return f"{type(formula).__name__}({', '.join(parts)})"


def text(value: object) -> str:
    """Return what a question answers with."""
    if dataclasses.is_dataclass(value):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return "; ".join(f"{k or 'outside'}: {text(v)}" for k, v in sorted(value.items()))
    return canonical(value) if isinstance(value, sympy.Expr) else str(value)


def digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:24]


def shortened(found: str) -> str:
    """Return a value that fits a line."""
    found = found.replace("\n", "\\n").replace("\t", "\\t")
    return found if len(found) <= LONGEST else f"sha256 {digest([found])} of {len(found)} characters"


# -- figures of a graph ----------------------------------------------------------------------------------------


def said(question: Callable[..., object], *args: object, **dims: int) -> str:
    """Return an answer or the refusal, as text."""
    try:
        return text(question(*args, **dims))
    except cg.CostGraphError as error:
        return f"{type(error).__name__}: {error}"


def owners(graph: cg.Graph, **dims: int) -> str:
    """Return a digest of what holds the peak in each of its regimes."""
    found = cg.regimes(cg.peak_memory(graph, **dims))
    return f"{len(found)} regimes {digest(sorted(f'{text(r.formula)} {r.op} {r.phase}' for r in found))}"


def put_in(graph: cg.Graph, dims: Mapping[str, int] | None = None) -> int | float:
    """Put sizes, or 1 for each, into the formula of the peak: it refuses with the count that it holds from."""
    peak = cg.peak_memory(graph)
    names = {s.name for s in getattr(peak, "free_symbols", ())}
    return cg.evaluate(peak, **{name: 1 if dims is None else dims[name] for name in sorted(names)})


def ops(graph: cg.Graph, *columns: str, **dims: int) -> str:
    """Return a digest of the rows of the table of costs: some of their columns, and amounts."""
    rows = cg.costs(graph, **dims)
    lines = (" ".join(str(getattr(r, c)) for c in (*columns, "value")) for r in rows)
    return f"{len(rows)} rows {digest(sorted(lines))}"


def points(graph: cg.Graph, defaults: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Return the two points at which a graph is asked, published sizes with what a caller brings."""
    known = cg.costs(graph).names

    def at(brought: Mapping[str, int]) -> dict[str, int]:
        return {k: v for k, v in {**brought, **defaults}.items() if k in known}

    def taken(dims: Mapping[str, int]) -> bool:
        try:
            return bool(cg.flops(graph, **dims))
        except cg.CostGraphError:
            return False

    large = next((d for d in map(at, LARGE) if taken(d)), at(LARGE[-1]))
    return {"small": at(SMALL), "large": large}


def figures_of(graph: cg.Graph, questions: Questions, defaults: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield the figures of a graph: every question with sizes open and at both points, and digests of ops."""
    columns = ("phase", "kind", "dtype", "direction")
    yield "peak owners", said(owners, graph)
    found = points(graph, defaults)
    if len(cg.regimes(cg.peak_memory(graph))) <= MOST_REGIMES:
        yield "peak formula at ones", said(put_in, graph)
        yield "peak formula at small", said(put_in, graph, found["small"])
    for place, dims in {"": {}, **found}.items():
        for key, question in questions.items():
            yield f"{key} {place}".strip(), said(question, graph, **dims)
    for place, dims in found.items():
        yield f"at {place}", text(dims)
        yield f"ops {place}", said(ops, graph, *columns, **dims)
        yield f"named ops {place}", said(ops, graph, "op", "scope", *columns, **dims)


# -- figures of a model ----------------------------------------------------------------------------------------


def _mean(*outputs: cg.Tensor) -> cg.Tensor:
    names = " ".join(f"a{i}" for i in range(outputs[0].ndim))
    return cg.reduce(cg.ops.cast(outputs[0], "fp32"), f"{names} -> ", "mean")


def trained(graph: cg.Graph) -> cg.Graph:
    """Return a step of training; what names no loss is trained on the mean of what it returns."""
    return cg.training_step(graph, None if graph.loss else _mean, optimizer=cg.AdamW())


#: What is made of a model, and what it is asked.
GRAPHS: Mapping[str, tuple[Callable[[cg.Graph], cg.Graph], Questions]] = {
    "forward": (lambda graph: graph, FORWARD),
    "step": (trained, STEP),
    "decode": (cg.decode, CACHED),
    "prefill": (cg.prefill, CACHED),
}


def figures(name: str, seconds: float = SECONDS) -> dict[str, str]:
    """Return all figures of a model, by key."""
    graph, defaults = cg.models.load(name, symbolic=True), cg.models.load(name).defaults
    out = {"defaults": text(defaults)}
    for part, (make, questions) in GRAPHS.items():
        try:
            with limited(seconds):
                made = make(graph)
                out |= {f"{part} {key}": value for key, value in figures_of(made, questions, defaults)}
        except cg.CostGraphError as error:  # such as of what does not generate
            out[part] = f"{type(error).__name__}: {error}"
        except TooSlowError as error:
            out[part] = f"too slow: {error}"
    return {key: shortened(value) for key, value in out.items()}


def _timed(name: str, seconds: float) -> tuple[str, dict[str, str], float]:
    start = time.process_time()
    return name, figures(name, seconds), time.process_time() - start


# -- files -----------------------------------------------------------------------------------------------------


def write(path: Path, names: list[str], workers: int, seconds: float) -> None:
    """Write the figures of some models to a file."""
    asked, spent, lines = partial(_timed, seconds=seconds), 0.0, []
    with multiprocessing.get_context("spawn").Pool(workers) if workers > 1 else _Here() as pool:
        for name, found, took in pool.imap_unordered(asked, names):
            lines += [f"{name}\t{key}\t{value}\n" for key, value in found.items()]
            spent += took
            print(f"{name}: {len(found)} figures, {took:.1f} s", file=sys.stderr, flush=True)
    path.write_text("".join(sorted(lines)), encoding="utf-8")
    print(f"{len(lines)} figures of {len(names)} models, {spent:.0f} s of the processor", file=sys.stderr)


class _Here:
    """Stands for a pool of no processes."""

    imap_unordered = staticmethod(map)

    def __enter__(self) -> _Here:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def read(path: Path) -> dict[str, str]:
    """Read a file of figures: values by model and key."""
    lines = path.read_text(encoding="utf-8").split("\n")
    return {key: value for key, _, value in (line.rpartition("\t") for line in lines if line)}


def differing(before: Path, after: Path) -> list[str]:
    """Return the figures that two files do not share, as lines."""
    a, b = read(before), read(after)
    changed = sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key))
    marked = ((sign, key, side.get(key)) for key in changed for sign, side in (("-", a), ("+", b)))
    return [f"{sign} {key}\t{value}" for sign, key, value in marked if value is not None]


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, nargs="?", help="file to write")
    parser.add_argument("models", nargs="*", help="by default all of the zoo")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of the processor for one graph of a model")
    parser.add_argument("--diff", type=Path, nargs=2, metavar=("A", "B"), help="files to compare")
    given = parser.parse_args(words)
    if given.diff:
        lines = differing(*given.diff)
        print("\n".join([*lines, f"{len(lines)} lines differ"]))
        return 1 if lines else 0
    if given.out is None:
        parser.error("expected a file to write, or --diff A B")
    unknown = sorted(set(given.models) - set(cg.models.names()))
    if unknown:
        parser.error(f"{', '.join(unknown)}: no model of the zoo")
    write(given.out, given.models or cg.models.names(), given.workers, given.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
