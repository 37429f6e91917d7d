"""Programs that a validation or a published benchmark runs: ops, layers, losses and models in plain torch.

Single ops and models also have their declared graph. Published benchmarks are traced with symbolic sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import prod
from typing import Annotated, Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import costgraph as cg

from ..analysis.allocator import LT_WORKSPACE
from ..errors import UnsupportedError
from ..ir.graph import Graph, need_choice
from ..notation.validation import Rule, Size, one_of
from ..optimizers.muon import has_matrix
from .lowering import lower, random_inputs
from .lowering.context import FORMATS as TORCH_DTYPES
from .tracing import trace

__all__ = [
    "Case",
    "Function",
    "Program",
    "GPT",
    "ConvNet",
    "GPTBlock",
    "Llama",
    "LlamaBlock",
    "Loss",
    "Perceptron",
    "FORMATS",
    "PublishedProgram",
    "axes_of",
    "joined",
    "made_of",
    "names_of",
    "KERNELS",
    "Kernel",
    "LOSSES",
    "CHECKPOINTS",
    "MODELS",
    "OPTIMIZERS",
    "Block",
    "Model",
    "LAYERS",
    "UNTRACED",
    "PROGRAMS",
    "benchmarked",
    "traced",
]


# -- cases -------------------------------------------------------------------------------------------------------------

Make = Callable[[Any], torch.optim.Optimizer]


@dataclass(frozen=True)
class Case:
    """One case of the suite: subject, sizes and settings.

    Examples
    --------
    >>> case = Case("matmul", {"M": 64, "K": 128, "N": 256}, dtype="bf16")
    >>> case.name, case.mode
    ('matmul bf16 M=64 K=128 N=256', 'kernel')
    """

    subject: str
    """name in `SUBJECTS`"""
    sizes: Annotated[Mapping[str, Size], Rule("sizes by name", bool)] = field(hash=False)
    """size of every dimension"""
    dtype: str = "fp32"
    """declared data type"""
    mode: Annotated[str, one_of(("kernel", "forward", "step"))] = "kernel"
    """kernel, forward or step"""
    attention: str = ""
    """attention implementation: flash or eager"""
    optimizer: str = ""
    """optimizer, by the library's name, such as AdamW"""
    implementation: str = ""
    """optimizer implementation: for-loop, foreach or fused"""
    precision: str = ""
    """precision policy; empty keeps `dtype`"""
    checkpoint: str = ""
    """checkpointing policy; empty for none"""
    program: str = "module"
    """module: a plain torch module. lowered: the lowered graph, if torch has no such policy"""

    @property
    def name(self) -> str:
        """Unique description of the case."""
        more = (self.attention, self.optimizer, self.implementation, self.precision, self.checkpoint)
        lowered = "lowered" if self.program == "lowered" else ""
        kind = "" if self.mode == "kernel" else self.mode
        words = [self.subject, kind, self.dtype, *more, lowered, *(f"{k}={v}" for k, v in self.sizes.items())]
        return " ".join(w for w in words if w)


class Function(nn.Module):
    """Wraps a function of tensors as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> Any:
        """Call the function."""
        return self.function(*tensors)


@dataclass
class Program:
    """A torch program: a module with inputs, or a whole training step."""

    module: nn.Module
    """the module"""
    inputs: tuple[torch.Tensor, ...]
    """its inputs"""
    dims: Sequence[Sequence[str | None]] | None
    """axis names of each input for tracing; None disables tracing"""
    make: Make | None = None
    """optimizer factory for a training step"""
    into: Callable[[], Any] | None = None
    """variant that writes into an existing tensor, because a CPU allocates more slowly than it writes"""

    def __post_init__(self) -> None:
        self.optimizer = None if self.make is None else self.make(list(self.module.parameters()))

    def __call__(self) -> Any:
        """Run once."""
        if self.optimizer is None:
            with torch.no_grad():
                return self.module(*self.inputs)
        loss = self.module(*self.inputs)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return None

    def clocked(self) -> Any:
        """Run the timed variant."""
        if self.into is None:
            return self()
        with torch.no_grad():
            return self.into()

    def held(self, device: torch.device) -> int:
        """Return the persistent bytes: parameters, buffers, inputs, and optimizer states.

        On CUDA every storage occupies whole blocks of 512 B.
        """
        state = [] if self.optimizer is None else [t for s in self.optimizer.state.values() for t in s.values()]
        tensors = [*self.module.parameters(), *self.module.buffers(), *self.inputs, *state]
        storages = {
            t.untyped_storage()._cdata: t.untyped_storage().nbytes()
            for t in tensors
            if isinstance(t, torch.Tensor) and t.device.type == device.type
        }
        block = 512 if device.type == "cuda" else 1
        return sum(-(-n // block) * block for n in storages.values())


# -- reference models --------------------------------------------------------------------------------------------------
# Plain torch modules in the style of transformers, as counterparts of the declared models.

Call = Callable[..., Any]


def again(call: Call, *arguments: Any) -> Any:
    """Call with activation checkpointing."""
    return checkpoint(call, *arguments, use_reentrant=False, preserve_rng_state=False)


def direct(call: Call, *arguments: Any) -> Any:
    """Call without activation checkpointing."""
    return call(*arguments)


def through(layers: Sequence[nn.Module], policy: str, x: torch.Tensor, *rest: torch.Tensor | None) -> torch.Tensor:
    """Run layers in sequence, with activation checkpointing of groups if the policy says so."""
    size = {"every-block": 1, "every-2": 2}.get(policy, 0)
    if not size:
        for layer in layers:
            x = layer(x, *rest)
        return x
    for i in range(0, len(layers), size):
        x = again(_group(layers[i : i + size]), x, *rest)
    return x


def _group(layers: Sequence[nn.Module]) -> Call:
    def run(x: torch.Tensor, *rest: torch.Tensor | None) -> torch.Tensor:
        return through(layers, "", x, *rest)

    return run


def hidden_keys(x: torch.Tensor, kernel: str) -> torch.Tensor | None:
    """Return an additive causal mask of shape (1, 1, S, S), or None for the flash kernel."""
    if kernel == "flash":
        return None
    S = x.shape[1]
    return torch.full((1, 1, S, S), torch.finfo(x.dtype).min, dtype=x.dtype, device=x.device).triu(1)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Compute attention for q, k, v of shape (B, H, S, K), fused if there is no mask."""
    if mask is None:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    scores = scores + mask
    scores = functional.softmax(scores, dim=-1)
    return scores @ v


def merged(y: torch.Tensor) -> torch.Tensor:
    """Merge heads (B, H, S, K) to (B, S, H*K)."""
    return y.transpose(1, 2).flatten(2)


