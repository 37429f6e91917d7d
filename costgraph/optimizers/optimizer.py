"""Optimizer base class: slots, block-quantized states, loops over parameters, and the update implementations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from types import MappingProxyType
from typing import ClassVar

from ..algebra.polynomial import ONE, Poly
from ..dtypes import DType, dtype
from ..errors import GraphError, ShapeError
from ..ir.graph import (
    Graph,
    Storage,
    Tensor,
    apply,
    bindings,
    building,
    current_graph,
    need_choice,
    need_flag,
    opened,
    phase,
    scope,
)
from ..ir.strides import Sizes, numel, windows_along
from ..ops.elementwise import FUNCTIONS, Function, Pointwise, cast, pointwise
from ..ops.fill import assign
from ..ops.fourier import view_as
from ..ops.layout import KeepAlive, keep_alive
from ..ops.loops import each, fused
from ..ops.reduce import reduce
from ..ops.updates import (
    ADD_PRODUCT,
    ADD_QUOTIENT,
    ADD_SCALED,
    ADD_SCALED_PRODUCT,
    ADD_SCALED_QUOTIENT,
    FusedUpdate,
    RegisterStep,
)

__all__ = [
    "Slot",
    "declare_state",
    "in_parts",
    "need_slots",
    "pieces",
    "source_like",
    "norm",
    "root_mean_square",
    "STATES",
    "BlockStates",
    "over",
    "Calls",
    "Column",
    "Update",
    "one_by_one",
    "fused_update",
    "COUNTERS",
    "IMPLEMENTATIONS",
    "Optimizer",
    "bounds",
]


# -- slots -------------------------------------------------------------------------------------------------------------


def pieces(t: Tensor) -> int:
    """Return the number of leading axes that index separate tensors: 1 for a parameter of a layer stack, else 0."""
    return t.storage.pieces


def declare_state(graph: Graph, name: str, sizes: Sequence[object], dtype: str | DType, role: str = "state") -> Tensor:
    """Declare a persistent tensor under its own name, whatever scope is open."""
    with opened(graph=graph.root, levels=()):
        return graph.root.buffer(name, sizes, dtype, role=role)


def source_like(param: Tensor, name: str, sizes: Sequence[object], dtype: str | DType, role: str = "state") -> Tensor:
    """Declare state, or a persistent gradient, for a parameter, with one storage per stacked layer."""
    # use the declared tensor's name; results of in-place ops are named after the op
    state = declare_state(param.graph, f"{param.storage.name}.{name}", sizes, dtype, role)
    state.storage = Storage(state.name, state.sizes, state.dtype, role, pieces(param))
    return state


@dataclass(frozen=True)
class Slot:
    """A parameter with its gradient and optimizer state.

    Examples
    --------
    >>> import costgraph as cg
    >>> from costgraph.optimizers import AdamW, Slot
    >>> N = cg.dims("N")
    >>> with cg.Graph("g") as g:
    ...     slots = AdamW().update([Slot(g.param("w", (N,)), g.input("w.grad", (N,)))])
    >>> [t.name for t in g.tensors if t.role == "state" and t.producer is None]
    ['w.exp_avg', 'w.exp_avg_sq']
    """

    param: Tensor
    """Parameter, updated in place; for a layer stack all layers along the first axis."""
    grad: Tensor
    """Gradient, with the same shape, possibly in another dtype."""
    master: Tensor | None = None
    """Master copy in a wider dtype: it is updated instead, and its values are then assigned to the parameter."""
    moments: DType | None = None
    """Dtype of parameter-shaped states, by default that of the updated tensor."""
    declare: Callable[[str, Sequence[object], str | DType], Tensor] | None = None
    """Declares a state from name, sizes and dtype, by default next to the parameter."""

    def __post_init__(self) -> None:
        for label, t in (("grad", self.grad), ("master", self.master)):
            if t is None and label == "master":
                continue
            if not isinstance(t, Tensor) or not isinstance(self.param, Tensor):
                raise GraphError(f"slot of {self.param!r}: {label} {t!r}, expected a parameter and its tensors")
            same = self.param.graph.root.same
            if t.ndim != self.param.ndim or not all(map(same, t.sizes, self.param.sizes)):
                raise ShapeError(f"slot of {self.param!r}: {label} {t!r}, expected the parameter's shape")

    @property
    def updated(self) -> Tensor:
        """Tensor to update: the master copy if there is one, else the parameter."""
        return self.param if self.master is None else self.master

    def state(self, name: str, sizes: Sequence[object] | None = None, dtype: str | DType | None = None) -> Tensor:
        """Declare optimizer state, a persistent tensor, by default like the updated tensor.

        Parameters
        ----------
        name : str
            Suffix, joined to the parameter's name by a dot.
        sizes : sequence of sizes, optional
            Shape, by default the parameter's; for a layer stack including the layer axis.
        dtype : str or DType, optional
            Dtype, by default `moments` or that of the updated tensor.

        Returns
        -------
        Tensor
            With role state.

        Raises
        ------
        GraphError, ShapeError, FormatError
            If the name is taken, or a size or the dtype is invalid.
        """
        shape = self.updated.sizes if sizes is None else sizes
        format_ = self.moments or self.updated.dtype if dtype is None else dtype
        declare = partial(source_like, self.param) if self.declare is None else self.declare
        return declare(name, shape, format_)

    def axes(self) -> Sizes:
        """Return one parameter's shape, without the layer axes of a stack."""
        return self.param.sizes[pieces(self.param) :]

    def layers(self) -> Sizes:
        """Return a stack's layer axes, empty for a single parameter."""
        return self.param.sizes[: pieces(self.param)]

    def factor(self, axis: int) -> Sizes:
        """Return the parameter's shape with size 1 along one axis (negative index): row or column statistics."""
        sizes = list(self.param.sizes)
        sizes[axis] = ONE
        return tuple(sizes)


