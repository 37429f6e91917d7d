"""Activation checkpointing: policies that select which ops the backward pass recomputes instead of saving."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Annotated

from ..algebra.polynomial import ONE, Poly
from ..algebra.symbols import is_level, read_size, shorten, shown
from ..errors import FormatError, GraphError
from ..ir.graph import (
    Graph,
    Op,
    base_name,
    need_flag,
    positive,
)
from ..notation.validation import (
    READ,
    guarded,
)
from ..ops.einsum import Einsum
from ..ops.kv_cache import Cache
from .rewrite import Rewriter
from .selection import Layers
from .shard.parallelize import SUMMED
from .views import is_view_op

__all__ = ["Checkpoint", "every", "every_block", "from_start", "nest", "policy_of", "read_checkpoint", "selective"]


@guarded()
@dataclass(frozen=True)
class Checkpoint:
    """An activation checkpointing policy.

    It follows non-reentrant `torch.utils.checkpoint`: only the inputs of a run of ops are saved. When the backward pass
    reaches the run, its ops run again in order and, with `early_stop`, stop after the last one whose result is read.
    """

    blocks: bool = False
    """whether each layer is one run: a loop body, or each layer of it if it holds several"""
    names: tuple[str, ...] = ()
    """scopes, kernels or ops; adjacent ones form one run"""
    interval: Annotated[Poly | None, READ] = None
    """loop iterations per run, None for one"""
    inside: Checkpoint | None = None
    """policy for the ops that are recomputed"""
    start: bool = False
    """whether only a loop's initial carry is saved"""
    keep: tuple[str, ...] = ()
    """trailing name levels of ops whose results are saved instead of recomputed"""
    communication: bool = True
    """whether tensor-parallel reductions run again; if not, their results are saved"""
    early_stop: bool = True
    """whether recomputation stops after a run's last op that the backward pass reads"""

    def __post_init__(self) -> None:
        for option, names in (("selective", self.names), ("keep", self.keep)):
            for name in names:
                if not all(map(is_level, name.split("/"))):
                    raise GraphError(f"{option}: {shorten(name)}, expected identifiers separated by '/'")
        if (self.keep or not self.communication) and self.inside is not None:
            raise GraphError("keep: saved results are not recomputed, expected no policy inside=")
        need_flag("checkpoint", communication=self.communication, early_stop=self.early_stop)
        if self.interval is not None:
            object.__setattr__(self, "interval", positive("every: k", self.interval))

    def prepared(self, graph: Graph) -> Graph:
        """Return the graph with its loops split where several iterations form one run."""
        for name in self.names:
            if not any(_has_levels(name, op.name) for op in graph.walk()):
                scopes = sorted({level for op in graph.walk() for level in op.name.split("/")[:-1]})
                raise GraphError(
                    f"selective: {name!r} matches no scope or op, expected one such as {', '.join(scopes)}"
                )
        for name in self.keep:
            if not any(_has_suffix(name, op.name) for op in graph.walk()):
                ops = sorted({op.name.rpartition("/")[2] for op in graph.walk()})
                raise GraphError(f"keep: {name!r} matches no op, expected one such as {', '.join(ops)}")
        if not self.communication and not any(map(_is_reduced, graph.walk())):
            raise GraphError(
                f"communication=False of graph {graph.name!r}: no matmul has the name of a layer whose result tensor "
                f"parallelism reduces, expected layers of costgraph.nn or of transformers, or keep= with names"
            )
        interval = self.interval
        if self.inside is not None:
            graph = self.inside.prepared(graph)
            if interval is not None and self.inside.interval is not None:
                interval = interval / self.inside.interval  # groups of these are one run
        if interval is not None:
            graph = nest(graph, interval)
            self._need_divisor(graph)
        self._need_runs(graph)
        return graph

    def _need_divisor(self, graph: Graph) -> None:
        """Raise GraphError if k does not divide the number of layers of an unrolled stack."""
        assert self.interval is not None
        layers = Layers(graph)
        stacks: dict[str, set[int]] = {}
        for stack, number in filter(None, map(layers.period, graph.ops)):
            stacks.setdefault(stack, set()).add(number)
        loop_names = {base_name(op.name) for op in graph.ops if op.loop is not None}
        for stack, numbers in stacks.items():
            k = self.interval.constant
            if stack not in loop_names and (not isinstance(k, int) or len(numbers) % k):
                raise GraphError(f"every {self.interval} of the {len(numbers)} layers in {stack!r}: expected a divisor")

    def _need_runs(self, graph: Graph) -> None:
        """Raise GraphError if the policy recomputes nothing in a graph."""
        if not (self.blocks or self.names) or self.recomputes(graph):
            return
        if self.names:
            raise GraphError(
                f"selective: {', '.join(map(repr, self.names))} of graph {graph.name!r} is inside a kernel, "
                f"expected a scope or op around it"
            )
        raise GraphError(
            f"checkpoint: graph {graph.name!r} has no {'loop' if self.start else 'layers'} to recompute, expected a "
            f"costgraph.repeat{'' if self.start else ', or scopes such as h/0 and h/1'}"
        )

    def recomputes(self, graph: Graph) -> bool:
        """Whether any ops in a graph or its loop bodies are recomputed."""
        return any(any(self.runs(body.ops)) for body in graph.bodies() if not body.fused)

    def runs(self, ops: Sequence[Op]) -> Sequence[Sequence[Op]]:
        """Return the recomputed runs of ops in a graph or body."""
        if not ops:
            return ()
        if not self.blocks:
            return _adjacent_runs(ops, lambda op: any(_has_levels(name, op.name) for name in self.names))
        graph = ops[0].graph
        layers, in_loop = Layers(graph), graph.owner is not None and graph.owner.loop is not None
        as_one_run = self.interval is not None or self.start
        if in_loop and (as_one_run or not any(map(layers.layer, graph.walk()))):
            return [list(ops)]
        if not as_one_run:
            return _adjacent_runs(ops, layers.layer)
        return [] if self.start else _adjacent_runs(ops, self._group_of(layers))

    def stops_early_in(self, op: Op) -> bool:
        """Whether a loop is a run's last op, so that recomputation may stop within its last iteration."""
        if not self.early_stop:
            return False
        last_ops = (next((o for o in reversed(run) if not _is_free(o)), None) for run in self.runs(op.graph.ops))
        return any(last is op for last in last_ops)

    def _group_of(self, layers: Layers) -> Callable[[Op], object]:
        """Return a key function: the group of k layers for each op outside a loop."""
        k = 1 if self.interval is None else self.interval.constant

        def group(op: Op) -> object:
            period = layers.period(op)
            return None if period is None or not isinstance(k, int) else (period[0], period[1] // k)

        return group

    def keeps(self, op: Op) -> bool:
        """Whether an op's result is saved although the ops around it are recomputed."""
        return any(_has_suffix(name, op.name) for name in self.keep) or (not self.communication and _is_reduced(op))


def _adjacent_runs(ops: Sequence[Op], key: Callable[[Op], object]) -> Sequence[Sequence[Op]]:
    """Return the runs of adjacent ops with the same key; ops without a key are in none.

    Views between two ops in a run belong to it: a split there would save the view's operand.
    """
    runs: list[list[Op]] = []
    last, views = None, list[Op]()
    for op in ops:
        group_key = key(op)
        if not group_key:
            views = [*views, op] if last and _is_free(op) else []
            last = last if views else None
            continue
        if group_key == last:
            runs[-1] += [*views, op]
        else:
            runs.append([op])
        last, views = group_key, []
    return runs


def _is_free(op: Op) -> bool:
    """Whether an op is a view that moves and computes nothing."""
    return is_view_op(op) or isinstance(op.kind, Cache)


def _is_reduced(op: Op) -> bool:
    """Whether tensor parallelism all-reduces an op's result, judged by the name of its layer."""
    layer = "/".join(_levels(op.name)[:-1])
    return isinstance(op.kind, Einsum) and any(fnmatchcase(f"/{layer}", f"*/{name}") for name in SUMMED)


def _levels(name: str) -> list[str]:
    return [level.partition(".")[0] for level in name.split("/")]  # a copied op has a suffix after a dot


def _has_levels(name: str, full: str) -> bool:
    """Whether `name` is a run of consecutive levels of `full`."""
    part, levels = name.split("/"), _levels(full)
    return any(levels[i : i + len(part)] == part for i in range(len(levels) - len(part) + 1))


def _has_suffix(name: str, full: str) -> bool:
    """Whether `name` is the trailing levels of `full`."""
    suffix = name.split("/")
    return _levels(full)[-len(suffix) :] == suffix


def every_block(
    *,
    keep: Sequence[str] = (),
    inside: Checkpoint | None = None,
    communication: bool = True,
    early_stop: bool = True,
) -> Checkpoint:
    """Save only each layer's input: memory for L inputs, at the cost of one more forward pass.

    Parameters
    ----------
    keep : sequence of str
        Ops by their trailing name levels, such as `"matmul"` or `"q/matmul"`, whose results are saved as well, like
        must-save ops in torch's `create_selective_checkpoint_contexts`.
    inside : Checkpoint, optional
        Policy for a layer's ops while they are recomputed.
    communication : bool
        Whether tensor parallelism repeats its reductions, as in Megatron-LM's full recomputation (`CheckpointFunction`
        in megatron/core/tensor_parallel/random.py reruns the whole layer). False saves the reduced results, so that
        neither they nor their matmuls are recomputed, like a selective torch policy that saves
        `_c10d_functional.reduce_scatter_tensor`, which is on torchtitan's list of ops. With sequence parallelism, the
        all-gathers that the backward pass needs still run again.
    early_stop : bool
        Whether recomputation stops after the last op that the backward pass reads, as in torch's non-reentrant
        checkpoint (`early_stop` of `torch.utils.checkpoint.checkpoint`). False recomputes all ops, as a reentrant
        checkpoint (`use_reentrant=True`), DeepSpeed and Megatron-LM's `CheckpointFunction` do.

    Returns
    -------
    Checkpoint
        For `training_step` and `backward`.

    Raises
    ------
    GraphError
        If a name in `keep` is invalid, or `keep` or `communication=False` is combined with `inside`; when the step is
        built, if no layer with a reduced result is known.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, D, F, L = cg.dims("B D F L")
    >>> with cg.Graph("g") as g:
    ...     layer = lambda x: x + cg.nn.mlp(x, F, activation=cg.relu)
    ...     x = cg.repeat(L, layer, cg.linear(g.input("x", (B, D)), "b d -> b e", e=D), name="layers")
    ...     g.output(cg.reduce(x, "b d -> ", "mean"))
    >>> step = cg.backward(g, checkpoint=cg.every_block())
    >>> cg.costs(step).filter(phase="recompute", kind="matmul").total().flops  # the last matmul is not needed
    2*B*D*F*L
    >>> step = cg.backward(g, checkpoint=cg.every_block(keep=["matmul"]))
    >>> cg.costs(step).filter(phase="recompute", kind="matmul").total().flops
    0
    >>> step = cg.backward(g, checkpoint=cg.every_block(early_stop=False))
    >>> cg.costs(step).filter(phase="recompute", kind="matmul").total().flops
    4*B*D*F*L
    """
    return Checkpoint(blocks=True, keep=tuple(keep), inside=inside, communication=communication, early_stop=early_stop)


def every(k: object, *, inside: Checkpoint | None = None, early_stop: bool = True) -> Checkpoint:
    """Save only the input of every k-th layer: memory for L/k inputs plus the residuals of k layers.

    Parameters
    ----------
    k : sympy.Expr or int
        Layers recomputed together (periods, where kinds of layers alternate); it must divide their number.
    inside : Checkpoint, optional
        Policy for the ops of these layers while they are recomputed.
    early_stop : bool
        As in `every_block`.

    Returns
    -------
    Checkpoint
        For `training_step` and `backward`.

    Raises
    ------
    ShapeError
        If `k` is not a size.
    """
    return Checkpoint(blocks=True, interval=positive("every: k", k), inside=inside, early_stop=early_stop)


def from_start() -> Checkpoint:
    """Save only the input of the first layer: memory for one input, at the cost of about L/2 more forward passes.

    Returns
    -------
    Checkpoint
        For `training_step` and `backward`.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, D, L = cg.dims("B D L")
    >>> with cg.Graph("g") as g:
    ...     layer = lambda x: cg.relu(cg.linear(x, "b d -> b e", e=D))
    ...     x = cg.repeat(L, layer, g.input("x", (B, D), grad=True), name="layers")
    ...     g.output(cg.reduce(x, "b d -> ", "mean"))
    >>> step = cg.backward(g, checkpoint=cg.from_start())
    >>> cg.costs(step).filter(phase="recompute", kind="matmul").total().flops  # 1 + 2 + ... + L layers
    B*D**2*L**2 + B*D**2*L
    """
    return Checkpoint(blocks=True, start=True)


def selective(*names: str, inside: Checkpoint | None = None, early_stop: bool = True) -> Checkpoint:
    """Recompute the given scopes, kernels or ops; adjacent ones form one run.

    Parameters
    ----------
    *names : str
        One or several levels of a name, such as `"attention"` or `"attention/softmax"`.
    inside : Checkpoint, optional
        Policy for these ops while they are recomputed.
    early_stop : bool
        As in `every_block`.

    Returns
    -------
    Checkpoint
        For `training_step` and `backward`.

    Raises
    ------
    GraphError
        If a name is invalid.
    """
    if not names:
        raise GraphError("selective: no name, expected scopes, kernels or ops")
    return Checkpoint(names=names, inside=inside, early_stop=early_stop)


def nest(graph: Graph, k: Poly) -> Graph:
    """Split each stack of layers into groups of k: a loop over groups around a loop over layers."""
    return graph if k == ONE else _Nester(k).run(graph)


class _Nester(Rewriter):
    def __init__(self, k: Poly) -> None:
        super().__init__()
        self.k = k

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        loop, k = op.loop, self.k
        if loop is None or loop.xs or loop.stacks or loop.pieces:
            super().emit(op, new, suffix)
            return
        groups = loop.count / k
        if groups.constant is not None and (not isinstance(groups.constant, int) or groups.constant < 1):
            raise GraphError(f"every {k} of {loop.count} iterations of {op.name!r}: expected a divisor")
        outer = new.start_body(f"{loop.body.name}_groups", fused=False)
        for f in loop.body.formals:
            self.tensors[f] = self.formal(f, outer)
        operands = [self.tensors[f] for f in loop.body.formals]
        inner = self.body(loop.body, outer, "")
        loop_op = self.add(op, replace(loop.kind, body=inner, count=k), operands, outer, f"{op.name}.group")
        outer.outputs += loop_op.results
        outer_kind = replace(loop.kind, body=outer, count=groups)
        self.add(op, outer_kind, [self.tensors[t] for t in op.operands], new)


def policy_of(checkpoint: Checkpoint | bool | None, place: str) -> Checkpoint:
    """Return a checkpointing policy: True recomputes every block, None and False recompute nothing.

    Raises
    ------
    GraphError
        If the argument is neither a policy nor a bool.
    """
    if isinstance(checkpoint, Checkpoint):
        return checkpoint
    if checkpoint is None or isinstance(checkpoint, bool):
        return every_block() if checkpoint else Checkpoint()
    raise GraphError(
        f"{place}: checkpoint {shown(checkpoint)}, expected True or a policy such as costgraph.every_block()"
    )


def read_checkpoint(text: str) -> Checkpoint | None:
    """Parse a checkpointing policy from the command line.

    One of none, every-block, every:K, from-start, or comma-separated names after `selective:` (recomputed) or `keep:`
    (saved in each block). Raises FormatError for other texts.

    Examples
    --------
    >>> read_checkpoint("selective:attention,mlp").names
    ('attention', 'mlp')
    """
    name, colon, argument = text.partition(":")
    if name == "every" and colon:
        return every(read_size(argument, "--checkpoint every"))
    if name == "selective" and colon:
        return selective(*argument.split(","))
    if name == "keep" and colon:
        return every_block(keep=argument.split(","))
    policies = {"none": None, "every-block": every_block(), "from-start": from_start()}
    if text in policies:
        return policies[text]
    expected = f"{', '.join(policies)}, every:K, selective:NAME,NAME or keep:NAME,NAME"
    raise FormatError(f"--checkpoint {shorten(text)}: expected {expected}")
