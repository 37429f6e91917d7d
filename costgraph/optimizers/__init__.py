"""Optimizers as ops: parameter updates, their temporaries and optimizer states."""

from collections.abc import Mapping

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
    "source_like", "unscale", "zero_grad",
]  # fmt: skip

#: Optimizers by their command-line names.
OPTIMIZERS: Mapping[str, type[Optimizer]] = {
    kind.__name__.lower(): kind for kind in (SGD, Adam, AdamW, AdaGrad, RMSProp, Lion, Adafactor, Muon)
}