def in_parts(slot: Slot) -> Slot:
    """Return a slot with complex tensors viewed as real pairs, as torch's optimizers do."""
    if slot.param.dtype.kind != "complex":
        return slot
    param, grad = (view_as(t, "real") for t in (slot.param, slot.grad))
    return replace(slot, param=param, grad=grad, moments=None if slot.moments == slot.param.dtype else slot.moments)


def need_slots(place: str, slots: object) -> list[Slot]:
    """Return the slots as a list, or raise GraphError if they are empty or invalid."""
    checked = list(slots) if isinstance(slots, list | tuple) else []
    if not checked or not all(isinstance(s, Slot) for s in checked):
        raise GraphError(f"{place}: slots {slots!r}, expected a nonempty list of Slot")
    return checked


# -- norms -------------------------------------------------------------------------------------------------------------


def _root_of_squares(x: Tensor, axis: int | None, operation: str, name: str) -> Tensor:
    names = [f"a{i}" for i in range(x.ndim)]
    kept_names = ["1" if axis is not None and i == axis % x.ndim else n for i, n in enumerate(names)]
    pattern = f"{' '.join(names)} -> {'' if axis is None else ' '.join(kept_names)}"

    def body(x: Tensor) -> Tensor:
        squares = pointwise("square", x)
        return pointwise("sqrt", reduce(squares, pattern, operation) if x.ndim else squares)

    result = fused(name, body, x)
    assert isinstance(result, Tensor)
    return result


def norm(x: Tensor, axis: int | None = None) -> Tensor:
    """Return the 2-norm over all elements, or along one axis, kept with size 1; one kernel."""
    return _root_of_squares(x, axis, "sum", "norm")


def root_mean_square(x: Tensor, axis: int | None = None) -> Tensor:
    """Return the root mean square over all elements, or along one axis, kept with size 1; one kernel."""
    return _root_of_squares(x, axis, "mean", "norm")


