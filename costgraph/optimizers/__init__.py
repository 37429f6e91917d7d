"""Optimizers as ops: parameter updates, their temporaries and optimizer states."""

import inspect
from collections.abc import Mapping

from ..algebra.symbols import shown
from ..errors import GraphError
from .adafactor import Adafactor
from .adaptive import AdaGrad, Adam, AdamW, RMSProp
from .gradients import (
    clip_grad_norm,
    unscale,
    zero_grad,
)
from .muon import Muon
from .optimizer import (
    COUNTERS,
    IMPLEMENTATIONS,
    STATES,
    BlockStates,
    Optimizer,
    Slot,
    over,
    source_like,
)
from .sgd import SGD, Lion

__all__ = [
    "COUNTERS", "IMPLEMENTATIONS", "OPTIMIZERS", "SGD", "STATES", "AdaGrad", "Adafactor", "Adam", "AdamW",
    "BlockStates", "Lion", "Muon", "Optimizer", "RMSProp", "Slot", "clip_grad_norm", "over",
    "optimizer_of", "source_like", "unscale", "zero_grad",
]  # fmt: skip

#: Optimizers by their command-line names.
OPTIMIZERS: Mapping[str, type[Optimizer]] = {
    kind.__name__.lower(): kind for kind in (SGD, Adam, AdamW, AdaGrad, RMSProp, Lion, Adafactor, Muon)
}


def optimizer_of(spec: Optimizer | type | str | None, place: str) -> Optimizer:
    """Return an optimizer: AdamW for None, one with its default options for a name, a class, or torch's class.

    Raises
    ------
    GraphError
        If the argument names no known optimizer, or is an instance of torch's.

    Examples
    --------
    >>> optimizer_of("sgd", "training_step").implementation
    'foreach'
    """
    if isinstance(spec, Optimizer):
        return spec
    if spec is None:
        return AdamW()
    name = spec if isinstance(spec, str) else ""
    if inspect.isclass(spec) and (issubclass(spec, Optimizer) or spec.__module__.startswith("torch.optim")):
        name = spec.__name__
    if name.lower() not in OPTIMIZERS:
        names = ", ".join(OPTIMIZERS)
        raise GraphError(
            f"{place}: optimizer {shown(spec)}, expected an optimizer such as costgraph.AdamW(), or one of {names}"
        )
    return OPTIMIZERS[name.lower()]()