class GPTBlock(nn.Module):
    """GPT-2 layer; the policy "selective" recomputes its attention."""

    def __init__(self, D: int, H: int, F: int, policy: str = "") -> None:
        super().__init__()
        self.H, self.policy = H, policy
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.kqv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, F), nn.Linear(F, D)

    def attention(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Return the residual branch of attention."""
        q, k, v = (t.unflatten(2, (self.H, -1)).transpose(1, 2) for t in self.kqv(self.norm1(x)).chunk(3, 2))
        return self.proj(merged(attend(q, k, v, mask)))  # type: ignore[no-any-return]  # torch's modules return Any

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        """Return the residual branch of the MLP."""
        x = self.up(self.norm2(x))
        return self.down(functional.gelu(x, approximate="tanh"))  # type: ignore[no-any-return]  # as above

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Map (B, S, D) to (B, S, D)."""
        call = again if self.policy == "selective" else direct
        x = x + call(self.attention, x, mask)
        return x + self.mlp(x)


class GPT(nn.Module):
    """GPT-2 with a tied head: tokens (B, S) to logits (B, S, V)."""

    def __init__(self, D: int, H: int, F: int, L: int, V: int, P: int, kernel: str, policy: str = "") -> None:
        super().__init__()
        self.kernel, self.policy = kernel, policy
        self.tokens, self.positions = nn.Embedding(V, D), nn.Embedding(P, D)
        self.layers = nn.ModuleList(GPTBlock(D, H, F, policy) for _ in range(L))
        self.norm = nn.LayerNorm(D)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = through(list(self.layers), self.policy, x, hidden_keys(x, self.kernel))
        return functional.linear(self.norm(x), self.tokens.weight)


def half_turned(x: torch.Tensor) -> torch.Tensor:
    """Rotate by halves: (a, b) to (-b, a) along the last axis."""
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), dim=-1)


