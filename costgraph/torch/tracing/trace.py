"""Trace an `nn.Module` into a graph, from one eager run on fake tensors."""

from __future__ import annotations

import gc
import logging
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from io import StringIO
from typing import Any

import sympy
import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from ...algebra.polynomial import poly
from ...algebra.symbols import shown
from ...dtypes import DType
from ...errors import CostGraphError, GraphError, UnsupportedError
from ...hardware.specs import DEFAULT, Arch, arch_of
from ...ir.graph import Graph, need_choice
from ...notation.grammar import parse_relation
from ...transforms.reroll import fold_turns, unlike
from .arguments import Axes, NamedArguments
from .build import Builder
from .call import Values, format_of
from .composites import uncompiled
from .cuda import CUDA_STATISTICS, KERNELS, ProgramDevice, on_cuda
from .data import Data
from .formats import Formats, narrowed
from .recorder import Handle, Recorder, Scopes, backward_passes, barriers, path_of
from .shapes import Shapes, alternatives, assumptions, is_program, location
from .sizes import Translator
from .state import attributes, borrowed, clearing_caches, elements, initialized, is_a, unpack_linears
from .symbolic_functions import SymbolicSizes
from .symbolic_range import Loops, ResizeError, open_integers

__all__ = [
    "Factory",
    "TraceRun",
    "plain_errors",
    "trace",
]


# -- run ---------------------------------------------------------------------------------------------------------------

Factory = Callable[[Any], torch.optim.Optimizer]

# torch logs the errors that `plain_errors` reports
_LOGGERS = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")


