"""nn.Module -> Graph, from one eager run on fake tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout, suppress
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
from ...errors import BindingError, CostGraphError, GraphError
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
from .recorder import Recorder
from .run import Factory, Run, plain_errors
from .scopes import Scopes
from .shapes import Shapes, hints
from .sizes import Translator
from .state import borrowed, forgetting
from .values import Values, format_of

__all__ = ["trace"]

#: How often a size is given another hint: loops of several counts may each ask for one.
_RESIZED = 6


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
        What an op without a rule is: an `error`, or a `symbol`, the positive number `flops_NAME` of FLOPs; a size that
        depends on data is a symbol as well then.
    fixed : str
        What a named size is that the program turns into a number: an `error`, or the size that is `given`, with the
        assumption that says so, where loops over it are unrolled. Else a loop that has as many turns as a size is one
        of the graph, where its turns are alike; of a step of training (`train=True`) it is an error.
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
    need_choice("trace: device", device, ("cpu", "cuda"))
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
    given = Given(module, inputs, dims, dict(keywords or {}), dict(keyword_dims or {}), cached)
    graph = partial(Graph, name or type(module).__name__, dtype=_usual_format(module))
    return _traced(module, given, optimizer, target, graph, train=train, unknown=unknown, fixed=fixed)


def _traced(
    module: nn.Module,
    given: Given,
    optimizer: Factory | None,
    target: Arch | None,
    graph: Callable[[], Graph],
    *,
    train: bool,
    unknown: str,
    fixed: str,
) -> Graph:
    """Run a module as often as it takes: what needs no remainder, formats and loops are known by a second run."""
    watched = partial(_watched, module, given, optimizer, target, train=train, unknown=unknown, fixed=fixed)
    sizes, exact = hints(given.sizes()), frozenset[sympy.Expr]()
    shapes, run = _resized(watched, sizes)
    if shapes.exact:  # which is known from the start on now
        exact = frozenset(shapes.exact)
        with redirect_stdout(StringIO()):
            shapes, run = watched(sizes, exact=exact)
    narrow = partial(_watched, module, given, None, target, unknown=unknown, fixed=fixed, narrow=True, exact=exact)
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
    """Find which formats a program asks for because its model is in them: not where it is run in another one."""
    if run.formats.asked:
        # a program that does not run in another format says nothing of it, and what it prints has been said
        with suppress(CostGraphError), redirect_stdout(StringIO()):
            run.formats.settle(_resized(narrow, dict(sizes))[1].formats)


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
        known = {n: poly(size) for n, size in given.items()}
        try:
            for text in assumptions(shapes, run.recorder.values.translator):
                parse_relation(text).check(known)
        except BindingError:  # it goes another way there
            break
        return shapes, run
    sizes.update(given)
    return watched(sizes)


def _watched(
    module: nn.Module,
    given: Given,
    optimizer: Factory | None,
    target: Arch | None,
    sizes: Mapping[str, int],
    *,
    unknown: str,
    fixed: str,
    train: bool = False,
    narrow: bool = False,
    exact: Collection[sympy.Expr] = (),
    raised: Collection[str] | None = None,
) -> tuple[Shapes, Run]:
    """Run a module while what it does is recorded, as it is or in another number format."""
    shapes = Shapes(given.sizes(), exact, fixed=fixed == "given")
    translator = Translator(shapes.names, exact, wholes=shapes.wholes, symbols=unknown == "symbol")
    data, device = Data(shapes), "cpu" if target is None else "cuda"
    turns = Loops(shapes, raised)
    recorder = Recorder(Values(translator), Scopes(module), data, turns, symbols=unknown == "symbol", device=device)
    place: Callable[[], AbstractContextManager[None]] = nullcontext
    if target is not None:
        recorder.kernels, recorder.stand_ins = KERNELS, {**recorder.stand_ins, **CUDA_STATISTICS}
        place = partial(on_cuda, Here(target, recorder.choices))
    run = Run(module, recorder, optimizer, place)
    with (
        FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True),
        plain_errors(),
        forgetting(recorder.left),
        borrowed(module, *given.others(), host=target is not None) as data.held,
        data.unseen(),
    ):
        fakes = given.fakes({n: shapes.named(n, size) for n, size in sizes.items()}, data, host=target is not None)
        if narrow:
            own = [*module.parameters(), *module.buffers(), *(t for t, _ in given.held.values())]
            fakes = narrowed(own, fakes)
        run.declare(fakes, given.kept(fakes))
        with recorder.scopes.watching(), torch.compiler.set_stance("force_eager"):
            run(*given.arguments(fakes), train=train)
    return shapes, run


def _usual_format(module: nn.Module) -> DType:
    """Return the floating format of most parameters: what a policy of precision changes; another is meant as it is."""
    counts: Counter[torch.dtype] = Counter()
    for parameter in module.parameters():
        counts[parameter.dtype] += parameter.numel() if parameter.is_floating_point() else 0
    [(usual, count)] = counts.most_common(1) or [(torch.float32, 0)]
    return format_of(usual if count else torch.float32)
