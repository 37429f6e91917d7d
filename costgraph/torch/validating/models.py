"""Models, blocks of them and their training steps: the declared zoo, and plain modules of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import costgraph as cg

from ...graph.arguments import need_choice
from ...optimizers.muon import has_matrix
from ..lowering import lower, random_inputs
from ..lowering.formats import FORMATS
from .case import Case, Make, Program
from .modules import GPT, ConvNet, GPTBlock, Llama, LlamaBlock, Loss, Perceptron, frequencies, rotations

__all__ = ["CHECKPOINTS", "MODELS", "OPTIMIZERS", "Block", "Model"]

Optimizers = tuple[Callable[..., Any], Callable[..., torch.optim.Optimizer] | None]

OPTIMIZERS: dict[str, Optimizers] = {
    "SGD": (cg.SGD, torch.optim.SGD),
    "SGD-momentum": (
        lambda **options: cg.SGD(momentum=0.9, **options),
        lambda params, **options: torch.optim.SGD(params, momentum=0.9, **options),
    ),
    "Adam": (cg.Adam, torch.optim.Adam),
    "AdamW": (cg.AdamW, torch.optim.AdamW),
    "AdaGrad": (cg.AdaGrad, torch.optim.Adagrad),
    "RMSProp": (cg.RMSProp, torch.optim.RMSprop),
    "Adafactor": (cg.Adafactor, torch.optim.Adafactor),
    "Lion": (cg.Lion, None),
    "Muon": (lambda **options: cg.Muon(takes=has_matrix, **options), None),  # of the head, too: it has one more size
}
"""The library's optimizer and torch's; None where torch has none, or none for parameters that are no matrices."""

CHECKPOINTS: dict[str, Callable[[], cg.Checkpoint | None]] = {
    "": lambda: None,
    "every-block": cg.every_block,
    "every-2": lambda: cg.every(2),
    "selective": lambda: cg.selective("attention"),
    "from-start": cg.from_start,
}
"""What a step computes again."""

_FLAGS: dict[str, dict[str, bool]] = {
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False},
    "fused": {"fused": True},
}


def make_of(case: Case) -> Make:
    """Return what makes torch's optimizer of a step."""
    kind = OPTIMIZERS[case.optimizer][1]
    assert kind is not None
    found = kind
    return lambda params: found(params, **_FLAGS[case.implementation])


def _in_format(case: Case, device: torch.device, build: Callable[[], nn.Module]) -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(FORMATS[case.dtype])
    try:
        with device:
            return build()
    finally:
        torch.set_default_dtype(before)


def _step(case: Case, graph: cg.Graph, device: str) -> cg.Graph:
    """Return the declared step of training of a model."""
    ours = OPTIMIZERS[case.optimizer][0](implementation=case.implementation)
    return cg.training_step(
        graph, optimizer=ours, precision=case.precision or None, checkpoint=CHECKPOINTS[case.checkpoint](),
        autocast_device=device if case.precision.endswith("-mixed") else None,
    )  # fmt: skip


@dataclass(frozen=True)
class Model:
    """A model: what declares it, and the module that is the same."""

    graph: Callable[[Case], cg.Graph]
    """declares the forward pass"""
    module: Callable[[Case, Mapping[str, int]], nn.Module]
    """makes the module"""
    inputs: tuple[str, ...]
    """axes of what it takes: tokens below V, or with D or X among the axes, numbers"""
    targets: tuple[str, ...]
    """axes of the classes of its loss"""
    classes: str
    """how many classes there are"""
    sizes: tuple[str, ...]
    """names of its dimensions"""
    policies: tuple[str, ...] = ("",)
    """of activation checkpointing that the module knows"""

    def declare(self, case: Case, device: str) -> cg.Graph:
        """Return the declared graph, its sizes symbols."""
        graph = self.graph(case)
        if case.optimizer == "Muon":  # it turns a matrix so that it is wider than tall
            with graph:
                graph.assume("F >= D", "F >= C")
        return graph if case.mode == "forward" else _step(case, graph, device)

    def program(self, case: Case, device: torch.device) -> Program:
        """Return the module on random data, or a step of training with it."""
        if case.program == "lowered":
            return _lowered(self.declare(case, "cpu" if device.type == "cpu" else "cuda"), case, device)
        need_choice(f"validate: {case.subject}: checkpoint", case.checkpoint, self.policies)
        need_choice(f"validate: {case.subject}: precision", case.precision, ("", "bf16-mixed"))
        module = _in_format(case, device, lambda: self.module(case, case.sizes))
        x, names = self._tensor(case, device, self.inputs), [_open(self.inputs)]
        if case.mode == "forward":
            return Program(module, (x,), names)
        y = torch.randint(case.sizes[self.classes], [case.sizes[a] for a in self.targets], device=device)
        autocast = torch.bfloat16 if case.precision == "bf16-mixed" else None
        return Program(Loss(module, autocast), (x, y), [*names, _open(self.targets)], make_of(case))

    def _tensor(self, case: Case, device: torch.device, axes: tuple[str, ...]) -> torch.Tensor:
        shape = [case.sizes[a] for a in axes]
        if axes == self.targets:
            return torch.randint(case.sizes[self.classes], shape, device=device)
        return torch.randn(shape, device=device).to(FORMATS[case.dtype])