class TraceRun:
    """One recorded run of a module: the forward pass, optionally the backward pass and an optimizer step.

    Parameters
    ----------
    module : torch.nn.Module
        Module whose parameters are fake.
    recorder : Recorder
        Dispatch mode that records the calls.
    optimizer : callable or None
        Optimizer factory, called with the list of parameters.
    device : callable
        Context manager under which the program runs as on the traced device.
    """

    def __init__(
        self,
        module: nn.Module,
        recorder: Recorder,
        optimizer: Factory | None,
        device: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.module = module
        self.device = device
        self.recorder = recorder
        self.optimizer = optimizer
        self.params: dict[str, torch.Tensor] = {}
        self.outputs: list[Handle] = []
        self.gradients: dict[Handle, Handle] = {}
        self.formats = Formats(recorder)

    def declare(self, inputs: Mapping[str, object], cache: Mapping[str, torch.Tensor]) -> None:
        """Declare the sources: parameters, buffers, existing gradients, caches and inputs."""
        used_paths = set[str]()
        for name, t in (*self.module.named_parameters(), *self.module.named_buffers()):
            path = path_of(name)
            while path in used_paths:  # two names may differ only in characters that `path_of` replaces
                path += "_"
            used_paths.add(path)
            self.recorder.source(t, "param" if isinstance(t, nn.Parameter) else "buffer", path)
            if isinstance(t, nn.Parameter) and t.requires_grad:
                self.params[path] = t
                if t.grad is not None:
                    self.recorder.source(t.grad, "buffer", f"{path}/grad")
        for name, t in cache.items():
            self.recorder.source(t, "cache", name)
        for name, value in inputs.items():
            if isinstance(value, torch.Tensor) and name not in cache:
                self.recorder.source(value, "input", name)

    def __call__(self, args: list[object], kwargs: dict[str, object], *, train: bool) -> None:
        """Run the forward pass and, with `train`, the rest of a training step."""
        collecting = gc.isenabled()
        gc.disable()  # the collector would free reference cycles at arbitrary points of the run
        try:
            with (
                torch.set_grad_enabled(train), uncompiled(),
                SymbolicSizes(self.recorder.loop_state, None if train else self.formats),
                self.device(), self.recorder, backward_passes(self.recorder),
                nullcontext() if train else self.recorder.loop_state.patching_range(),
                nullcontext() if train else barriers(self.recorder),
            ):  # fmt: skip
                if train and any(p._post_accumulate_grad_hooks for p in self.params.values()):
                    with self.recorder.pausing():
                        self._warm(args, kwargs)
                outputs = list(_tensors(self.module(*args, **kwargs)))
                if train:
                    self._train(outputs)
                self.outputs = [self.recorder.handle_of(t) for t in outputs]
        finally:
            if collecting:
                gc.enable()

    def _warm(self, args: list[object], kwargs: dict[str, object]) -> None:
        """Run forward and backward unrecorded: an optimizer called by a hook creates its state in the first step."""
        grads = {p: p.grad for p in self.params.values()}
        for loss in self._loss(list(_tensors(self.module(*args, **kwargs)))):
            loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
        for p, grad in grads.items():
            p.grad = grad

    def _loss(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        if len(outputs) != 1 or outputs[0].numel() != 1 or not outputs[0].requires_grad:
            raise GraphError(
                f"trace: {type(self.module).__name__} returns {shown(outputs, 200)} with train=True; expected one "
                f"scalar loss that depends on a parameter"
            )
        return outputs

    def _train(self, outputs: list[torch.Tensor]) -> None:
        (loss,) = self._loss(outputs)
        self.recorder.phase = "backward"
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
        self.recorder.leaves.need_same((p, self.recorder.handle_of(p)) for p in self.params.values())
        self.gradients = {
            self.recorder.handle_of(p): self.recorder.handle_of(p.grad)
            for p in self.params.values()
            if p.grad is not None and p.numel()
        }
        if self.optimizer is not None:
            self._update(self.optimizer)

    def _update(self, make: Factory) -> None:
        self.recorder.phase = "optimizer"
        with self.recorder.pausing():
            optimizer = make(list(self.params.values()))
            optimizer.step()  # creates the state
        names = {id(p): name for name, p in self.params.items()}
        for p, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    self.recorder.source(value, "state", f"optimizer/{names[id(p)]}/{key}")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def build(self, graph: Graph, relations: Sequence[str]) -> Graph:
        """Add the recorded events to a graph and fold the iterations of loops over sizes into loops."""
        graph.assume(*relations)
        builder = Builder(graph, self.recorder.sources)
        builder.run(self.recorder.events)
        graph.output(*(builder.tensor(h) for h in self.outputs if h.numel))
        graph.gradients.update({builder.sources[p.storage]: builder.tensor(g) for p, g in self.gradients.items()})
        builder.finish()
        graph.freeze()
        loop_state = self.recorder.loop_state
        if not loop_state.loops:
            return graph
        if loop_state.broken:
            raise loop_state.fold_error("is left before its last iteration")
        try:
            return fold_turns(graph, builder.loop_labels.counted(loop_state, self.recorder.values.translator))
        except GraphError as error:
            raise loop_state.fold_error(str(error)) from error


def _tensors(value: Any, visited: tuple[int, ...] = ()) -> Iterator[torch.Tensor]:
    """Yield the tensors in a module's output, in containers and attributes of any depth."""
    if id(value) in visited:
        return
    if is_a(value, torch.Tensor):
        yield value
        return
    if is_a(value, dict | list | tuple):
        children = [v for _, v in elements(value)] if is_a(value, dict) else elements(value)
    else:
        children = list(value.values() if is_a(value, Mapping) else (attributes(value) or {}).values())
    for v in children:
        yield from _tensors(v, (*visited, id(value)))


@contextmanager
def plain_errors() -> Iterator[None]:
    """Reraise any error as one of this library that names the line of the program."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings():  # `deepcopy` compares data pointers, which are 0 for fake tensors
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            yield
    except CostGraphError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        innermost = [f for f in frames if is_program(f.filename)][-1:] or frames[-1:]
        raise UnsupportedError(
            f"{location(innermost[0].filename, innermost[0].lineno, innermost[0].name)}: {_cause(error)}"
        ) from error
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _cause(error: Exception) -> str:
    """Return the cause of an error in words, with the remedy."""
    if isinstance(error, GuardOnDataDependentSymNode | DataDependentOutputException | DynamicOutputShapeException):
        return (
            "depends on the values of a tensor, which are unknown in a trace; only buffers, and conditions on integer "
            "or boolean inputs, have known values"
        )
    if "symbolic sizes" in str(error):
        return (
            "calls a torch function that does not accept symbolic sizes; leave the axes of its operands unnamed (None)"
        )
    text = f"{type(error).__name__} {error}".lower()
    if any(word in text for word in ("nestedint", "nestedtensor", "nested tensor", "nested_tensor")):
        return (
            "creates a nested tensor, whose row lengths are data; pad the rows to one length, or pack them along "
            "one axis"
        )
    if "sparsetensor" in text or "sparse_" in text or "sparse csr" in text or "sparsecsr" in text:
        return "uses a sparse tensor, whose element positions are data; expected a dense tensor; call `.to_dense()`"
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {shown(first, 300)}; the program must run on tensors without data"


# -- trace -------------------------------------------------------------------------------------------------------------

#: Number of new hints tried per size: several loops may each request one.
_MAX_RESIZES = 6


@dataclass(frozen=True)
class Options:
    """Options of a trace that decide data-dependent and size-dependent branches."""

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

    Nothing is computed and the module is left unchanged. Each op that torch dispatches below autograd becomes an op of
    the graph. Storages live as long as in the eager run, where Python variables and autograd's saved tensors hold them.

    Parameters
    ----------
    module : torch.nn.Module or torch.export.ExportedProgram
        Module to call, in its current mode (`train()` or `eval()`). Compiled modules and exported programs are
        unwrapped. Parameters may be on any device, `meta` included, or fake.
    *inputs : torch.Tensor or other
        Positional arguments. Only the shape, layout and dtype of tensors matter.
    dims : sequence, optional
        For each of `inputs`, a sequence with a name or None per axis, or None for an argument without named axes.
        Equal names denote equal sizes.
    train : bool
        Whether to run the backward pass too; the module must return a scalar loss. Otherwise gradients are off.
    optimizer : callable, optional
        Factory `optimizer(parameters)` of the optimizer whose step runs after the backward pass. Its state is that
        left by a first step. Gradients are set to None afterwards.
    keywords, keyword_dims : mapping, optional
        Keyword arguments, and the axis names of the tensors among them.
    cached : sequence of str
        Names of arguments kept between inference steps: tensors, or objects that hold tensors, such as a KV cache of
        transformers; `dims` then names the axes of the tensors inside. `decode` turns such a trace into a decode step.
    unknown : str
        Treatment of ops without a rule: `error`, or `symbol`, which adds the positive symbols `matmul_flops_NAME`,
        `pointwise_flops_NAME` and `transcendental_flops_NAME` to the FLOPs (bind 1 where there are none). Operands and
        results are then moved once, without a workspace.
    fixed : str
        Treatment of a named size that the program turns into a number: `error`, or `given`, which assumes the given
        size and unrolls loops over it. With `error`, a loop over a size whose iterations are alike becomes a loop of
        the graph; in a training step (`train=True`) it is refused.
    data_sizes : str
        Treatment of data-dependent sizes: `symbol` names each after its origin and assumes its upper bound, as
        `mask_1 <= N` for elements that a mask or `nonzero` selects, `unique_1`, `bincount_1`, or `max_1` for a size
        read from `lengths.max()`; `error` refuses them.
    choose : mapping, optional
        Values that the program reads from tensors, by the op that produced the tensor. With `{"rand": 0.5}`,
        `torch.rand(1).item()` is 0.5, which decides whether a layer is dropped; with `{"all": True}`,
        `if mask.all()` takes its first branch; `{"equal": False}` answers `torch.equal`. Without a choice, a tensor
        equals itself (as if it held no NaN), and tensors of different shapes are unequal.
    name : str
        Name of the graph; defaults to the class of the module.
    device : str
        `cpu` keeps the devices of module and inputs (CPU for tensors without data). `cuda` puts everything on a GPU;
        none is needed, since torch's own conditions select the kernels (`costgraph.torch.dispatched` lists each
        selection and its rule).
    arch : str, optional
        Compute capability of the GPU as torch names it; defaults to sm_90.

    Returns
    -------
    Graph
        Graph with declared op kinds, and `custom_call` ops with stated costs where no kind describes a call. Module
        paths are scopes. `costgraph.torch.lower` turns the graph back into calls.

    Raises
    ------
    GraphError, ShapeError
        If names do not fit the inputs, the module returns no scalar with `train=True`, or the device is unknown.
    UnsupportedError
        If an op has no rule, the program turns a named size into a number, or the iterations of a loop over a size
        differ. The message names the line.

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
    for op, choice in (choose or {}).items():
        if not isinstance(op, str) or not isinstance(choice, int | float):
            raise GraphError(
                f"trace: choose maps {shown(op)} to {shown(choice)}; expected op names with a number or a boolean each"
            )
    if arch is not None and device == "cpu":
        raise GraphError(f"trace: arch {shown(arch)} requires device='cuda'")
    target = arch_of(DEFAULT if arch is None else arch, "trace") if device == "cuda" else None
    if isinstance(module, ExportedProgram):
        module = module.module()
    if not isinstance(module, nn.Module):
        raise GraphError(f"trace: got {type(module).__name__}, expected a torch.nn.Module, or an exported program")
    if optimizer is not None and not train:
        raise GraphError("trace: an optimizer requires train=True, since its step needs gradients")
    module = module._orig_mod if isinstance(module, OptimizedModule) else module
    module = initialized(module, inputs, dict(keywords or {}))
    arguments = NamedArguments(module, inputs, dims, dict(keywords or {}), dict(keyword_dims or {}), cached)
    graph = partial(Graph, name or type(module).__name__, dtype=_usual_format(module))
    options = Options(unknown, fixed, data_sizes, dict(choose or {}))
    return _traced(module, arguments, optimizer, target, graph, options, train=train)


def _traced(
    module: nn.Module,
    arguments: NamedArguments,
    optimizer: Factory | None,
    target: Arch | None,
    graph: Callable[[], Graph],
    options: Options,
    *,
    train: bool,
) -> Graph:
    """Run a module as often as needed: exact quotients, number formats and loops are settled by further runs."""
    record_run = partial(_recorded, module, arguments, optimizer, target, options, train=train)
    exact = frozenset[sympy.Expr]()
    integers = False
    try:
        sizes, shapes, run = _first_run(record_run, arguments.sizes())
    except UnsupportedError as error:
        integers = True
        record_run = partial(record_run, integers=True)
        try:
            with redirect_stdout(StringIO()):
                sizes, shapes, run = _first_run(record_run, arguments.sizes())
        except CostGraphError:
            raise error from error.__cause__
    if shapes.exact:  # now known from the start
        exact = frozenset(shapes.exact)
        with redirect_stdout(StringIO()):
            shapes, run = record_run(sizes, exact=exact)
    narrow = partial(_recorded, module, arguments, None, target, options, narrow=True, exact=exact, integers=integers)
    _settle_formats(run, narrow, sizes)
    relations = assumptions(shapes, run.recorder.values.translator)
    if not run.recorder.loop_state.loops:
        return run.build(graph(), relations)
    sizes |= run.recorder.loop_state.next_sizes()
    with redirect_stdout(StringIO()):
        shapes, rerun = record_run(sizes, exact=exact)
    _settle_formats(rerun, narrow, sizes)
    relations_elsewhere = assumptions(shapes, rerun.recorder.values.translator)
    relations = [text for text in relations if text in relations_elsewhere]
    traced = run.build(graph(), relations)
    difference = unlike(traced, rerun.build(graph(), relations))
    if difference is not None:
        raise run.recorder.loop_state.fold_error(f"its iterations differ at other sizes: {difference}")
    return traced


def _settle_formats(run: TraceRun, narrow: Callable[..., tuple[Shapes, TraceRun]], sizes: Mapping[str, int]) -> None:
    """Find which casts follow the model's number format, by a run in another one.

    A run at plain numbers takes a third of the time and usually issues the same casts. Programs that branch differently
    there, such as those with loops over sizes, are run with symbols.
    """
    if not run.formats.casts:
        return
    same_path = bool(sizes) and not run.recorder.loop_state.loops and not run.formats.replaced
    # the program may fail in another format; its output was printed by the first run
    with suppress(CostGraphError), redirect_stdout(StringIO()):
        if same_path and run.formats.settle(narrow(sizes, numbers=True)[1].formats):
            return
    with suppress(CostGraphError), redirect_stdout(StringIO()):
        run.formats.settle(_run_at_loop_sizes(narrow, dict(sizes))[1].formats)


def _first_run(
    record_run: Callable[..., tuple[Shapes, TraceRun]], named_sizes: Mapping[str, int]
) -> tuple[dict[str, int], Shapes, TraceRun]:
    """Run at the first candidate sizes whose path also holds at the given sizes, else at the first accepted ones."""
    accepted: list[tuple[dict[str, int], Shapes, TraceRun]] = []
    failed: UnsupportedError | None = None
    for sizes in alternatives(named_sizes):
        try:
            with redirect_stdout(StringIO()) if accepted or failed else nullcontext():
                shapes, run = _run_at_loop_sizes(record_run, sizes)
        except UnsupportedError as error:
            if error.__cause__ is None or isinstance(error.__cause__, CostGraphError):
                raise  # refused by the trace at any size
            failed = failed or error
            continue
        accepted.append((sizes, shapes, run))
        if _holds_at(named_sizes, shapes, run):
            return accepted[-1]
    if not accepted and failed is not None:
        raise failed
    return accepted[0]


def _holds_at(named_sizes: Mapping[str, int], shapes: Shapes, run: TraceRun) -> bool:
    """Return whether the assumptions of a run hold at the given sizes."""
    bindings = {n: poly(size) for n, size in named_sizes.items()}
    try:
        for text in assumptions(shapes, run.recorder.values.translator):
            parse_relation(text).check(bindings)
    except CostGraphError:
        return False
    return True


def _run_at_loop_sizes(
    record_run: Callable[..., tuple[Shapes, TraceRun]], sizes: dict[str, int]
) -> tuple[Shapes, TraceRun]:
    """Run at sizes that give loops over them a few iterations; update `sizes` to those."""
    original, raised = dict(sizes), set[str]()
    for _ in range(_MAX_RESIZES * len(sizes)):
        try:
            shapes, run = record_run(sizes, raised=raised)
        except ResizeError as error:
            if error.size > sizes[error.name]:
                raised.add(error.name)
            sizes[error.name] = error.size
            continue
        if not _holds_at(original, shapes, run):  # the program takes another path there
            break
        return shapes, run
    sizes.update(original)
    return record_run(sizes)


def _recorded(
    module: nn.Module,
    arguments: NamedArguments,
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
) -> tuple[Shapes, TraceRun]:
    """Run a module under a recorder, in its own number format or, with `narrow`, in another one."""
    shapes = Shapes(arguments.sizes(), exact, fixed=options.fixed == "given")
    symbols = options.data_sizes == "symbol"
    translator = Translator(
        shapes.names, exact, block_counts=shapes.block_counts, symbols=symbols, data_sizes=shapes.data_sizes
    )
    data, device = Data(shapes, options.choose), "cpu" if target is None else "cuda"
    loop_state = Loops(shapes, raised)
    recorder = Recorder(
        Values(translator), Scopes(module), data, loop_state, symbols=options.unknown == "symbol", device=device
    )
    device_context: Callable[[], AbstractContextManager[None]] = nullcontext
    if target is not None:
        recorder.kernels, recorder.stand_ins = KERNELS, {**recorder.stand_ins, **CUDA_STATISTICS}
        device_context = partial(on_cuda, ProgramDevice(target, recorder.choices))
    run = TraceRun(module, recorder, optimizer, device_context)
    integers_context = open_integers(module) if integers else nullcontext()
    with (
        FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True),
        plain_errors(),
        clearing_caches(recorder.has_live_storages),
        borrowed(module, *arguments.non_tensors(), host=target is not None) as data.real_data,
        data.hide_fake_tensors(),
    ):
        named = {n: size if numbers else shapes.named(n, size) for n, size in sizes.items()}
        fakes = arguments.fakes(named, data, host=target is not None)
        unpack_linears(module)
        if narrow:
            tensors = [*module.parameters(), *module.buffers(), *(t for t, _ in arguments.nested.values())]
            fakes = narrowed(tensors, fakes)
        run.declare(fakes, arguments.cache_tensors(fakes))
        with recorder.scopes.tracking(), torch.compiler.set_stance("force_eager"), integers_context:
            run(*arguments.arguments(fakes), train=train)
    return shapes, run


def _usual_format(module: nn.Module) -> DType:
    """Return the floating format of most parameters, which a precision policy changes; other formats are deliberate."""
    counts: Counter[torch.dtype] = Counter()
    for parameter in module.parameters():
        counts[parameter.dtype] += parameter.numel() if parameter.is_floating_point() else 0
    [(usual, count)] = counts.most_common(1) or [(torch.float32, 0)]
    return format_of(usual if count else torch.float32)
