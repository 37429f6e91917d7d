"""nn.Module -> Graph, from one eager run on fake tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from io import StringIO

import sympy
import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram

from ...algebra.polynomial import poly
from ...algebra.symbols import shown
from ...dtypes import DType
from ...errors import CostGraphError, GraphError, UnsupportedError
from ...graph.arguments import need_choice
from ...graph.graph import Graph
from ...hardware.arch import DEFAULT, Arch, arch_of
from ...notation.grammar import parse_relation
from ...transforms.folding.equal import unlike
from .arguments import Axes, Given
from .counted import Loops, ResizeError
from .cuda import CUDA_STATISTICS, KERNELS, Here, on_cuda
from .data import Data
from .formats import narrowed
from .guards import assumptions
from .integers import open_integers
from .lazy import initialized
from .quantized import unpack_linears
from .recorder import Recorder
from .run import Factory, Run, plain_errors
from .scopes import Scopes
from .shapes import Shapes, alternatives
from .sizes import Translator
from .state import borrowed, forgetting
from .values import Values, format_of

__all__ = ["trace"]

#: How often a size is given another hint: loops of several counts may each ask for one.
_RESIZED = 6


@dataclass(frozen=True)
class Options:
    """Options of a trace that say how questions of the program are answered."""

    unknown: str
    fixed: str
    data_sizes: str
    choose: Mapping[str, float]


def trace(
    module: nn.Module | ExportedProgram,
    *inputs: object,
    dims: Sequence[Axes] | None = None,
    train: bool = False,
    optimizer: Factory | None = None,
    keywords: Mapping[str, object] | None = None,
    keyword_dims: Mapping[str, Axes] | None = None,
    cached: Sequence[str] = (),
    unknown: str = "error",
    fixed: str = "error",
    data_sizes: str = "symbol",
    choose: Mapping[str, float] | None = None,
    name: str = "",
    device: str = "cpu",
    arch: str | None = None,
) -> Graph:
    """Turn a module into a graph with symbolic sizes, from one eager run on tensors that hold no data.

    Nothing is computed and the module is not changed. Each op that torch runs below autograd becomes an op of the
    graph; a storage lives as long as it did in the run, which Python's variables and autograd's saved tensors decide.

    Parameters
    ----------
    module : torch.nn.Module or torch.export.ExportedProgram
        What is called, in the mode (`train()`, `eval()`) that it is in; of a compiled one, the one inside it, and of
        an exported program its module. Its parameters may be on any device, `meta` included, or fake.
    *inputs : torch.Tensor or other
        Positional arguments; of tensors the shape, the layout and the number format matter alone.
    dims : sequence, optional
        For each of `inputs` a sequence with a name or None for each axis, or None for an argument whose axes are all
        numbers. One name is one size wherever it stands.
    train : bool
        Whether the module returns a scalar loss whose backward pass is run as well. Without, gradients are off.
    optimizer : callable, optional
        `optimizer(parameters)` makes the optimizer whose step is run after the backward pass, with the state that
        its first step has left behind; gradients are set to None after it.
    keywords, keyword_dims : mapping, optional
        Keyword arguments, and the names of the axes of those that are tensors.
    cached : sequence of str
        Names of arguments that are kept between steps of inference: tensors, or what holds tensors, as a cache of
        transformers does, whose axes the names in `dims` are then. `decode` makes a step of such a trace.
    unknown : str
        What an op without a rule is: an `error`, or a `symbol`, the positive numbers `matmul_flops_NAME`,
        `pointwise_flops_NAME` and `transcendental_flops_NAME` of FLOPs, which every total of FLOPs includes (bind 1
        where it has none). Its operands and results are moved once, without a workspace.
    fixed : str
        What a named size is that the program turns into a number: an `error`, or the size that is `given`, with the
        assumption that says so, where loops over it are unrolled. Else a loop that has as many turns as a size is one
        of the graph, where its turns are alike; of a step of training (`train=True`) it is an error.
    data_sizes : str
        A size that data choose is a `symbol` named after its origin, with its upper bound among the assumptions:
        `mask_1 <= N` elements that a mask selects or `nonzero` finds, `unique_1`, `bincount_1`, or `max_1` for a size
        read from `lengths.max()`; or an `error`.
    choose : mapping, optional
        Numbers and truth values that the program reads from tensors, by the op that made the tensor: with
        `{"rand": 0.5}`, `torch.rand(1).item()` is 0.5, which decides whether a layer is dropped; with
        `{"all": True}`, `if mask.all()` takes its first branch; `{"equal": False}` answers `torch.equal`. A tensor is
        equal to itself without being asked (as if it held no NaN), and tensors of different shapes are not equal.
    name : str
        Name of the graph, by default the class of the module.
    device : str
        cpu: module and inputs are where they are, on a CPU if they hold no data. cuda: all is on a GPU, of which none
        is needed: what torch chooses by the device follows from its own conditions (`costgraph.torch.dispatched` says
        which call by which rule).
    arch : str, optional
        Compute capability of the GPU as torch names it, by default sm_90.

    Returns
    -------
    Graph
        Its ops are of declared kinds, or `foreign` with stated costs where no kind says what a call does; paths of
        modules are scopes. `costgraph.torch.lower` makes the calls again.

    Raises
    ------
    GraphError, ShapeError
        If names do not fit the inputs, with `train=True` the module returns no scalar, or there is no such device.
    UnsupportedError
        If an op has no rule, the program turns a named size into a number, or turns of a loop over one are not alike:
        the text names the line.

    Examples
    --------
    >>> import torch
    >>> import costgraph as cg
    >>> from costgraph.torch import trace
    >>> net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU())
    >>> g = trace(net, torch.zeros(2, 5), dims=[("B", None)])
    >>> cg.matmul_flops(g), cg.peak_memory(g)
    (70*B, 76*B + 168)
    """
    need_choice("trace: unknown", unknown, ("error", "symbol"))
    need_choice("trace: fixed", fixed, ("error", "given"))
    need_choice("trace: data_sizes", data_sizes, ("symbol", "error"))
    need_choice("trace: device", device, ("cpu", "cuda"))
    for op, taken in (choose or {}).items():
        if not isinstance(op, str) or not isinstance(taken, int | float):
            raise GraphError(
                f"trace: choose {shown(op)}: {shown(taken)}, expected names of ops with a number or a truth value each"
            )
    if arch is not None and device == "cpu":
        raise GraphError(f"trace: arch {shown(arch)} of a CPU, expected device='cuda' with it")
    target = arch_of(DEFAULT if arch is None else arch, "trace") if device == "cuda" else None
    if isinstance(module, ExportedProgram):
        module = module.module()
    if not isinstance(module, nn.Module):
        raise GraphError(f"trace: got {type(module).__name__}, expected a torch.nn.Module, or an exported program")
    if optimizer is not None and not train:
        raise GraphError("trace: an optimizer without train=True, expected a backward pass before its step")
    module = module._orig_mod if isinstance(module, OptimizedModule) else module
    module = initialized(module, inputs, dict(keywords or {}))
    given = Given(module, inputs, dims, dict(keywords or {}), dict(keyword_dims or {}), cached)
    graph = partial(Graph, name or type(module).__name__, dtype=_usual_format(module))
    options = Options(unknown, fixed, data_sizes, dict(choose or {}))
    return _traced(module, given, optimizer, target, graph, options, train=train)


def _traced(
    module: nn.Module,
    given: Given,
    optimizer: Factory | None,
    target: Arch | None,
    graph: Callable[[], Graph],
    options: Options,
    *,
    train: bool,
) -> Graph:
    """Run a module as often as it takes: what needs no remainder, formats and loops are known by a second run."""
    watched = partial(_watched, module, given, optimizer, target, options, train=train)
    exact = frozenset[sympy.Expr]()
    integers = False
    try:
        sizes, shapes, run = _first(watched, given.sizes())
    except UnsupportedError as error:
        integers = True
        watched = partial(watched, integers=True)
        try:
            with redirect_stdout(StringIO()):
                sizes, shapes, run = _first(watched, given.sizes())
        except CostGraphError:
            raise error from error.__cause__
    if shapes.exact:  # which is known from the start on now
        exact = frozenset(shapes.exact)
        with redirect_stdout(StringIO()):
            shapes, run = watched(sizes, exact=exact)
    narrow = partial(_watched, module, given, None, target, options, narrow=True, exact=exact, integers=integers)
    _settle(run, narrow, sizes)
    known = assumptions(shapes, run.recorder.values.translator)
    if not run.recorder.turns.loops:
        return run.build(graph(), known)
    sizes |= run.recorder.turns.elsewhere()
    with redirect_stdout(StringIO()):
        shapes, other = watched(sizes, exact=exact)
    _settle(other, narrow, sizes)
    found = assumptions(shapes, other.recorder.values.translator)
    known = [text for text in known if text in found]
    made = run.build(graph(), known)
    why = unlike(made, other.build(graph(), known))
    if why is not None:
        raise run.recorder.turns.refused(f"what it does is not the same at other sizes: {why}")
    return made


def _settle(run: Run, narrow: Callable[..., tuple[Shapes, Run]], sizes: Mapping[str, int]) -> None:
    """Find which formats a program asks for because its model is in them: not where it is run in another one.

    Which formats are asked for is the same at sizes that are numbers, where a run takes a third of the time. A program
    that goes another way there, such as one with loops over sizes, is run with symbols for them.
    """
    if not run.formats.asked:
        return
    alike = bool(sizes) and not run.recorder.turns.loops and not run.formats.replaced
    # a program may fail in another format; its output was printed by the first run
    with suppress(CostGraphError), redirect_stdout(StringIO()):
        if alike and run.formats.settle(narrow(sizes, numbers=True)[1].formats):
            return
    with suppress(CostGraphError), redirect_stdout(StringIO()):
        run.formats.settle(_resized(narrow, dict(sizes))[1].formats)


def _first(watched: Callable[..., tuple[Shapes, Run]], given: Mapping[str, int]) -> tuple[dict[str, int], Shapes, Run]:
    """Run at the first sizes that the program takes and at which it goes the way that it goes at those given."""
    found: list[tuple[dict[str, int], Shapes, Run]] = []
    failed: UnsupportedError | None = None
    for sizes in alternatives(given):
        try:
            with redirect_stdout(StringIO()) if found or failed else nullcontext():
                shapes, run = _resized(watched, sizes)
        except UnsupportedError as error:
            if error.__cause__ is None or isinstance(error.__cause__, CostGraphError):
                raise  # the trace refuses it, whatever the sizes are
            failed = failed or error
            continue
        found.append((sizes, shapes, run))
        if _holds_at(given, shapes, run):
            return found[-1]
    if not found and failed is not None:
        raise failed
    return found[0]


def _holds_at(given: Mapping[str, int], shapes: Shapes, run: Run) -> bool:
    """Return whether the assumptions of a run hold at these sizes."""
    known = {n: poly(size) for n, size in given.items()}
    try:
        for text in assumptions(shapes, run.recorder.values.translator):
            parse_relation(text).check(known)
    except CostGraphError:
        return False
    return True


def _resized(watched: Callable[..., tuple[Shapes, Run]], sizes: dict[str, int]) -> tuple[Shapes, Run]:
    """Run at sizes at which loops over them have a few turns; sizes are changed to those."""
    given, raised = dict(sizes), set[str]()
    for _ in range(_RESIZED * len(sizes)):
        try:
            shapes, run = watched(sizes, raised=raised)
        except ResizeError as error:
            if error.size > sizes[error.name]:
                raised.add(error.name)
            sizes[error.name] = error.size
            continue
        if not _holds_at(given, shapes, run):  # it goes another way there
            break
        return shapes, run
    sizes.update(given)
    return watched(sizes)


def _watched(
    module: nn.Module,
    given: Given,
    optimizer: Factory | None,
    target: Arch | None,
    options: Options,
    sizes: Mapping[str, int],
    *,
    train: bool = False,
    narrow: bool = False,
    exact: Collection[sympy.Expr] = (),
    raised: Collection[str] | None = None,
    integers: bool = False,
    numbers: bool = False,
) -> tuple[Shapes, Run]:
    """Run a module while what it does is recorded, as it is or in another number format."""
    shapes = Shapes(given.sizes(), exact, fixed=options.fixed == "given")
    symbols = options.data_sizes == "symbol"
    translator = Translator(shapes.names, exact, wholes=shapes.wholes, symbols=symbols, chosen=shapes.chosen)
    data, device = Data(shapes, options.choose), "cpu" if target is None else "cuda"
    turns = Loops(shapes, raised)
    recorder = Recorder(
        Values(translator), Scopes(module), data, turns, symbols=options.unknown == "symbol", device=device
    )
    place: Callable[[], AbstractContextManager[None]] = nullcontext
    if target is not None:
        recorder.kernels, recorder.stand_ins = KERNELS, {**recorder.stand_ins, **CUDA_STATISTICS}
        place = partial(on_cuda, Here(target, recorder.choices))
    run = Run(module, recorder, optimizer, place)
    opened = open_integers(module) if integers else nullcontext()
    with (
        FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True),
        plain_errors(),
        forgetting(recorder.left),
        borrowed(module, *given.others(), host=target is not None) as data.held,
        data.unseen(),
    ):
        named = {n: size if numbers else shapes.named(n, size) for n, size in sizes.items()}
        fakes = given.fakes(named, data, host=target is not None)
        unpack_linears(module)
        if narrow:
            own = [*module.parameters(), *module.buffers(), *(t for t, _ in given.held.values())]
            fakes = narrowed(own, fakes)
        run.declare(fakes, given.kept(fakes))
        with recorder.scopes.watching(), torch.compiler.set_stance("force_eager"), opened:
            run(*given.arguments(fakes), train=train)
    return shapes, run


def _usual_format(module: nn.Module) -> DType:
    """Return the floating format of most parameters: what a policy of precision changes; another is meant as it is."""
    counts: Counter[torch.dtype] = Counter()
    for parameter in module.parameters():
        counts[parameter.dtype] += parameter.numel() if parameter.is_floating_point() else 0
    [(usual, count)] = counts.most_common(1) or [(torch.float32, 0)]
    return format_of(usual if count else torch.float32)
