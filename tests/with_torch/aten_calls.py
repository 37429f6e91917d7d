"""Run a program and record every aten op with the cost from its rule."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from costgraph.algebra.polynomial import Poly, total
from costgraph.errors import UnsupportedError
from costgraph.torch.tracing.call import Call, Counts, Spec, Values
from costgraph.torch.tracing.recorder import (
    one_by_one,
    tags_of,
)
from costgraph.torch.tracing.rules import counts_of
from costgraph.torch.tracing.sizes import Translator


@dataclass(frozen=True)
class Seen:
    """One call, and its cost."""

    call: Call
    counts: Counts


class Calls(TorchDispatchMode):
    """Query the rule for every aten op that is not a view; `missing` collects the op names without a rule."""

    def __init__(self, strict: bool = True) -> None:
        super().__init__()
        self.strict = strict
        self.seen: list[Seen] = []
        self.missing: dict[str, str] = {}
        self.values = Values(Translator({}))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        results = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        if func.namespace == "aten" and not func.is_view and (results or func._schema.is_mutable):
            self._ask(func, args, kwargs, results)
        return out

    def _ask(self, func: Any, args: Any, kwargs: Any, results: list[torch.Tensor]) -> None:
        schema = func._schema
        given = {
            a.name: args[i] if i < len(args) else kwargs.get(a.name, a.default_value)
            for i, a in enumerate(schema.arguments)
        }
        full = schema.name.removeprefix("aten::")
        inplace = schema.is_mutable and full.endswith("_")
        try:
            call = Call(
                full.removesuffix("_") if inplace else full,
                func._overloadname,
                inplace,
                {k: self.values.convert(v, self.values.spec) for k, v in given.items()},
                tuple(map(self.values.spec, results)),
            )
            for one in one_by_one(call):
                self.seen.append(Seen(one, counts_of(one, func.tags if one is call else tags_of(one.name))))
        except UnsupportedError as error:
            if self.strict:
                raise
            self.missing[str(func)] = str(error)

    def total(self, kind: str) -> int:
        """Return one kind of FLOPs, summed over all calls."""
        amounts = (getattr(s.counts, kind) for s in self.seen)
        return number(total(s.counts.matmul if a is None else a for a, s in zip(amounts, self.seen, strict=True)))

    def of(self, name: str) -> Seen:
        """Return an op's single call."""
        (call,) = (s for s in self.seen if s.call.name == name)
        return call


def number(amount: Poly) -> int:
    """Return a symbol-free amount as a number."""
    value = amount.constant
    assert value is not None, amount
    assert value == int(value), amount
    return int(value)


def calls_of(program: Callable[[], object]) -> Calls:
    """Run a program and return the costs of its aten ops."""
    with Calls() as calls:
        program()
    return calls


def spec(*sizes: int | Poly, dtype: str = "fp32") -> Spec:
    """Return a dense tensor as rules receive it."""
    from costgraph.algebra.polynomial import poly
    from costgraph.dtypes import dtype as find_dtype
    from costgraph.ir.strides import contiguous

    shape = tuple(map(poly, sizes))
    return Spec(shape, contiguous(shape), find_dtype(dtype))
