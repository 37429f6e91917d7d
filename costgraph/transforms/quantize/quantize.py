"""Number formats of inference: weights, activations and caches, each in one of its own.

Weights are stored with the axes that a product sums innermost, so that scales run along them, and are widened inside
the kernel that multiplies: what moves is the packed weight and its scales.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any

from ...algebra.polynomial import ONE
from ...dtypes import DTYPES, DType
from ...errors import GraphError, ShapeError, UnsupportedError
from ...graph.arguments import need_flag
from ...graph.graph import Graph, current_graph, need_graph
from ...graph.op import Bodied, Op
from ...graph.placement import Placement, tidy
from ...graph.scopes import building
from ...graph.tensor import Storage, Tensor
from ...notation.pattern import Axes, Pattern
from ...ops.blocks import Kernel, kernel
from ...ops.cached import Append, Cache
from ...ops.contraction import Einsum
from ...ops.fill import Assign
from ...ops.foreign import need_declared
from ...ops.grouped import Grouped
from ...ops.index import gather
from ...ops.keep import Keep
from ...ops.layout import rearrange
from ...ops.pointwise import cast, pointwise
from ..backward.walk import is_view_op, scoped
from ..rewrite import Rewriter
from ..selecting import split_at_layers
from .mixed import mixed
from .narrow import Narrow, activations_format, cache_format, mixture_of, need_common, weights_format
from .scales import added_up, divided, groups, packing, rounded, row_scaled, unpacked, widened
from .uses import Use, caches_of, left_out, summed_axes, weights_of

__all__ = ["quantize"]

#: Scopes whose weights stay as they are unless a caller says otherwise: logits and routing are sensitive to rounding.
KEPT = ("head", "router")
#: Axes of the rows of a grouped product that its result has, and those that are summed.
_ROWS: tuple[list[int], tuple[int, ...]] = ([0], (1,))


def quantize(
    graph: Graph, weights: object = None, activations: object = None, cache: object = None, *,
    group: int | None = None, scale: str | None = None, zero: bool = False, skip: Sequence[str] | None = None,
    embeddings: bool = False,
) -> Graph:  # fmt: skip
    """Store weights, activations and caches of inference in narrower number formats.

    Parameters
    ----------
    graph : Graph
        A forward pass, or what `prefill` or `decode` returned; it stays as it is.
    weights : str or DType, optional
        Format of the parameters that products with activations alone read: linear layers and products of experts.
        An integer or float of 8 bits or fewer gets scales (see `group`), a block format such as mxfp4 has its own.
        Parameters with one axis, those in a format of their own, and what convolutions read stay. The name of a
        mixture of GGUF, such as Q4_K_M in either case, gives each matrix of a decoder a format, embeddings and logits
        among them, by what its name says it is and by its layer, at the sizes that the graph has; a loop becomes one
        for all layers of the same formats.
    activations : str or DType, optional
        Format that the other operand of those products is quantized to, by an op of its own, with a scale in fp32 for
        each token. By default products run in the format of the activations, weights widened inside the kernel.
    cache : str or DType, optional
        Format of cached keys, values and latent vectors: integers with a scale in fp16 for each row of the innermost
        axis (a head of a position), floats with none, as one for a layer is a constant. States of recurrences and
        of convolutions stay. What fuses attention widens inside; for eager attention a kernel writes a wide copy.
    group : int, optional
        Elements along the summed axes that share a scale of the weights; by default all of them, one scale for each
        output channel. The defaults of the libraries that coined the names: 128 for `int4` (GPTQ, AWQ, torchao), and
        blocks of 64 of the flattened weight for `nf4` and `fp4` (bitsandbytes). `int4_row_fp32` is int4 with one scale
        for each output channel.
    scale : str, optional
        Format of the scales of weights: by default fp16 with `group` and for `int4`, fp32 without, and for `nf4` and
        `fp4`.
    zero : bool
        Whether each scale of the weights has a zero point beside it, in their own format.
    skip : sequence of str, optional
        Scopes or names of parameters that stay, by any of their levels; by default `head` and `router` where there
        are such, with a mixture `router` alone. Layers of a stack are named as `layers[16:]` or `layers/31/mlp`.
    embeddings : bool
        Whether tables that tokens look rows up in are quantized too, also those tied to a head that is not skipped.

    Returns
    -------
    Graph
        Parameters and their number stay, `param_bytes` has the scales in it. FLOPs that quantize and scale are counted:
        of a scale for each group one for each element of the weight, a zero point one more; of a scale for each
        channel, or each token, one for each element of the product; of a scale for each row of a cache one for each
        score. Conversions have none, those of block formats with their scales neither.

    Raises
    ------
    BindingError
        If a mixture depends on a size that the graph has no number for.
    FormatError
        If a format is unknown or wider than 8 bits, has scales and is asked for more, or one of the two operands
        cannot hold the values of the other.
    GraphError
        If nothing is asked for, or there is nothing in the graph that it could be done to.
    UnsupportedError
        If a product reads a quantized weight in an order that its scales have no place in, or an op is a recorded call.

    Notes
    -----
    Formats as in GPTQ (Frantar et al. 2022, arXiv 2210.17323) and AWQ (Lin et al. 2023, arXiv 2306.00978) with
    weights="int4", group=128; SmoothQuant (Xiao et al. 2022, arXiv 2211.10438) with int8 on both sides; OCP
    Microscaling (MX) 1.0; llama.cpp's mixtures (src/llama-quant.cpp). The products of a training step in fp8 are
    `costgraph.Policy`'s.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, D, F = cg.dims("B D F")
    >>> with cg.Graph("g", dtype="bf16") as g:
    ...     g.output(cg.linear(g.input("x", (B, D)), "b d -> b f", f=F))
    >>> cg.param_bytes(cg.quantize(g, "int4", group=128))  # half a byte each, and 2 B for 128 of a column
    D*F/2 + 2*F*ceiling(D/128)
    >>> w8a8 = cg.quantize(g, "int8", "int8")
    >>> [(op.name, cg.costs(w8a8).filter(op=op.name, kind="matmul").total().flops) for op in w8a8.ops if op.body]
    [('linear/quantize', 0), ('linear/matmul', 2*B*D*F)]
    """
    need_graph("quantize", graph)
    need_declared("quantize", graph, "trace the quantized module", floats=True)
    need_flag("quantize", zero=zero, embeddings=embeddings)
    formats = Narrow(
        weights_format(weights, group, scale, zero=zero), activations_format(weights, activations), cache_format(cache)
    )
    mixture = mixture_of(weights)
    if formats.weights is None and formats.cache is None and mixture is None:
        raise GraphError("quantize: no format, expected one of weights or of the cache")
    if formats.activations is not None:
        need_common(formats)
    stored: Mapping[str, DType] = {}
    graph = split_at_layers("quantize: skip", graph, skip)
    kept = left_out(graph, skip, KEPT if mixture is None else KEPT[1:])
    if mixture is not None:
        graph, stored = mixed(graph, str(weights), mixture, kept)
    rewriter = _Quantizer(formats, stored)
    if formats.weights is not None or mixture is not None:
        rewriter.choose(graph, kept, embeddings=embeddings or mixture is not None)
    if formats.cache is not None:
        rewriter.caches = caches_of(graph)
        if not rewriter.caches:
            raise GraphError(
                f"quantize: graph {graph.name!r} has no cache of keys and values, expected what prefill or decode "
                f"returns"
            )
    return rewriter.run(graph)


# -- the rewriter ----------------------------------------------------------------------------------------------------


class _Quantizer(Rewriter):
    """Copies a graph; what is stored narrower is widened where an op reads it."""

    lies = True

    def __init__(self, formats: Narrow, stored: Mapping[str, DType]) -> None:
        super().__init__()
        self.formats = formats
        self.stored = stored
        """Formats by the names of parameters, where a mixture gives them."""
        self.weights: dict[Tensor, tuple[int, ...]] = {}
        """Parameters that are quantized, and the axes that products sum."""
        self.uses: dict[Op, Use] = {}
        """Ops that read them."""
        self.caches: set[Tensor] = set()
        self.wide: dict[tuple[Tensor, Graph], Tensor] = {}
        """Wide copies, by the graph that they are in."""
        self.narrow: dict[tuple[Tensor, Graph, tuple[int, ...]], Tensor] = {}
        """Quantized activations, by the axes that share a scale."""

    def choose(self, graph: Graph, kept: Sequence[str], *, embeddings: bool) -> None:
        """Find the parameters that are quantized."""
        for t, uses in weights_of(graph, kept, embeddings=embeddings).items():
            if self.formats.weights is not None or t.name in self.stored:
                self.weights[t] = summed_axes(t, uses)
                self.uses |= {u.op: u for u in uses}

    @contextmanager
    def at(self, op: Op, graph: Graph) -> Iterator[None]:
        """Let ops that are made now stand beside an op."""
        with scoped(op), building(graph):
            yield

    # -- sources ---------------------------------------------------------------------------------------------------

    def source(self, old: Tensor, new: Graph, suffix: str) -> Any:
        """Copy a source; a weight is stored with the summed axes innermost, and a view has the old order."""
        made: Tensor = super().source(old, new, suffix)
        if old in self.caches:
            assert self.formats.cache is not None
            made.dtype = self.formats.cache
            made.storage = Storage(made.name, made.sizes, made.dtype, made.role, made.storage.pieces)
        if old not in self.weights:
            return made
        found = self.stored.get(old.name, self.formats.weights)
        assert found is not None
        summed = self.weights[old]
        outer = [i for i in range(old.ndim) if i not in summed]
        names = [f"a{i}" for i in range(old.ndim)]
        sizes = (*(old.sizes[i] for i in outer), prod((old.sizes[i] for i in summed), start=ONE))
        made.sizes, made.dtype, made.requires_grad = sizes, found, False
        stored = Tensor(new, made.name, sizes, made.dtype, role="param")
        made.strides, made.storage = stored.strides, stored.storage
        if len(summed) == 1 and (*outer, *summed) == tuple(range(old.ndim)):
            return made
        left = " ".join([*(names[i] for i in outer), f"({' '.join(names[i] for i in summed)})"])
        sizes_of: dict[str, Any] = {names[i]: old.sizes[i] for i in summed}
        with building(new):
            return rearrange(made, f"{left} -> {' '.join(names)}", name=f"{made.name}.order", **sizes_of)

    def placed(self, old: Tensor, at: Placement) -> Placement:
        """Return where a weight of a rank lies: its summed axes are one, of the parts of each."""
        if old not in self.weights:
            return at
        summed = self.weights[old]
        inner = (f for i in summed for f in at.dims[i] or (old.sizes[i],))
        return at.with_dims([*(dim for i, dim in enumerate(at.dims) if i not in summed), tidy(inner)])

    # -- ops -------------------------------------------------------------------------------------------------------

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        """Add what stands for an op."""
        use = self.uses.get(op)
        if use is None:
            super().emit(op, new, suffix)
            return
        try:
            if use.kind == "lookup":
                self.looked_up(op, new)
            else:
                self.multiplied(op, new)
        except ShapeError as error:
            raise UnsupportedError(
                f"quantize: {op.name!r}: {error}; its weight may be left as it is by skip="
            ) from None

    def copy(self, op: Op, new: Graph, suffix: str = "") -> Op:
        """Copy an op; what it takes wide is widened in front of it."""
        if op.body is not None:
            return self.block(op, new)
        narrow = [i for i, t in enumerate(op.operands) if self.tensors[t].dtype != t.dtype]
        if new.fused and isinstance(op.kind, Einsum) and len(narrow) == 1 and len(op.operands) == 2:
            return self.contracted(op, op.kind, narrow[0], new)
        held = 1 if isinstance(op.kind, Append | Assign) else 0
        passive = is_view_op(op) or isinstance(op.kind, Keep | Cache)
        before = {t: self.tensors[t] for t in op.operands}
        if not passive:
            self.tensors |= {t: self.widened(t, op, new) for t in op.operands[held:]}
        made = super().copy(op, new, suffix)
        self.tensors |= before
        return made

    def contracted(self, op: Op, kind: Einsum, i: int, new: Graph) -> Op:
        """Multiply with what is cached as it is: the kernel widens what it reads of it."""
        operands: list[Tensor] = [new.adopt(self.tensors[t]) for t in op.operands]
        made: list[Op] = []

        def product(other: Tensor) -> Tensor:
            operands[1 - i] = other
            made.append(new.add_op(kind, operands, op.name.rpartition("/")[2], op.phase))
            return made[0].results[0]

        with self.at(op, new):
            scaled = operands[i].dtype.element and not operands[i].dtype.block
            y = row_scaled(kind.pattern, i, product, operands[1 - i]) if scaled else product(operands[1 - i])
        self.tensors[op.results[0]] = y
        return made[0]

    def widened(self, old: Tensor, op: Op, new: Graph) -> Tensor:
        """Return a tensor in the format that it had: inside a kernel for nothing, elsewhere as a copy."""
        t: Tensor = self.tensors[old]
        if t.dtype == old.dtype:
            return t
        if (t, new) not in self.wide:
            with self.at(op, new):
                self.wide[t, new] = widened(t, old.dtype, fused=new.fused)
        return self.wide[t, new]

    def block(self, op: Op, new: Graph) -> Op:
        """Copy an op with a body, whose inputs have the formats that are given."""
        kind, loop = op.kind, op.loop
        assert isinstance(kind, Bodied)
        old = kind.body
        body = new.start_body(old.name, fused=old.fused)
        rewritten = loop is None and any(inner in self.uses for inner in old.walk())
        carries, slices = ((), ()) if loop is None else (loop.carries, loop.slices)
        operands = []
        for f, before in zip(old.formals, op.operands, strict=True):
            t = self.widened(before, op, new) if f in carries else self.tensors[before]
            operands.append(t)
            if rewritten:
                self.tensors[f] = t  # taken in when an op inside reads it: activations are quantized outside
                continue
            made = self.formal(f, body)
            made.dtype = t.dtype
            made.storage = Storage(made.name, made.sizes, t.dtype, made.role, made.storage.pieces)
            if f not in carries and f not in slices:
                made.strides, made.offset = t.strides, t.offset
            self.tensors[f] = made
        self.fill(old, body)
        body.outputs += [body.adopt(self.tensors[t]) for t in old.outputs]
        kind = replace(kind, body=body)
        if rewritten and isinstance(kind, Kernel):  # places among operands, which are in the order of their readers now
            changed = tuple(body.captured.index(operands[i]) for i in kind.changed)
            kind = replace(kind, backward="", changed=changed)
        return self.add(op, kind, body.captured if rewritten else operands, new)

    def looked_up(self, op: Op, new: Graph) -> None:
        """Look up rows of a quantized table and widen them, in one kernel."""
        table, ids = (self.tensors[t] for t in op.operands)
        wide = op.results[0].dtype
        with self.at(op, new):
            if new.fused:
                made = widened(gather(table, ids), wide, fused=True)
            else:
                with kernel(_level(op)) as body:
                    rows = widened(gather(table, ids), wide, fused=True)
                made = body.export(rows)
        self.tensors[op.results[0]] = made

    def multiplied(self, op: Op, new: Graph) -> None:
        """Multiply by a quantized weight, in one kernel that widens what it reads."""
        place, kind = 1 - self.uses[op].operand, op.kind
        assert isinstance(kind, Einsum | Grouped)
        x = self.widened(op.operands[place], op, new)
        if self.formats.activations is not None:
            x, kind = self.quantized(op, kind, x, place, new)
        with self.at(op, new):
            if new.fused:
                made = self.product(op, kind, x)
            else:
                with kernel(_level(op)) as body:
                    y = self.product(op, kind, x)
                made = body.export(y)
        self.tensors[op.results[0]] = made

    def quantized(
        self, op: Op, kind: Einsum | Grouped, x: Tensor, place: int, new: Graph
    ) -> tuple[Tensor, Einsum | Grouped]:
        """Return the activations of a product in their narrow format, made once: axes that it sums merged, at the end.

        The record of the product becomes one that reads them so.
        """
        outer, summed = _ROWS
        if isinstance(kind, Einsum):
            pattern = kind.pattern
            outer, summed = divided(op, pattern, place)
            dims = pattern.operands[place]
            operands = list(pattern.operands)
            operands[place] = (*(dims[i] for i in outer), Axes(tuple(n for i in summed for n in dims[i].names)))
            kind = replace(kind, pattern=Pattern(tuple(operands), pattern.result))
        home = new
        while home.fused and x.graph is not home and home.parent is not None:
            home = home.parent
        key = (x, home, summed)
        if key not in self.narrow:
            assert self.formats.activations is not None
            with self.at(op, home):
                self.narrow[key] = rounded(x, outer, summed, self.formats.activations, fused=home.fused)
        return self.narrow[key], kind

    def product(self, op: Op, kind: Einsum | Grouped, x: Tensor) -> Tensor:
        """Add a product and what scales it to the kernel that is open."""
        place, wide, own = self.uses[op].operand, op.results[0].dtype, self.formats.product
        packed: Tensor = self.tensors[op.operands[place]]
        weights, activations = packed.dtype, self.formats.activations
        if isinstance(kind, Grouped):  # unpacks the weights of those experts alone that rows go to
            kind, w = replace(kind, unpacked=sum(packing(weights, scaled=own is None))), packed
        else:
            w = unpacked(packed, wide if own is None else self.formats.operand(weights), scaled=own is None)
        x = x if own is None else cast(x, self.formats.operand(x.dtype))
        operands = [self.tensors[t] for t in op.operands]
        operands[place], operands[1 - place] = w, x
        sums = wide if own is None else DTYPES["int32" if own.kind == "int" else "fp32"]
        graph = current_graph()
        y: Tensor = graph.add_op(replace(kind, dtype=sums), operands, "product", op.phase).results[0]
        calculated = y.dtype if y.dtype.kind == "float" else DTYPES["fp32"]
        if own is not None and weights.element and weights.block:
            y = added_up(y, groups(op, place, weights.block), calculated)
        if activations is not None and activations.element:
            y = pointwise("mul", y, 1.0, dtype=calculated, name="token_scale")
        if weights.element and not weights.block:
            y = pointwise("mul", y, 1.0, dtype=calculated, name="channel_scale")
        return cast(y, wide)


def _level(op: Op) -> str:
    """Return the name of a kernel for an op: its last level, without the suffixes of an unrolled loop."""
    return op.name.rpartition("/")[2].partition(".")[0]