# -- block-quantized states --------------------------------------------------------------------------------------------
# 8-bit Adam, Dettmers et al. 2021 (arXiv 2110.02861). One kernel looks up each code in a table, multiplies it by the
# block's scale, updates, takes the largest magnitude in the block as the new scale, and writes the nearest codes.


@dataclass(frozen=True, kw_only=True)
class BlockStates:
    """Block-quantized optimizer state, as a library keeps it for large tensors, and the dtype for small ones.

    Sizes decide which tensors are large, open ones by their defaults; tensors of unknown size are large. The decision
    becomes an assumption of the graph: binding a size that violates it is an error.

    Raises
    ------
    GraphError, FormatError
        If the format is unknown or has no blocks, or a number is invalid.

    Examples
    --------
    >>> import costgraph as cg
    >>> with cg.Graph("g") as g:
    ...     x = g.input("x", (7, 128)) @ g.param("w", (128, 256))
    ...     g.output(cg.reduce(x @ g.param("v", (256, 10)), "b c -> ", "mean"))
    >>> step = cg.training_step(g, optimizer=cg.AdamW(implementation="fused", states="bitsandbytes-8bit"))
    >>> w, v = 128 * 256, 2560  # the second is small
    >>> cg.state_bytes(step).state == 2 * (w + 4 * w // 256) + 2 * 4 * v + 2 * 4 * 256
    True
    """

    format: str
    """format of large tensors' states, with one scale per block"""
    table: int = 0
    """fp32 entries in the lookup table for codes; 0 if codes are numbers themselves"""
    shared: bool = False
    """whether all tensors share one table per kind of state, instead of one table per state"""
    only_whole: bool = False
    """whether tensors with an incomplete block also count as small"""
    small: str | None = None
    """format of small tensors' states, by default the parameter's"""
    least: int = 4096
    """least number of elements in a large tensor"""

    def __post_init__(self) -> None:
        if not dtype(self.format).block:
            raise GraphError(f"BlockStates: format {self.format!r}, expected a block format")
        for name, value in (("table", self.table), ("least", self.least)):
            if type(value) is not int or value < 0:
                raise GraphError(f"BlockStates: {name} is {value!r}, expected a nonnegative integer")

    def format_of(self, slot: Slot) -> DType:
        """Return the format of a parameter's states."""
        if self._is_large(slot.param):
            return dtype(self.format)
        return slot.updated.dtype if self.small is None else dtype(self.small)

    def _is_large(self, param: Tensor) -> bool:
        graph, n = param.graph.root, numel(param.sizes[pieces(param) :])
        block = dtype(self.format).block or 1
        default_elements = n.bind(bindings(graph, {})).constant
        blocks = windows_along(n, 0, block)
        if graph.relations.nonnegative(self.least - 1 - n):
            return False
        large = (
            graph.relations.nonnegative(n - self.least) or default_elements is None or default_elements >= self.least
        )
        if not graph.relations.nonnegative(n - self.least if large else self.least - 1 - n):
            graph.assume(f"{n.expr} >= {self.least}" if large else f"{n.expr} < {self.least}")
        if not large or not self.only_whole or graph.same(blocks, n / block):
            return large
        if default_elements is not None and default_elements % block:
            return False
        graph.assume(f"{blocks.expr} == {(n / block).expr}")
        return True

    def holds(self, state: Tensor) -> bool:
        """Return whether a state is block-quantized."""
        return state.dtype.name == dtype(self.format).name

    def own_tables(self, slots: Sequence[Slot], states: Sequence[tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
        """Declare lookup tables per state; none if tables are shared."""
        return [
            tuple(
                slot.state(f"{t.name.rpartition('.')[2]}.table", (*slot.layers(), self.table), "fp32")
                for t in (slot_states if self.table and not self.shared else ())
                if self.holds(t)
            )
            for slot, slot_states in zip(slots, states, strict=True)
        ]

    def common_tables(self, states: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Declare the shared lookup tables, one per kind of block-quantized state."""
        first_states = next(
            (slot_states for slot_states in states if self.shared and self.table and any(map(self.holds, slot_states))),
            (),
        )
        return tuple(self._shared_table(t, i) for i, t in enumerate(first_states))

    def _shared_table(self, state: Tensor, i: int) -> Tensor:
        name = f"table{i + 1}"
        existing = next((t for t in state.graph.root.tensors if t.name == name and t.role == "state"), None)
        return declare_state(state.graph, name, (self.table,), "fp32") if existing is None else existing


#: bitsandbytes since 0.45 (`bitsandbytes/optim/optimizer.py`, `Optimizer2State.init_state`; blocks had 2,048 elements
#: before), and torchao (`torchao/optim/adam.py`, `_AdamBase._new_buffer`; `subclass_8bit.py`, `subclass_4bit.py`,
#: `subclass_fp8.py`).
STATES: Mapping[str, BlockStates] = MappingProxyType({
    "bitsandbytes-8bit": BlockStates(format="uint8_g256_fp32_flat", table=256, shared=True, small="fp32"),
    "torchao-8bit": BlockStates(format="uint8_g256_fp32_flat", table=256, only_whole=True),
    "torchao-4bit": BlockStates(format="uint4_g128_fp32_flat", table=16, only_whole=True),
    "torchao-fp8": BlockStates(format="fp8_e4m3_g256_fp32_flat", only_whole=True),
})  # fmt: skip


# -- loops over parameters ---------------------------------------------------------------------------------------------

FunctionResult = Tensor | tuple[Tensor, ...] | None
Group = tuple[Tensor, ...]


def over(groups: Sequence[Group], function: Callable[..., FunctionResult], name: str) -> list[Group]:
    """Apply a function to each group of tensors in turn; layer stacks become loops over their layers.

    Parameters
    ----------
    groups : sequence of tuple of Tensor
        Tensors, one tuple per parameter; for a layer stack with the layers along the first axis.
    function : callable
        `function(*group)`, called with one layer's tensors for a stack: adds ops and returns new tensors, mutated
        operands, or None.
    name : str
        Name of the loop over layers; neighbouring stacks with equally many layers share one.

    Returns
    -------
    list of tuple of Tensor
        Results for each group; read mutated operands through these from then on.

    Raises
    ------
    GraphError
        If a group mixes tensors of a layer stack with others.

    Examples
    --------
    >>> import costgraph as cg
    >>> from costgraph.optimizers import over
    >>> N = cg.dims("N")
    >>> with cg.Graph("g") as g:
    ...     w = g.param("w", (N,))
    ...     ((half,),) = over([(w,)], lambda w: cg.ops.pointwise("mul", w, 0.5, inplace=True), "halve")
    >>> half.storage is w.storage
    True
    """
    results: list[Group] = []
    for layers, run in _runs(groups, name):
        if layers is None:
            results += [_tuple(function(*group)) for group in run]
        else:
            results += _stack(layers, run, function, name)
    return results


def _runs(groups: Sequence[Group], name: str) -> Iterator[tuple[Poly | None, list[Group]]]:
    """Yield runs of groups that can share a loop, with their number of layers, or None outside stacks."""
    run: list[Group] = []
    current: Poly | None = None
    for group in groups:
        layers = _layers(group, name)
        if run and layers != current:
            yield current, run
            run = []
        current = layers
        run.append(group)
    if run:
        yield current, run


def _layers(group: Group, name: str) -> Poly | None:
    counts = {t.sizes[0] if pieces(t) else None for t in group}
    if len(counts) != 1:
        raise GraphError(f"{name}: {group!r}, expected all tensors in the same layer stack, or none in a stack")
    return counts.pop()


def _stack(layers: Poly, run: list[Group], function: Callable[..., FunctionResult], name: str) -> list[Group]:
    """Run a loop over layers, whose body updates all parameters of one layer; stacks may nest."""
    lengths: list[int] = []

    def step(*slices: Tensor) -> Group:
        start = 0
        slice_groups = []
        for group in run:
            slice_groups.append(slices[start : start + len(group)])
            start += len(group)
        stacked = over(slice_groups, function, name)
        lengths.extend(map(len, stacked))
        return tuple(t for group in stacked for t in group)

    stacked = each(layers, step, tuple(t for group in run for t in group), name=name)
    results, start = [], 0
    for n in lengths:
        results.append(stacked[start : start + n])
        start += n
    return results


def _tuple(result: FunctionResult) -> Group:
    return () if result is None else result if isinstance(result, tuple) else (result,)


# -- foreach calls -----------------------------------------------------------------------------------------------------
# Updates are written as calls on columns, which hold one tensor per parameter. In a loop over parameters a column has
# one tensor; for torch's foreach kernels it has all of them, so temporaries exist for the whole list until last use.

Column = tuple[Tensor, ...]
#: Adds an update; returns the columns of updated tensors and of their gradients afterwards.
Update = Callable[..., tuple[Column, Column]]


def _apply_each(groups: Sequence[Column], function: Callable[..., FunctionResult], name: str) -> list[Column]:
    """Apply a function to single-parameter columns, inside a loop."""
    results = []
    for group in groups:
        result = function(*group)
        results.append(() if result is None else result if isinstance(result, tuple) else (result,))
    return results


class Calls:
    """Adds ops on columns of tensors; if `listed`, one for the whole list, as torch's `_foreach` functions."""

    def __init__(self, *, listed: bool) -> None:
        self.listed = listed
        self._over = over if listed else _apply_each

    def each(self, name: str, function: Callable[..., FunctionResult], *columns: Column) -> tuple[Column, ...]:
        """Call a function on one tensor per column; return one column per result."""
        results = self._over(list(zip(*columns, strict=True)), function, name)
        return tuple(zip(*results, strict=True))

    def new(self, function: str | Function, *operands: Column | float) -> Column:
        """Apply an elementwise function to columns and scalars."""
        return self._call(function, operands, inplace=False)

    def inplace(self, function: str | Function, *operands: Column | float) -> Column:
        """Apply an elementwise function in place to the first column; return the column to read from then on."""
        return self._call(function, operands, inplace=True)

    def _call(self, function: str | Function, operands: Sequence[Column | float], *, inplace: bool) -> Column:
        record = FUNCTIONS[function] if isinstance(function, str) else function
        columns = [o for o in operands if isinstance(o, tuple)]

        def call(*tensors: Tensor) -> Tensor:
            remaining = iter(tensors)
            arguments = [next(remaining) if isinstance(o, tuple) else o for o in operands]
            # as in torch, the mutated tensor keeps its dtype
            dtype = tensors[0].dtype if inplace else None
            return pointwise(record, *arguments, inplace=inplace, dtype=dtype)

        name = f"{record.name}_" if inplace else record.name
        return self.each(name, call, *columns)[0]

    # -- torch's functions with a factor, which is free if it is 1 ------------------------------------------------

    def add(self, a: Column, b: Column, alpha: float, *, inplace: bool = False) -> Column:
        """Return `a + alpha * b`."""
        return self._call(*(("add", (a, b)) if alpha == 1 else (ADD_SCALED, (a, b, alpha))), inplace=inplace)

    def addcmul(self, a: Column, b: Column, c: Column, value: float) -> Column:
        """Return `a + value * b * c`."""
        return self.new(ADD_SCALED_PRODUCT, a, b, c, value)

    def addcmul_(self, a: Column, b: Column, c: Column, value: float = 1) -> Column:
        """Add `value * b * c` to `a` in place."""
        return self.inplace(ADD_PRODUCT, a, b, c) if value == 1 else self.inplace(ADD_SCALED_PRODUCT, a, b, c, value)

    def addcdiv_(self, a: Column, b: Column, c: Column, value: float = 1) -> Column:
        """Add `value * b / c` to `a` in place."""
        return self.inplace(ADD_QUOTIENT, a, b, c) if value == 1 else self.inplace(ADD_SCALED_QUOTIENT, a, b, c, value)

    def keep(self, x: Column, *others: Column) -> Column:
        """Keep tensors alive that local variables of a for-loop reference; foreach lists are deleted explicitly."""
        return x if self.listed or not others else self.each("keep_alive", keep_alive, x, *others)[0]


def one_by_one(update: Update, groups: Sequence[Column], name: str) -> list[Column]:
    """Run a whole update per parameter in turn; return each updated tensor and gradient."""
    calls = Calls(listed=False)

    def single(*group: Tensor) -> Column:
        updated, grad = update(calls, *((t,) for t in group))
        return updated + grad

    return over(groups, single, name)


# -- fused updates -----------------------------------------------------------------------------------------------------
# One kernel reads every tensor once and writes the parameter and its state in place. Its steps are recorded from the
# unfused update, so FLOPs are equal; intermediates stay in registers.


def fused_update(update: Update, group: Column, extra_inputs: Column = (), *, name: str) -> Column:
    """Run one parameter's elementwise update in a single kernel.

    `group` is the updated tensor, its gradient and its states; `extra_inputs` are others such as a step counter.
    """
    steps, changed = _steps(update, group)
    kind = FusedUpdate(steps=steps, changed=changed, updated=len(group))
    updated = dict(zip(changed, apply(kind, [*group, *extra_inputs], name), strict=True))
    return tuple(updated.get(i, t) for i, t in enumerate(group))


def _steps(update: Update, group: Column) -> tuple[tuple[RegisterStep, ...], tuple[int, ...]]:
    """Record an update as steps on registers, the first of which hold the operands."""
    with Graph("update") as scratch:
        scratch.relations = group[0].graph.root.relations
        inputs = [scratch.input(f"operand{i}", t.sizes, t.dtype) for i, t in enumerate(group)]
        update(Calls(listed=False), *((t,) for t in inputs))
    registers = {t: i for i, t in enumerate(inputs)}
    steps: list[RegisterStep] = []
    next_register = len(inputs)
    for op in scratch.ops:
        if isinstance(op.kind, KeepAlive):  # no effect in registers
            registers[op.results[0]] = registers[op.operands[0]]
            continue
        if not isinstance(op.kind, Pointwise):
            raise GraphError(f"fused update: op {op.name!r} of kind {op.kind.name!r}, expected elementwise ops only")
        places = tuple(registers[t] for t in op.operands)
        target = places[0] if op.kind.overwrites() else next_register
        next_register += target == next_register
        registers[op.results[0]] = target
        steps.append(RegisterStep(op.kind.function, op.kind.scalars or (None,) * len(places), places, target))
    targets = {step.target for step in steps}
    return tuple(steps), tuple(i for i in range(len(inputs)) if i in targets)


# -- optimizer ---------------------------------------------------------------------------------------------------------

#: One call for a list of parameters, a loop over parameters, or one fused kernel per parameter.
IMPLEMENTATIONS = ("foreach", "for-loop", "fused")
#: Memory of the step counter: torch's fused kernels read it on the device, the others on the host.
COUNTERS = ("host", "device")


def bounds(place: str, **values: tuple[float, float, float]) -> None:
    """Raise GraphError unless each value is a number within its bounds (value, least, most)."""
    for name, (value, low, high) in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise GraphError(f"{place}: {name} is {value!r}, expected a number from {low} to {high}")


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Base class of optimizers: the ops that update a parameter, and the states that it keeps.

    Hyperparameters such as the learning rate are host numbers and cost nothing. Temporaries die after the last op that
    reads them; in torch's for-loop, those referenced by a local variable live until the next parameter.
    """

    #: Available implementations, torch's if it has the optimizer.
    available: ClassVar[tuple[str, ...]] = IMPLEMENTATIONS
    #: Whether it counts steps.
    counts: ClassVar[bool] = False

    lr: float = 1e-3
    """Learning rate."""
    implementation: str = "foreach"
    """One of foreach, for-loop and fused."""
    counters: str | None = None
    """Step counter memory: host, without device memory, or device, with 4 bytes per parameter tensor. By default as
    in torch: on the device if fused."""
    step: int = 2
    """Step number, which sets constants in the update but no costs; steps after the first are alike."""
    states: str | BlockStates | None = None
    """Block-quantized states: bitsandbytes-8bit, torchao-8bit, torchao-4bit, torchao-fp8, or a `BlockStates`. Needs
    fused kernels; steps are then counted on the host."""

    def __post_init__(self) -> None:
        place = type(self).__name__
        need_choice(f"{place}: implementation", self.implementation, IMPLEMENTATIONS)
        if self.implementation not in self.available:
            raise GraphError(
                f"{place}: implementation {self.implementation!r}, expected one of {', '.join(self.available)}: it has "
                f"no others"
            )
        bounds(place, lr=(self.lr, 0, float("inf")), step=(self.step, 1, float("inf")))
        if self.counters is not None:
            need_choice(f"{place}: counters", self.counters, COUNTERS)
        if self.counters == "device" and self.implementation != "fused":
            raise GraphError(
                f"{place}: counters 'device' with implementation {self.implementation!r}, expected 'host': values "
                f"that depend on the step are computed on the host"
            )
        self._check_states(place)
        need_flag(place, **{f.name: getattr(self, f.name) for f in fields(self) if f.type == "bool"})

    def _check_states(self, place: str) -> None:
        if self.states is None:
            return
        if not isinstance(self.states, BlockStates):
            need_choice(f"{place}: states", self.states, tuple(STATES))
        if self.implementation != "fused":
            raise GraphError(
                f"{place}: block-quantized states with implementation {self.implementation!r}, expected 'fused': one "
                "kernel "
                f"per parameter reads and writes them"
            )
        if self.counters == "device":
            raise GraphError(f"{place}: counters 'device' with block-quantized states, expected 'host'")

    @property
    def _blocks(self) -> BlockStates | None:
        return STATES[self.states] if isinstance(self.states, str) else self.states

    # -- to be defined by subclasses -------------------------------------------------------------------------------

    def _states(self, slot: Slot) -> Column:
        """Declare a parameter's states."""
        raise NotImplementedError

    def _update(self, calls: Calls, p: Column, g: Column, *states: Column) -> tuple[Column, Column]:
        """Add an update's ops; return the updated tensors and their gradients afterwards."""
        raise NotImplementedError

    def _kind(self, slot: Slot) -> object:
        """Return the key by which parameters are grouped into lists: torch groups by dtype."""
        return slot.updated.dtype

    # -- common to all ---------------------------------------------------------------------------------------------

    def update(self, slots: Sequence[Slot]) -> list[Slot]:
        """Add the ops that update parameters.

        Parameters
        ----------
        slots : list of Slot
            Parameters and their gradients; states are declared here.

        Returns
        -------
        list of Slot
            The slots with the tensors to read from now on, as parameters are updated in place.

        Raises
        ------
        GraphError
            If there is no slot, or a parameter already has state.
        """
        place = type(self).__name__
        checked = need_slots(place, slots)
        with building(current_graph(checked[0].param.graph)), phase("optimizer"), scope(place.lower()):
            checked = [in_parts(s) for s in checked]
            if self._blocks is not None:
                checked = [replace(s, moments=self._blocks.format_of(s)) for s in checked]
            updated = dict(enumerate(checked))
            for positions in _positions_by_key(self._kind(s) for s in checked):
                group = [checked[i] for i in positions]
                updated |= dict(zip(positions, self._update_group(group), strict=True))
        return list(updated.values())

    def _update_group(self, slots: list[Slot]) -> list[Slot]:
        states = [self._states(s) for s in slots]
        grads = [s.grad for s in slots]
        mismatched = [i for i, s in enumerate(slots) if s.master is not None and s.grad.dtype != s.master.dtype]
        if self.implementation != "fused" and mismatched:
            # all gradients are cast to the master dtype before the first update
            dtype = slots[0].updated.dtype
            casts = over([(grads[i],) for i in mismatched], lambda g: cast(g, dtype), "grads")
            for i, (g,) in zip(mismatched, casts, strict=True):
                grads[i] = g
        groups = [(s.updated, g, *state) for s, g, state in zip(slots, grads, states, strict=True)]
        updated = self._run(groups, slots)
        new_slots = [
            replace(s, grad=s.grad if i in mismatched and self.implementation != "fused" else g)
            for i, (s, (_, g)) in enumerate(zip(slots, updated, strict=True))
        ]
        return self._assigned(new_slots, [p for p, _ in updated])

    def _run(self, groups: list[Column], slots: list[Slot]) -> list[tuple[Tensor, Tensor]]:
        name = type(self).__name__.lower()
        if self.implementation == "foreach":
            p, g = self._update(Calls(listed=True), *zip(*groups, strict=True))
            return list(zip(p, g, strict=True))
        if self.implementation == "for-loop":
            results = one_by_one(self._update, groups, name)
        else:
            results = self._fused(groups, slots, name)
        return [(p, g) for p, g in results]

    def _fused(self, groups: list[Column], slots: list[Slot], name: str) -> list[Column]:
        sizes, blocks = len(groups[0]), self._blocks
        extra_inputs = self._counters(slots) if blocks is None else blocks.own_tables(slots, [g[2:] for g in groups])
        common = () if blocks is None else blocks.common_tables([g[2:] for g in groups])

        def update_one(*group: Tensor) -> Column:
            tables = common if blocks is not None and any(map(blocks.holds, group[2:sizes])) else ()
            return fused_update(self._update, group[:sizes], (*group[sizes:], *tables), name="fused_update")[:2]

        return over([(*g, *b) for g, b in zip(groups, extra_inputs, strict=True)], update_one, name)

    def _counters(self, slots: list[Slot]) -> list[Column]:
        """Increment the step counter of each parameter; nothing if the host counts."""
        if not self.counts or self.counters == "host":
            return [()] * len(slots)
        counters = [(s.state("step", s.param.sizes[: pieces(s.param)], "fp32"),) for s in slots]
        return over(counters, lambda t: pointwise("add", t, 1.0, inplace=True, name="step"), "steps")

    def _assigned(self, slots: list[Slot], updated: list[Tensor]) -> list[Slot]:
        """Assign the master copies, if any, to the parameters."""
        assigned = [
            replace(s, param=t) if s.master is None else replace(s, master=t)
            for s, t in zip(slots, updated, strict=True)
        ]
        masters = [i for i, s in enumerate(assigned) if s.master is not None]
        groups = [(assigned[i].param, updated[i]) for i in masters]
        for i, (p,) in zip(masters, over(groups, lambda p, m: assign(p, m), "params"), strict=True):
            assigned[i] = replace(assigned[i], param=p)
        return assigned


def _positions_by_key(kinds: Iterable[object]) -> list[list[int]]:
    """Group the positions of equal values, ordered by first occurrence."""
    groups: dict[object, list[int]] = {}
    for i, kind in enumerate(kinds):
        groups.setdefault(kind, []).append(i)
    return list(groups.values())