def _open(axes: tuple[str, ...]) -> list[str | None]:
    # widths are those of weights, which are numbers to torch
    return [a if a in ("B", "S") else None for a in axes]


def _lowered(graph: cg.Graph, case: Case, device: torch.device) -> Program:
    sizes: dict[str, Any] = dict(case.sizes)
    return Program(lower(graph, device, **sizes), random_inputs(graph, device, **sizes), None)


def _zoo(name: str) -> Callable[[Case], cg.Graph]:
    return lambda case: cg.models.load(name, symbolic=True, attention=case.attention or "flash", dtype=case.dtype)


def _picked(sizes: Mapping[str, int], *names: str) -> dict[str, Any]:
    return {n: sizes[n] for n in names}


def _gpt(case: Case, sizes: Mapping[str, int]) -> nn.Module:
    return GPT(**_picked(sizes, *"DHFLVP"), kernel=case.attention, policy=case.checkpoint)


def _llama(case: Case, sizes: Mapping[str, int]) -> nn.Module:
    return Llama(**_picked(sizes, *"DHGKFLV"), kernel=case.attention, policy=case.checkpoint)


def _perceptron(case: Case, sizes: Mapping[str, int]) -> nn.Module:
    return Perceptron(**_picked(sizes, *"DFLC"), policy=case.checkpoint)


def _declared_convolutions(case: Case) -> cg.Graph:
    B, C, X, D, L, V = cg.dims("B C X D L V")

    def hidden(x: cg.Tensor, name: str = "conv") -> cg.Tensor:
        return cg.relu(cg.conv(x, "b c h w -> b o h w", window=(3, 3), padding=1, o=D, name=name))

    with cg.Graph("convolutions", dtype=case.dtype) as g:
        x = cg.repeat(L, hidden, hidden(g.input("x", (B, C, X, X)), "first"), name="layers")
        g.output(cg.linear(cg.reduce(x, "b d h w -> b d", "mean"), "b d -> b v", v=V, bias=True, name="head"))
        g.loss = "cross_entropy"
    return g


# -- blocks --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """One layer of a model on activations (B, S, D), without gradients."""

    graph: Callable[[Case], cg.Graph]
    """declares it"""
    module: Callable[[Mapping[str, int]], nn.Module]
    """makes the module"""
    tables: bool
    """whether it takes cosine and sine of the rotary embedding too"""
    sizes: tuple[str, ...]
    """names of its dimensions"""

    def declare(self, case: Case, device: str) -> cg.Graph:
        """Return the declared graph, its sizes symbols."""
        return self.graph(case)

    def program(self, case: Case, device: torch.device) -> Program:
        """Return the module on random data."""
        B, S, D = (case.sizes[n] for n in "BSD")
        module = _in_format(case, device, lambda: self.module(case.sizes))
        x = torch.randn(B, S, D, device=device).to(FORMATS[case.dtype])
        names: list[list[str | None]] = [["B", "S", None]]
        if not self.tables:
            return Program(_Unmasked(module), (x,), names)
        tables = rotations(S, frequencies(case.sizes["K"], device), x.dtype)
        return Program(_Unmasked(module), (x, *tables), [*names, ["S", None], ["S", None]])