class LlamaBlock(nn.Module):
    """Llama layer."""

    def __init__(self, D: int, H: int, G: int, K: int, F: int) -> None:
        super().__init__()
        self.K, self.rank = K, H // G
        self.norm1, self.norm2 = nn.RMSNorm(D, eps=1e-6), nn.RMSNorm(D, eps=1e-6)
        self.q, self.k, self.v = (nn.Linear(D, n * K, bias=False) for n in (H, G, G))
        self.proj = nn.Linear(H * K, D, bias=False)
        self.gate, self.up = nn.Linear(D, F, bias=False), nn.Linear(D, F, bias=False)
        self.down = nn.Linear(F, D, bias=False)

    def attention(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the residual branch of attention."""
        x = self.norm1(x)
        q, k, v = (f(x).unflatten(2, (-1, self.K)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = q * cos + half_turned(q) * sin, k * cos + half_turned(k) * sin
        if self.rank > 1:
            k, v = k.repeat_interleave(self.rank, 1), v.repeat_interleave(self.rank, 1)
        return self.proj(merged(attend(q, k, v, mask)))  # type: ignore[no-any-return]  # torch's modules return Any

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        """Return the residual branch of the MLP."""
        x = self.norm2(x)
        return self.down(functional.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]  # as above

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Map (B, S, D) to (B, S, D)."""
        x = x + self.attention(x, cos, sin, mask)
        return x + self.mlp(x)


def frequencies(K: int, device: torch.device | None = None) -> torch.Tensor:
    """Return the fp32 frequencies of rotary embeddings for head size K."""
    return 10000.0 ** -(torch.arange(0, K, 2, device=device, dtype=torch.float32) / K)


def rotations(S: int, frequencies: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine of rotary angles for S positions, of shape (S, K)."""
    angles = torch.arange(S, device=frequencies.device)[:, None] * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


class Llama(nn.Module):
    """Llama: tokens (B, S) to logits (B, S, V)."""

    frequencies: torch.Tensor

    def __init__(self, D: int, H: int, G: int, K: int, F: int, L: int, V: int, kernel: str, policy: str = "") -> None:
        super().__init__()
        self.kernel, self.policy = kernel, policy
        self.register_buffer("frequencies", frequencies(K), persistent=False)
        self.tokens = nn.Embedding(V, D)
        self.layers = nn.ModuleList(LlamaBlock(D, H, G, K, F) for _ in range(L))
        self.norm, self.head = nn.RMSNorm(D, eps=1e-6), nn.Linear(D, V, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        x = self.tokens(ids)
        cos, sin = rotations(ids.shape[1], self.frequencies, x.dtype)
        x = through(list(self.layers), self.policy, x, cos, sin, hidden_keys(x, self.kernel))
        return self.head(self.norm(x))  # type: ignore[no-any-return]  # torch's modules return Any


class Perceptron(nn.Module):
    """MLP from features (B, D) to logits (B, C)."""

    def __init__(self, D: int, F: int, L: int, C: int, policy: str = "") -> None:
        super().__init__()
        self.policy = policy
        self.first, self.head = nn.Linear(D, F), nn.Linear(F, C)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(F, F), nn.ReLU()) for _ in range(L))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        x = torch.relu(self.first(x))
        return self.head(through(list(self.layers), self.policy, x))  # type: ignore[no-any-return]  # as above


class ConvNet(nn.Module):
    """CNN from images (B, C, X, X) through L convolutions with D channels to logits (B, V)."""

    def __init__(self, C: int, D: int, L: int, V: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(C, D, 3, padding=1, bias=False)
        self.layers = nn.ModuleList(nn.Conv2d(D, D, 3, padding=1, bias=False) for _ in range(L))
        self.head = nn.Linear(D, V)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        x = torch.relu(self.first(x))
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]  # torch's modules return Any


class Loss(nn.Module):
    """Cross-entropy of a model's logits, optionally under autocast."""

    def __init__(self, model: nn.Module, autocast: torch.dtype | None = None) -> None:
        super().__init__()
        self.model, self.autocast = model, autocast

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss for model inputs and a class per position."""
        if self.autocast is None:
            return self.loss(x, targets)
        with torch.autocast(x.device.type, self.autocast):
            return self.loss(x, targets)

    def loss(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean over all positions."""
        logits = self.model(x)
        return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


# -- published programs ------------------------------------------------------------------------------------------------

#: Data types by torch name.
FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_FORMATS = FORMATS | {"complex64": torch.complex64}
_MARKS = {"ids", "fixed", *_FORMATS}


@dataclass(frozen=True, eq=False)
class PublishedProgram:
    """A plain torch call from a published benchmark, with its tensors.

    A text describes each tensor by its axis names. Axes in parentheses are merged. A data type among the words
    overrides the program's, ``ids`` means indices, and ``fixed`` means no gradient.
    """

    subject: str
    """group for limits"""
    call: Callable[..., Any]
    """function from tensors to one or more results"""
    tensors: Mapping[str, str]
    """axes of each tensor by name"""
    made: Sequence[str] = ()
    """axes of the results, whose gradients are inputs; empty for a loss"""
    sizes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """facts for the size of each axis, tried in order; by default the one with the axis name. `B*T` is a
    product, `H/2` a half"""
    format: str = ""
    """default data type"""
    untimed: str = ""
    """why times are not comparable; empty if they are"""
    given: Mapping[str, object] = field(default_factory=dict)
    """required values of facts, if stated; others mean another program"""
    kept: Sequence[str] = ()
    """additional tensors that a benchmark keeps alive: parameters of its other variants"""
    summed: bool = False
    """whether the backward pass starts from the sum of the result"""
    drawn: bool = False
    """whether output gradients are generated in each run; by default they are kept"""
    freed: bool = False
    """whether the backward pass frees the graph; by default it is retained"""
    until: str = ""
    """date (such as 2026-05-15) from which `later` runs instead, empty for never"""
    later: PublishedProgram | None = None
    """program from that date on"""
    before: Callable[..., Any] | None = None
    """function that runs once before; only its library workspaces remain"""
    fresh: bool = False
    """whether gradients of the previous run are freed; by default new ones accumulate"""
    returned: bool = False
    """whether gradients are returned and freed instead of stored in `.grad`"""
    refused: str = ""
    """why peaks are not comparable; empty if they are"""

    def at(self, date: str) -> PublishedProgram:
        """Return the program that ran on a date."""
        return self if self.later is None or date < self.until else self.later.at(date)

    def since(self, date: str, **changes: Any) -> PublishedProgram:
        """Return a program that, from a date on, runs without other variants and generates gradients in each run."""
        alone: dict[str, Any] = {"kept": (), "drawn": True, "freed": False} | changes
        return replace(self, until=date, later=replace(self, **alone))

    def bound(self, facts: Mapping[str, object]) -> dict[str, int]:
        """Return the size of each axis from a record's facts.

        Raises UnsupportedError if one is missing, invalid, or belongs to another program.
        """
        for name, value in self.given.items():
            if facts.get(name) not in (None, value):
                raise UnsupportedError(f"inputs: {name} {facts[name]!r}, expected {value!r}")
        axes = dict.fromkeys(axis for text in self.tensors.values() for axis in axes_of(text))
        return {axis: _chosen_size(facts, self.sizes.get(axis, (axis,))) for axis in axes}


def axes_of(text: str) -> list[str]:
    """Return axis names, except for fixed sizes."""
    return [word for word in names_of(text) if word is not None]


def names_of(text: str) -> list[str | None]:
    """Return the name of each axis, None for a fixed size."""
    return [None if word.isdigit() else word for word in _words(text) if word not in _MARKS]


def _words(text: str) -> list[str]:
    return text.replace("(", " ").replace(")", " ").split()


def joined(text: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a view with the axes in parentheses merged."""
    at, start = 0, 0
    for word in text.replace("(", " ( ").replace(")", " ) ").split():
        if word == "(":
            start = at
        elif word == ")":
            tensor, at = tensor.flatten(start, at - 1), start + 1
        elif word not in _MARKS:
            at += 1
    return tensor


def made_of(text: str, sizes: Mapping[str, int], format: torch.dtype) -> torch.Tensor:
    """Return a meta tensor for tracing."""
    words = _words(text)
    shape = [int(word) if word.isdigit() else sizes[word] for word in words if word not in _MARKS]
    if "ids" in words:
        return torch.empty(shape, dtype=torch.int64, device="meta")
    own = next((_FORMATS[word] for word in words if word in _FORMATS), format)
    return torch.empty(shape, dtype=own, device="meta", requires_grad="fixed" not in words)


def _chosen_size(facts: Mapping[str, object], choices: Sequence[str]) -> int:
    for choice in choices:
        above, *below = choice.split("/")
        product, divisor = (_product(facts, words) for words in (above.split("*"), below))
        if product and divisor and product % divisor == 0:
            return product // divisor
    raise UnsupportedError(f"inputs: no size {' or '.join(choices)}, expected a positive integer")


def _product(facts: Mapping[str, object], words: Sequence[str]) -> int:
    """Return a product of facts and numbers, or 0 if one is invalid."""
    found = [int(word) if word.isdigit() else facts.get(word) for word in words]
    if not all(isinstance(n, int) and not isinstance(n, bool) and 0 < n < 2**63 for n in found):
        return 0
    return prod(n for n in found if isinstance(n, int))


# -- kernels -----------------------------------------------------------------------------------------------------------
# Single ops: the declaration in the public API, and the equivalent torch call.

aten = torch.ops.aten


@dataclass(frozen=True)
class Kernel:
    """A single op, as a declaration and as a torch call."""

    axes: Mapping[str, str]
    """axis names of each input; `V: N` means N indices below V"""
    build: Callable[..., cg.Tensor]
    """function that declares the op for given inputs"""
    call: Callable[..., Any]
    """torch function of inputs, then weights"""
    into: Callable[..., Any] | None = None
    """variant with a preallocated result as first argument, if torch has one"""
    weights: Mapping[str, str] = field(default_factory=dict)
    """axis names of parameters that the declaration creates"""
    fixed: tuple[str, ...] = ()
    """sizes that the call needs as numbers"""

    @property
    def sizes(self) -> tuple[str, ...]:
        """Dimension names."""
        parsed = [_parsed(text) for text in (*self.axes.values(), *self.weights.values())]
        names = [name for most, axes in parsed for name in (*axes, most) if name and not name.isdigit()]
        return tuple(dict.fromkeys(names))

    def declare(self, case: Case, device: str) -> cg.Graph:
        """Return the declared graph with symbolic sizes."""
        with cg.Graph(case.subject, dtype=case.dtype) as graph:
            inputs = []
            for name, text in self.axes.items():
                most, axes = _parsed(text)
                inputs.append(graph.input(name, [*map(_size, axes)], dtype="int64" if most else None))
            graph.output(self.build(*inputs))
        return graph

    def program(self, case: Case, device: torch.device) -> Program:
        """Return the torch call with random inputs."""
        parsed = [_parsed(text) for text in (*self.axes.values(), *self.weights.values())]
        values = tuple(_values(most, axes, case, device) for most, axes in parsed)
        names = [[None if a.isdigit() or a in self.fixed else a for a in axes] for _, axes in parsed]
        into = None
        if self.into is not None and device.type == "cpu":
            into = partial(self.into, self.call(*values), *values)
        return Program(Function(self.call), values, names, into=into)


def _parsed(text: str) -> tuple[str, list[str]]:
    most, _, axes = text.rpartition(":")
    return most, axes.split()


def _size(axis: str) -> Any:
    return int(axis) if axis.isdigit() else cg.dims(axis)


def _values(most: str, axes: list[str], case: Case, device: torch.device) -> torch.Tensor:
    shape = [int(a) if a.isdigit() else case.sizes[a] for a in axes]
    if most:
        return torch.randint(case.sizes[most], shape, device=device)
    return torch.randn(shape, device=device).to(TORCH_DTYPES[case.dtype])


# -- kernels: table ----------------------------------------------------------------------------------------------------

_CELLS = {"x": "R C"}
_HEADS = {"q": "B H S K", "k": "B H S K", "v": "B H S K"}


def _eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = q @ k.transpose(2, 3)
    scaled = scores * q.shape[-1] ** -0.5
    del scores
    shares = torch.softmax(scaled, -1)
    del scaled
    return shares @ v


def _attention(causal: bool) -> Kernel:
    return Kernel(
        _HEADS,
        lambda q, k, v: cg.attention(q, k, v, causal=causal, kernel="flash"),
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=causal),
    )


def _conv(window: int) -> Kernel:
    size, padding = (window, window), window // 2
    return Kernel(
        {"x": "B C X X"},
        lambda x: cg.conv(x, "b c h w -> b o h w", window=size, padding=padding, o=cg.dims("O")),
        lambda x, w: functional.conv2d(x, w, padding=padding),
        weights={"w": f"O C {window} {window}"},
    )


def _depthwise(window: int) -> Kernel:
    size, padding, C = (window, window), window // 2, cg.dims("C")
    return Kernel(
        {"x": "B C X X"},
        lambda x: cg.conv(x, "b c h w -> b o h w", window=size, padding=padding, groups=C, o=C),
        lambda x, w: functional.conv2d(x, w, padding=padding, groups=w.shape[0]),
        weights={"w": f"C 1 {window} {window}"},
        fixed=("C",),
    )


def _rows(pattern: str, how: str, call: Callable[..., Any], into: Callable[..., Any]) -> Kernel:
    return Kernel(_CELLS, lambda x: cg.reduce(x, pattern, how), call, into)


KERNELS: dict[str, Kernel] = {
    "matmul": Kernel(
        {"a": "M K", "b": "K N"},
        lambda a, b: cg.einsum(a, b, "m k, k n -> m n"),
        torch.mm,
        lambda out, a, b: torch.mm(a, b, out=out),
    ),
    "batched matmul": Kernel(
        {"a": "B M K", "b": "B K N"},
        lambda a, b: cg.einsum(a, b, "b m k, b k n -> b m n"),
        torch.bmm,
        lambda out, a, b: torch.bmm(a, b, out=out),
    ),
    "linear": Kernel(
        {"x": "M K"},
        lambda x: cg.linear(x, "m k -> m n", n=cg.dims("N"), bias=True),
        functional.linear,
        weights={"w": "N K", "b": "N"},
    ),
    "add": Kernel(
        {"x": "R C", "y": "R C"}, lambda x, y: x + y, torch.add, lambda out, x, y: torch.add(x, y, out=out)
    ),
    "relu": Kernel(_CELLS, cg.relu, torch.relu, lambda out, x: torch.clamp_min(x, 0, out=out)),
    "gelu": Kernel(_CELLS, cg.gelu, functional.gelu, lambda out, x: aten.gelu.out(x, out=out)),
    "silu": Kernel(_CELLS, cg.silu, functional.silu, lambda out, x: aten.silu.out(x, out=out)),
    "exp": Kernel(_CELLS, lambda x: cg.ops.pointwise("exp", x), torch.exp, lambda out, x: torch.exp(x, out=out)),
    "transpose": Kernel(
        _CELLS,
        lambda x: cg.ops.contiguous_copy(cg.rearrange(x, "r c -> c r")),
        lambda x: x.t().contiguous(),
        lambda out, x: out.copy_(x.t()),
    ),
    "sum of rows": _rows("r c -> r", "sum", lambda x: x.sum(1), lambda out, x: torch.sum(x, 1, out=out)),
    "sum of columns": _rows("r c -> c", "sum", lambda x: x.sum(0), lambda out, x: torch.sum(x, 0, out=out)),
    "max of rows": _rows("r c -> r", "max", lambda x: x.amax(1), lambda out, x: torch.amax(x, 1, out=out)),
    "softmax": Kernel(
        _CELLS,
        lambda x: cg.softmax(x, -1),
        lambda x: torch.softmax(x, -1),
        lambda out, x: aten._softmax.out(x, -1, False, out=out),
    ),
    "layer norm": Kernel(_CELLS, cg.layer_norm, lambda x, w, b: functional.layer_norm(x, w.shape, w, b),
                         weights={"w": "C", "b": "C"}, fixed=("C",)),
    "rms norm": Kernel(_CELLS, cg.rms_norm, lambda x, w: functional.rms_norm(x, w.shape, w),
                       weights={"w": "C"}, fixed=("C",)),
    "cross entropy": Kernel(
        {"logits": "R C", "targets": "C: R"}, cg.cross_entropy, lambda x, y: functional.cross_entropy(x, y)
    ),
    "embedding": Kernel(
        {"ids": "V: R", "table": "V C"},
        cg.embedding,
        functional.embedding,
        lambda out, ids, table: torch.index_select(table, 0, ids, out=out),
    ),
    "attention eager": Kernel(_HEADS, lambda q, k, v: cg.attention(q, k, v, causal=False, kernel="eager"), _eager),
    "attention flash": _attention(causal=False),
    "attention flash causal": _attention(causal=True),
    "convolution 1x1": _conv(1),
    "convolution 3x3": _conv(3),
    "convolution depthwise 3x3": _depthwise(3),
}  # fmt: skip
"""single-op subjects by name"""


# -- losses ------------------------------------------------------------------------------------------------------------
# Plain torch losses, with or without the output projection.

_ROWS = {"R": ("B*T", "BT", "seq_len"), "V": ("V", "vocab_size")}
_HEAD = {"R": ("BT", "B*T", "seq_len"), "H": ("H", "hidden_size"), "V": ("V", "vocab_size")}


def _head_loss(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(functional.linear(x, weight), targets)


def _divergence(log_q: torch.Tensor, log_p: torch.Tensor, half: float = 0.5) -> torch.Tensor:
    """Jensen-Shannon divergence of log-probabilities, as with `KLDivLoss`."""
    log_p, log_q = log_p.to(torch.float32), log_q.to(torch.float32)
    m = torch.lerp(torch.exp(log_p), torch.exp(log_q), half)
    first = functional.kl_div(torch.log(m), log_p, reduction="batchmean", log_target=True)
    return half * first + (1 - half) * functional.kl_div(torch.log(m), log_q, reduction="batchmean", log_target=True)


def _divergence_of_rows(log_q: torch.Tensor, log_p: torch.Tensor, half: float = 0.5) -> torch.Tensor:
    """Jensen-Shannon divergence, summed by row."""
    log_p, log_q = log_p.to(torch.float32), log_q.to(torch.float32)
    m = torch.lerp(torch.exp(log_q), torch.exp(log_p), half)
    first = half * functional.kl_div(torch.log(m), log_p, reduction="none", log_target=True).sum(-1)
    loss = first + (1 - half) * functional.kl_div(torch.log(m), log_q, reduction="none", log_target=True).sum(-1)
    return (loss / log_q.shape[0]).sum()


def _divergence_loss(of: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda x, target: of(x.log_softmax(-1), target)


def _relative_entropy(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.kl_div(x.log_softmax(-1), target, reduction="batchmean")


def _variation(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    p = x.softmax(-1)
    tvd = torch.abs(p - target) / 2.0
    return torch.sum(tvd) / p.size(0)


def _distilled_divergence(of: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def call(
        x: torch.Tensor, weight: torch.Tensor, teacher: torch.Tensor, teacher_weight: torch.Tensor
    ) -> torch.Tensor:
        logits = functional.linear(x, weight)
        teacher_logits = functional.linear(teacher, teacher_weight)
        log_q = torch.log_softmax(logits / 1.0, dim=-1)
        log_p = torch.log_softmax(teacher_logits / 1.0, dim=-1)
        return of(log_q, log_p).to(x.dtype)

    return call


def _log_probabilities(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    mask = targets != -100
    targets = torch.where(targets == -100, 0, targets)
    each = torch.gather(logits.log_softmax(-1), 2, targets.unsqueeze(2)).squeeze(2)
    return (each * mask).sum(-1) / mask.sum(-1)


def _preferred(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy on the chosen half of a batch, and a preference loss against the rejected half."""
    half = x.shape[0] // 2
    made = x @ weight.t()
    logits = made.float()
    chosen = functional.cross_entropy(logits[:half].view(-1, logits.shape[-1]), targets[:half].view(-1))
    found = _log_probabilities(logits, targets)
    del made
    losses = -functional.logsigmoid(0.1 * (found[:half] - found[half:]))
    return chosen + losses.mean()


def _policy(level: str) -> Callable[..., torch.Tensor]:
    """Clipped policy-gradient loss, with probability ratios per token or per sequence."""

    def call(
        x: torch.Tensor, weight: torch.Tensor, chosen: torch.Tensor, mask: torch.Tensor, advantages: torch.Tensor,
        other: torch.Tensor, other_weight: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        logits = x @ weight.t()
        log_probs = functional.log_softmax(logits.float(), dim=-1)
        each = log_probs.gather(dim=-1, index=chosen.unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            other_logits = other @ other_weight.t()
            other_log_probs = functional.log_softmax(other_logits.float(), dim=-1)
            other_each = other_log_probs.gather(dim=-1, index=chosen.unsqueeze(-1)).squeeze(-1)
        ratio = each - each.detach()
        if level == "sequence":
            ratio = ((ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
        first = torch.exp(ratio)
        second = torch.clamp(first, 0.8, 1.2)
        wanted = advantages.unsqueeze(1)
        loss = -torch.min(first * wanted, second * wanted)
        away = torch.exp(other_each - each) - (other_each - each) - 1.0
        return ((loss + 0.1 * away) * mask).sum() / mask.sum().clamp(min=1.0)

    return call


def _distilled(soft: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Cross-entropy plus a distillation loss against a teacher."""

    def call(
        x: torch.Tensor, weight: torch.Tensor, teacher: torch.Tensor, teacher_weight: torch.Tensor,
        targets: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        made = x @ weight.t()
        with torch.no_grad():
            teacher_made = teacher @ teacher_weight.t()
        logits, teacher_logits = made.float(), teacher_made.float()
        hard = functional.cross_entropy(logits, targets)
        del made, teacher_made
        logits /= 1.0
        teacher_logits /= 1.0
        return 0.5 * hard + 0.5 * soft(logits, teacher_logits)

    return call


def _away(logits: torch.Tensor, teacher_logits: torch.Tensor) -> torch.Tensor:
    """Mean cosine distance between rows."""
    norm, teacher_norm = (functional.normalize(each, p=2, dim=-1) for each in (logits, teacher_logits))
    return (1.0 * (1 - functional.cosine_similarity(norm, teacher_norm, dim=-1))).mean()


def _mixed(logits: torch.Tensor, teacher_logits: torch.Tensor) -> torch.Tensor:
    """Jensen-Shannon divergence via the mixture of probabilities."""
    log_q, log_p = functional.log_softmax(logits, dim=-1), functional.log_softmax(teacher_logits, dim=-1)
    m = 0.5 * log_q.exp() + (1 - 0.5) * log_p.exp()
    m = m.log()
    q = functional.kl_div(m, log_q, reduction="batchmean", log_target=True)
    p = functional.kl_div(m, log_p, reduction="batchmean", log_target=True)
    return 0.5 * p + 0.5 * q


_PREFERRED: dict[str, Any] = {
    "tensors": {"x": "(2 P) T H", "weight": "V H", "targets": "(2 P) T ids"},
    "sizes": {"P": ("B/2",), "H": ("H", "hidden_size"), "V": ("V", "vocab_size")},
    "kept": ("V H",), "freed": True, "refused": "2.2 GB of other allocations are counted",
}  # fmt: skip

_DISTILLED: dict[str, Any] = {
    "tensors": {
        "x": "R G", "weight": "V G", "teacher": "R H fixed", "teacher_weight": "V H fixed", "targets": "R ids",
    },
    "sizes": _HEAD | {"G": ("H/2", "hidden_size/2")}, "freed": True, "kept": ("V G", "V H", "R G", "R G"),
}  # fmt: skip
_POLICY: dict[str, Any] = {
    "tensors": {
        "x": "B T H", "weight": "V H", "chosen": "B T ids", "mask": "B T float32 fixed", "advantages": "B fixed",
        "other": "B T H fixed", "other_weight": "V H fixed",
    },
    "sizes": {"H": ("H", "hidden_size"), "V": ("V", "vocab_size")}, "freed": True, "kept": ("V H", "V H"),
}  # fmt: skip

_DISTANCE: dict[str, Any] = {
    "tensors": {"x": "R V", "target": "R V fixed"}, "sizes": _ROWS, "format": "float32",
    "untimed": "it is timed without what its inputs are made by",
}  # fmt: skip

LOSSES: dict[str, PublishedProgram] = {
    "cross_entropy": PublishedProgram(
        "losses", functional.cross_entropy, {"x": "R V", "targets": "R ids"}, (), _ROWS, "float32", freed=True,
    ).since("2026-05-15"),
    "fused_linear_cross_entropy": PublishedProgram(
        "losses", _head_loss, {"x": "R H", "weight": "V H", "targets": "R ids"}, (), _HEAD,
        kept=("V H",), freed=True,
    ).since("2026-05-15"),
    "jsd": PublishedProgram("losses", _divergence_loss(_divergence), **_DISTANCE).since(
        "2024-10-15", call=_divergence_loss(_divergence_of_rows)
    ),
    "kl_div": PublishedProgram("losses", _relative_entropy, **_DISTANCE),
    "tvd": PublishedProgram("losses", _variation, **_DISTANCE),
    "fused_linear_jsd": PublishedProgram(
        "losses", _distilled_divergence(_divergence),
        {"x": "R H", "weight": "V H", "teacher": "R H fixed", "teacher_weight": "V H"}, (), _HEAD, freed=True,
    ).since("2024-10-15", call=_distilled_divergence(_divergence_of_rows), freed=True),
    "distill_cosine_loss": PublishedProgram("losses", _distilled(_away), **_DISTILLED),
    "distill_jsd_loss": PublishedProgram(
        "losses", _distilled(_mixed), **_DISTILLED, refused="the program of then was not published",
    ).since("2025-01-31", refused="", drawn=False, freed=True, kept=_DISTILLED["kept"]),
    "fused_linear_grpo_loss_token": PublishedProgram("losses", _policy("token"), **_POLICY),
    "fused_linear_grpo_loss_sequence": PublishedProgram("losses", _policy("sequence"), **_POLICY),
    **{
        f"fused_linear_{name}_loss": PublishedProgram("losses", _preferred, **_PREFERRED)
        for name in ("cpo", "orpo", "simpo")
    },
}  # fmt: skip


# -- models ------------------------------------------------------------------------------------------------------------
# Declared models, with the equivalent torch modules and training steps.

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
    "Muon": (lambda **options: cg.Muon(takes=has_matrix, **options), None),  # includes the head
}
"""library and torch optimizers; None if torch has none, or only for matrices"""

CHECKPOINTS: dict[str, Callable[[], cg.Checkpoint | None]] = {
    "": lambda: None,
    "every-block": cg.every_block,
    "every-2": lambda: cg.every(2),
    "selective": lambda: cg.selective("attention"),
    "from-start": cg.from_start,
}
"""checkpointing policies"""

_FLAGS: dict[str, dict[str, bool]] = {
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False},
    "fused": {"fused": True},
}


def make_of(case: Case) -> Make:
    """Return the factory of a step's torch optimizer."""
    kind = OPTIMIZERS[case.optimizer][1]
    assert kind is not None
    found = kind
    return lambda params: found(params, **_FLAGS[case.implementation])


def _in_format(case: Case, device: torch.device, build: Callable[[], nn.Module]) -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(TORCH_DTYPES[case.dtype])
    try:
        with device:
            return build()
    finally:
        torch.set_default_dtype(before)


def _step(case: Case, graph: cg.Graph, device: str) -> cg.Graph:
    """Return a model's declared training step."""
    ours = OPTIMIZERS[case.optimizer][0](implementation=case.implementation)
    return cg.training_step(
        graph, optimizer=ours, precision=case.precision or None, checkpoint=CHECKPOINTS[case.checkpoint](),
        autocast_device=device if case.precision.endswith("-mixed") else None,
    )  # fmt: skip


@dataclass(frozen=True)
class Model:
    """A declared model with the equivalent torch module."""

    graph: Callable[[Case], cg.Graph]
    """function that declares the forward pass"""
    module: Callable[[Case, Mapping[str, int]], nn.Module]
    """module factory"""
    inputs: tuple[str, ...]
    """input axes: floats if D or X is among them, else tokens below V"""
    targets: tuple[str, ...]
    """axes of the target classes"""
    classes: str
    """size symbol of the classes"""
    sizes: tuple[str, ...]
    """dimension names"""
    policies: tuple[str, ...] = ("",)
    """supported checkpointing policies"""

    def declare(self, case: Case, device: str) -> cg.Graph:
        """Return the declared graph with symbolic sizes."""
        graph = self.graph(case)
        if case.optimizer == "Muon":  # Muon transposes tall matrices
            with graph:
                graph.assume("F >= D", "F >= C")
        return graph if case.mode == "forward" else _step(case, graph, device)

    def program(self, case: Case, device: torch.device) -> Program:
        """Return the module with random inputs, or its training step."""
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
        return torch.randn(shape, device=device).to(TORCH_DTYPES[case.dtype])


def _open(axes: tuple[str, ...]) -> list[str | None]:
    # widths are weight sizes, which are constants in a trace
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


# -- models: blocks ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """One model layer on activations (B, S, D), without gradients."""

    graph: Callable[[Case], cg.Graph]
    """function that declares it"""
    module: Callable[[Mapping[str, int]], nn.Module]
    """module factory"""
    tables: bool
    """whether it takes cosine and sine of rotary embeddings"""
    sizes: tuple[str, ...]
    """dimension names"""

    def declare(self, case: Case, device: str) -> cg.Graph:
        """Return the declared graph with symbolic sizes."""
        return self.graph(case)

    def program(self, case: Case, device: torch.device) -> Program:
        """Return the module with random inputs."""
        B, S, D = (case.sizes[n] for n in "BSD")
        module = _in_format(case, device, lambda: self.module(case.sizes))
        x = torch.randn(B, S, D, device=device).to(TORCH_DTYPES[case.dtype])
        names: list[list[str | None]] = [["B", "S", None]]
        if not self.tables:
            return Program(_Unmasked(module), (x,), names)
        tables = rotations(S, frequencies(case.sizes["K"], device), x.dtype)
        return Program(_Unmasked(module), (x, *tables), [*names, ["S", None], ["S", None]])


class _Unmasked(nn.Module):
    """A block with fused attention."""

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
    """Rotate by halves with separate ops, as in eager code."""
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
"""model and block subjects by name"""


# -- layers ------------------------------------------------------------------------------------------------------------


def _normed(h: torch.Tensor) -> torch.Tensor:
    variance = h.pow(2).mean(-1, keepdim=True)
    return h * torch.rsqrt(variance + 1e-6)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`LlamaRMSNorm` of transformers."""
    return weight * _normed(x.to(torch.float32)).to(x.dtype)


def _added_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return RMS norm of a residual sum, and the sum."""
    total = x.to(torch.float32) + residual.to(torch.float32)
    return weight * _normed(total).to(x.dtype), total.to(x.dtype)


def _modulated_norm(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMS norm with elementwise scale (1 + scale) and shift."""
    normed = _normed(x.to(torch.float32)).to(x.dtype) * (0.0 + weight)
    return normed * (1 + scale) + shift


def _dynamic_tanh(alpha: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return gamma * torch.tanh(x * alpha) + beta


def _polynomial_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Weighted sum of norms of three powers."""
    h = x.to(torch.float32)
    third, second, first = h**3, h**2, h**1
    cubes, squares, same = _normed(third), _normed(second), _normed(first)
    return (weight[0] * cubes + weight[1] * squares + weight[2] * same + bias).to(x.dtype)


def _layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(x, weight.shape, weight, bias, 1e-6)


class _RmsNorm(torch.autograd.Function):
    """Fused RMS norm with the residuals and outputs of the CUDA kernels."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Save the operands and the fp32 scale per row."""
        factors = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(weight, x, factors)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return gradients, after making the incoming one contiguous."""
        weight, x, _ = ctx.saved_tensors
        grad = grad.contiguous()
        return torch.empty_like(weight), torch.empty_like(x)


def _fused_rms_norm(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return _RmsNorm.apply(weight, x)  # type: ignore[no-any-return, no-untyped-call]  # torch has no types


def _gated(act: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`LlamaMLP` of transformers."""

    def call(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        inner = act(functional.linear(x, gate)) * functional.linear(x, up)
        return functional.linear(inner, down)

    return call


def _stepped(x: torch.Tensor, gate: torch.Tensor, *_: torch.Tensor) -> None:
    """Run a 2 x 2 matmul forward and backward, which allocates cuBLAS workspaces in the autograd thread too."""
    few = gate[:2, :2].detach().requires_grad_()
    with torch.enable_grad():
        torch.autograd.grad((few @ few).sum(), few)


def _gated_halves(x: torch.Tensor) -> torch.Tensor:
    first, second = torch.chunk(x, 2, -1)
    return functional.silu(first) * second


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def _rotary(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`apply_rotary_pos_emb` of transformers, on transposed heads."""
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return tuple(((x * cos) + (_rotate_half(x) * sin)).transpose(1, 2) for x in (q, k))


def _sectioned(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`apply_multimodal_rotary_pos_emb` of transformers: sections of a head rotate by time, height and width."""
    part = cos.shape[-1] // 16
    sections = [2 * part, 3 * part, 3 * part] * 2
    first, second = (
        torch.cat([piece[i % 3] for i, piece in enumerate(turns.split_with_sizes(sections, dim=-1))], dim=-1)
        for turns in (cos, sin)
    )
    return _rotary(q, k, first, second)


def _angles(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Compute positions times frequencies as a matmul."""
    return sin.float().transpose(1, 2)[:, :, :1] @ cos.float()[:, :1]


def _sparsemax(x: torch.Tensor) -> torch.Tensor:
    """Sparsemax with a threshold from sorted cumulative sums."""
    ordered, _ = torch.sort(x, dim=-1, descending=True)
    sums = torch.cumsum(ordered, dim=-1)
    size = x.size(-1)
    places = torch.arange(1, size + 1, device=x.device, dtype=x.dtype).view(1, size)
    bound = 1 + places * ordered
    support = bound > sums
    k = support.sum(dim=-1, keepdim=True).clamp(min=1)
    total = (ordered * support).sum(dim=-1, keepdim=True)
    threshold = (total - 1) / k
    return torch.clamp(x - threshold, min=0)


def _pairs_turned(q: torch.Tensor, k: torch.Tensor, turns: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`apply_rotary_emb` of Llama 4 in transformers: pairs are complex numbers."""

    def complex_of(x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))

    first, second = complex_of(q), complex_of(k)
    made = torch.view_as_real(first * turns[:, :, None, :]).flatten(3)
    other = torch.view_as_real(second * turns[:, :, None, :]).flatten(3)
    return tuple(y.type_as(q) for y in (made, other))


def _turns(q: torch.Tensor, k: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(turns)[0] @ torch.view_as_real(turns)[0].transpose(1, 2)[:, :, :1]


def _biased(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Linear layer with bias as in torch up to 2.6, through cuBLASLt with its own workspace."""
    workspace = x.new_empty(LT_WORKSPACE // x.element_size())
    made = functional.linear(x, weight, bias)
    del workspace
    return made


def _masked_attention(*parameters: torch.Tensor) -> torch.Tensor:
    """Eager attention with a mask built in the call. Arguments: weights and biases in turn, input, heads."""
    weights, biases, (x, of) = parameters[:8:2], parameters[1:8:2], parameters[8:]
    b, s, d = x.shape
    heads = of.shape[0]
    q, k, v = (_biased(x, *both) for both in zip(weights[:3], biases[:3], strict=True))
    q, k, v = (each.view(b, s, heads, -1).transpose(1, 2) for each in (q, k, v))
    scores = torch.matmul(q, k.transpose(-2, -1)) * 0.125
    mask = torch.zeros(s, s, device=x.device, dtype=torch.bool)
    scores = scores.masked_fill(~mask, float("-inf"))
    shares = torch.softmax(scores, dim=-1)
    mixed = torch.matmul(shares, v)
    mixed = mixed.transpose(1, 2).contiguous().view(b, s, d)
    return _biased(mixed, weights[3], biases[3])


def _windowed_attention(scores: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Attention probabilities, convolved over queries and keys."""
    size = scores.shape[-1]
    mask = torch.tril(torch.ones(size, size, dtype=torch.bool, device=scores.device)).view(1, 1, size, size)
    shares = torch.softmax(scores.masked_fill(~mask, -1e9), dim=-1)
    mixed = functional.conv2d(shares, weight, bias, padding=1)
    return mixed.masked_fill(~mask, 0.0)


_MLP: dict[str, Any] = {
    "tensors": {"x": "R D", "gate": "F D", "up": "F D", "down": "D F"}, "made": ("R D",),
    "sizes": {"R": ("bsz*T", "bsz*seq_len", "B*T", "BT"), "D": ("hidden_size",), "F": ("intermediate_size",)},
    "drawn": True, "before": _stepped,
}  # fmt: skip
_NORM = {"M": ("M", "BT", "T", "seq_len"), "H": ("H", "N", "hidden_size")}
_MATRIX = {"M": ("M", "BT", "T"), "N": ("N", "hidden_size")}

LAYERS: dict[str, PublishedProgram] = {
    "rms_norm": PublishedProgram(
        "norms", _rms_norm, {"x": "M H", "weight": "H float32"}, ("M H",), _NORM,
        kept=("H float32",),
    ).since("2026-04-18"),
    "fused_add_rms_norm": PublishedProgram(
        "norms", _added_norm, {"x": "M H", "residual": "M H", "weight": "H float32"}, ("M H", "M H"), _NORM,
        kept=("H float32",) * 3, freed=True,
    ).since("2026-05-15", call=lambda *tensors: _added_norm(*tensors)[0], made=("M H",)),
    "layer_norm": PublishedProgram(
        "norms", _layer_norm, {"x": "M H", "weight": "H float32", "bias": "H float32"}, ("M H",), _NORM,
        kept=("H float32",) * 2,
    ).since("2026-04-18", tensors={"x": "M H", "weight": "H", "bias": "H"}),
    "softmax": PublishedProgram(
        "softmax", lambda x: functional.softmax(x, -1), {"x": "M N"}, ("M N",), _MATRIX,
        refused="a vector of N elements is measured, no matrix",
    ).since("2026-05-15", refused=""),
    "relu_squared": PublishedProgram(
        "pointwise", lambda x: functional.relu(x).square(), {"x": "M N"}, ("M N",), _MATRIX,
        refused="a vector of N elements is measured, no matrix",
    ).since("2026-05-15", refused=""),
    "embedding": PublishedProgram(
        "lookups", functional.embedding, {"ids": "B T ids", "table": "V D"}, ("B T D",),
        refused="12 to 14 GB of other allocations are counted",
    ).since("2026-05-15", refused="", sizes={"B": ("B", "BT/T"), "V": ("V", "vocab_size"), "D": ("D", "hidden_size")}),
    "modulated_rms_norm": PublishedProgram(
        "norms", _modulated_norm, {"x": "M H", "scale": "M H", "shift": "M H", "weight": "H float32"}, ("M H",), _NORM,
        given={"has_shift": True}, drawn=True,
    ),
    "dyt": PublishedProgram(
        "norms", _dynamic_tanh,
        {"alpha": "1 float32", "gamma": "H float32", "beta": "H float32", "x": "M H"}, ("M H",), _NORM,
        given={"beta": True}, kept=("1 float32", "H float32", "H float32") * 2,
    ).since("2026-03-18"),
    "poly_norm": PublishedProgram(
        "norms", _polynomial_norm, {"x": "M H", "weight": "3 float32", "bias": "float32"}, ("M H",), _NORM,
        kept=("3 float32", "float32"),
    ).since("2026-04-18"),
    "mlp": PublishedProgram("mlp", _gated(functional.silu), **_MLP, given={"hidden_act": "silu"}),
    "swiglu": PublishedProgram("mlp", _gated(functional.silu), **_MLP),
    "tiled_swiglu": PublishedProgram("mlp", _gated(functional.silu), **_MLP),
    "geglu": PublishedProgram("mlp", _gated(_gelu_tanh), **_MLP),
    "tiled_geglu": PublishedProgram("mlp", _gated(_gelu_tanh), **_MLP),
    "rope": PublishedProgram(
        "pointwise", _rotary, {"q": "1 T Q K", "k": "1 T G K", "cos": "1 T K fixed", "sin": "1 T K fixed"},
        ("1 T Q K", "1 T G K"),
        {"T": ("T", "seq_len"), "Q": ("num_q_heads",), "G": ("num_kv_heads",),
         "K": ("head_dim", "hidden_size/num_q_heads", "H/num_q_heads")},
        before=_angles, returned=True,
        # position ids, and the fp32 frequencies (half the head size)
        kept=("T ids", "K float16"),
    ),
    "qwen2vl_mrope": PublishedProgram(
        "pointwise", _sectioned,
        {"q": "1 T Q (16 J)", "k": "1 T G (16 J)", "cos": "3 1 T (16 J) fixed", "sin": "3 1 T (16 J) fixed"},
        ("1 T Q (16 J)", "1 T G (16 J)"),
        {"T": ("T", "seq_len"), "Q": ("num_q_heads",), "G": ("num_kv_heads",),
         "J": ("hidden_size/num_q_heads/16", "H/num_q_heads/16")},
        before=lambda q, k, cos, sin: _angles(q, k, cos[0], sin[0]), returned=True,
        kept=("3 T ids", "16 J float16"),
    ),
    "llama4_rope": PublishedProgram(
        "pointwise", _pairs_turned,
        {"q": "1 T Q (J 2)", "k": "1 T G (J 2)", "turns": "1 T J complex64 fixed"}, ("1 T Q (J 2)", "1 T G (J 2)"),
        {"T": ("T", "seq_len"), "Q": ("num_q_heads",), "G": ("num_kv_heads",),
         "J": ("hidden_size/num_q_heads/2", "H/num_q_heads/2")},
        kept=("T ids", "J float32"), before=_turns, returned=True,
    ),
    "fused_neighborhood_attention": PublishedProgram(
        "attention op by op", _masked_attention,
        {**{f"{to}_{part}": axes for to in ("q", "k", "v", "out")
            for part, axes in (("weight", "(N K) (N K)"), ("bias", "(N K)"))},
         "x": "B L (N K)", "heads": "N 0 fixed"},
        ("B L (N K)",),
        {"B": ("batch_size",), "L": ("seq_len",), "N": ("num_heads",), "K": ("hidden_size/num_heads",)},
        given={"bias": True}, kept=("N K N K", "N K") * 4, untimed="its mask is made entry by entry",
    ),
    "multi_token_attention": PublishedProgram(
        "attention op by op", _windowed_attention,
        {"scores": "B C_in L L", "weight": "C_out C_in 3 3", "bias": "C_out"}, ("B C_out L L",),
        given={"bias": True, "groups": 1, "K": 3},
        refused="what cuDNN takes for a convolution is not stated",
    ),
    "sparsemax": PublishedProgram(
        "softmax", _sparsemax, {"x": "R V"}, ("R V",), {"R": ("B*T", "BT"), "V": ("V", "hidden_size")},
    ).since("2026-05-15"),
    "megatron_rms_norm": PublishedProgram(
        "norms", _fused_rms_norm, {"weight": "H", "x": "S B H"}, format="bfloat16", summed=True, freed=True,
        untimed="one kernel, whose reads and writes are not stated",
    ),
    "megatron_swiglu": PublishedProgram(
        "pointwise", _gated_halves, {"x": "S B (2 F)"}, sizes={"F": ("ffn_local",)}, format="bfloat16", summed=True,
        freed=True, fresh=True,
    ),
}  # fmt: skip


# -- published programs: tracing ---------------------------------------------------------------------------------------

#: Programs by the name of the fused kernel that they are the reference for.
PROGRAMS: Mapping[str, PublishedProgram] = {**LAYERS, **LOSSES}
#: Reasons why kernels are not traced.
UNTRACED: Mapping[str, str] = {
    "fused_moe": "which tokens an expert has is up to the data",
    "kto_loss": "which rows of logits are chosen is up to the data",
    "group_norm": "its benchmark ignores the mode that is stated",
}  # fmt: skip


class _Given(torch.autograd.Function):
    """A loss with prescribed gradients, free in both passes."""

    @staticmethod
    def forward(ctx: Any, *both: torch.Tensor) -> torch.Tensor:
        """Save the prescribed gradients, the second half of the arguments."""
        ctx.save_for_backward(*both[len(both) // 2 :])
        return both[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the prescribed gradients."""
        given = ctx.saved_tensors
        return (*given, *(None for _ in given))


def _results(program: PublishedProgram, found: Any) -> tuple[torch.Tensor, ...]:
    """Return the tensors from which the backward pass starts."""
    if program.summed:
        return (found.sum(),)
    return found if isinstance(found, tuple) else (found,)


class _Called(nn.Module):
    """A program as a module that returns a loss."""

    def __init__(self, program: PublishedProgram) -> None:
        super().__init__()
        self.program = program

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Call the program, with prescribed output gradients."""
        tensors = tuple(map(joined, [*self.program.tensors.values(), *self.program.made], tensors))
        many = len(self.program.tensors)
        results = _results(self.program, self.program.call(*tensors[:many]))
        if not self.program.made:
            return results[0]
        return _Given.apply(*results, *tensors[many:])  # type: ignore[no-any-return, no-untyped-call]  # torch has no types


class _Benchmarked(nn.Module):
    """A program in the steady state of a memory benchmark, with gradients from the previous run."""

    def __init__(self, program: PublishedProgram, mode: str) -> None:
        super().__init__()
        self.program, self.mode = program, mode
        learnt = [text for text in program.tensors.values() if not {"ids", "fixed"} & set(text.split())]
        self.had = [] if mode == "forward" or program.fresh or program.returned else learnt
        self.made = program.made if mode == "backward" or (mode == "full" and not program.drawn) else ()
        # `fixed`, because neither parameters of other variants nor previous gradients require gradients
        kept, had, made = ([f"{text} fixed" for text in texts] for texts in (program.kept, self.had, self.made))
        self.texts = [*kept, *program.tensors.values(), *made, *had]

    def forward(self, *tensors: torch.Tensor) -> Any:
        """Call the program, with its backward pass if the mode includes it."""
        left = list(tensors[len(self.program.kept) :])
        own = [_leaf(text, left.pop(0)) for text in self.program.tensors.values()]
        given = [joined(text, left.pop(0)) for text in self.made]
        had = [joined(text, left.pop(0)) for text in self.had]
        if self.program.before is not None:
            self.program.before(*own)
        with torch.enable_grad():
            if self.mode == "forward":
                return self.program.call(*own)
            return self._both(own, given, had)

    def _both(self, own: Any, given: list[torch.Tensor], had: list[torch.Tensor]) -> Any:
        learnt = [t for t in own if t.requires_grad]
        for tensor, grad in zip(learnt, had, strict=False):
            tensor.grad = grad
        del had
        found = self.program.call(*own)
        results = _results(self.program, found)
        if not self.program.made:
            grads = None
        elif self.program.drawn and self.mode == "full":
            grads = [y.detach().new_empty(y.shape) for y in results]
        else:
            grads = given
        if self.program.returned:
            torch.autograd.grad(results, learnt, grads, allow_unused=True, retain_graph=True)
        else:
            torch.autograd.backward(results, grads, retain_graph=not self.program.freed)
            for t in learnt:
                t.grad = None
        return found


def _leaf(text: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a leaf tensor with the axes of a text, whose gradient will be stored."""
    own = joined(text, tensor)
    return tensor if own is tensor else own.detach().requires_grad_(tensor.requires_grad)


def _format(program: PublishedProgram, format: str) -> torch.dtype:
    if (chosen := format or program.format) not in FORMATS:
        raise UnsupportedError(f"inputs: dtype {chosen!r}, expected one of {', '.join(FORMATS)}")
    return FORMATS[chosen]


def _graph(module: nn.Module, texts: list[str], format: torch.dtype, **how: Any) -> Graph:
    axes = dict.fromkeys(axis for text in texts for axis in axes_of(text))
    # even, because a program may use half an axis, and all different
    hints = {axis: 2 * (11 + i) for i, axis in enumerate(axes)}
    tensors = [made_of(text, hints, format) for text in texts]
    return trace(module, *tensors, dims=[names_of(text) for text in texts], device="cuda", **how)


@cache
def traced(program: PublishedProgram, format: str) -> Graph:
    """Trace forward and backward pass of a program with symbolic sizes.

    `format` is a torch dtype name such as bfloat16; empty means the program's default. Raises UnsupportedError for
    unknown dtypes, and for programs without comparable times.
    """
    if program.untimed:
        raise UnsupportedError(f"time: {program.untimed}")
    texts = [*program.tensors.values(), *(f"{text} fixed" for text in program.made)]
    return _graph(_Called(program), texts, _format(program, format), train=True)


@cache
def benchmarked(program: PublishedProgram, format: str, mode: str, arch: str) -> Graph:
    """Trace a program's memory benchmark with symbolic sizes, including the tensors that it keeps alive.

    `mode` is forward, backward (after an untimed forward pass) or full. `arch` is the compute capability, such as
    sm_90. Raises UnsupportedError for unknown dtypes, and for programs without comparable peaks.
    """
    if program.refused:
        raise UnsupportedError(f"peak memory: {program.refused}")
    module = _Benchmarked(program, mode)
    return _graph(module, module.texts, _format(program, format), arch=arch)