class _Unmasked(nn.Module):
    """A block whose attention is one kernel."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.block(*tensors, None)


def _gpt_block(case: Case) -> cg.Graph:
    B, S, D, H, F = cg.dims("B S D H F")
    with cg.Graph("gpt block", dtype=case.dtype) as g:
        x = g.input("x", (B, S, D))
        y = cg.linear(cg.layer_norm(x), "b s d -> b s n h k", n=3, h=H, k=D / H, bias=True, name="kqv")
        q, k, v = (cg.rearrange(part, "b s 1 h k -> b h s k") for part in cg.ops.split(y, (1, 1, 1), 2))
        y = cg.rearrange(cg.attention(q, k, v, causal=True, kernel="flash"), "b h s k -> b s (h k)")
        x = x + cg.linear(y, "b s e -> b s d", d=D, bias=True, name="proj")
        y = cg.linear(cg.layer_norm(x), "b s d -> b s f", f=F, bias=True, name="up")
        g.output(x + cg.linear(cg.gelu(y, approximate="tanh"), "b s f -> b s d", d=D, bias=True, name="down"))
    return g


def _llama_block(case: Case) -> cg.Graph:
    B, S, D, H, G, K, F = cg.dims("B S D H G K F")

    def heads(x: cg.Tensor, count: Any, name: str) -> cg.Tensor:
        return cg.rearrange(cg.linear(x, "b s d -> b s h k", h=count, k=K, name=name), "b s h k -> b h s k")

    with cg.Graph("llama block", dtype=case.dtype) as g:
        x, cos, sin = g.input("x", (B, S, D)), g.input("cos", (S, K)), g.input("sin", (S, K))
        y = cg.rms_norm(x)
        q, k, v = (heads(y, n, name) for n, name in ((H, "q"), (G, "k"), (G, "v")))
        q, k = _turned(q, cos, sin), _turned(k, cos, sin)
        y = cg.rearrange(cg.attention(q, k, v, causal=True, kernel="flash"), "b h s k -> b s (h k)")
        x = x + cg.linear(y, "b s e -> b s d", d=D, name="proj")
        g.output(x + cg.nn.gated_mlp(cg.rms_norm(x), F))
    return g


def _turned(x: cg.Tensor, cos: cg.Tensor, sin: cg.Tensor) -> cg.Tensor:
    """Rotate by halves, an op each as eager code does."""
    a, b = cg.ops.split(x, (x.shape[-1] / 2, x.shape[-1] / 2), -1)
    return x * cos + cg.ops.concat((cg.ops.pointwise("neg", b), a), -1) * sin


_LAYERS = ("", "every-block", "every-2")


def _gpt_layer(sizes: Mapping[str, int]) -> nn.Module:
    return GPTBlock(**_picked(sizes, *"DHF"))


def _llama_layer(sizes: Mapping[str, int]) -> nn.Module:
    return LlamaBlock(**_picked(sizes, *"DHGKF"))


MODELS: dict[str, Model | Block] = {
    "gpt block": Block(_gpt_block, _gpt_layer, tables=False, sizes=tuple("BSDHF")),
    "llama block": Block(_llama_block, _llama_layer, tables=True, sizes=tuple("BSDHGKF")),
    "gpt": Model(_zoo("gpt2"), _gpt, ("B", "S"), ("B", "S"), "V", tuple("BSDHFLVP"), (*_LAYERS, "selective")),
    "llama": Model(_zoo("llama-2-7b"), _llama, ("B", "S"), ("B", "S"), "V", tuple("BSDHGKFLV"), _LAYERS),
    "perceptron": Model(_zoo("mlp"), _perceptron, ("B", "D"), ("B",), "C", tuple("BDFLC"), _LAYERS),
    "convolutions": Model(
        _declared_convolutions,
        lambda case, s: ConvNet(**_picked(s, *"CDLV")),
        ("B", "C", "X", "X"),
        ("B",),
        "V",
        tuple("BCXDLV"),
    ),
}
"""Subjects that are models or blocks of them, by name."""
