"""Replacements for torch functions that need sizes as numbers: decomposed into ops that accept symbolic sizes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import _prims_common, overrides
from torch.backends import opt_einsum
from torch.nn import functional
from torch.nn.functional import interpolate, linear, max_pool1d
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily

from .formats import Formats
from .symbolic_range import Loops, Parts, Range

__all__ = [
    "cumprod",
    "in_place",
    "einsum",
    "istft",
    "stft",
    "RECURRENT",
    "gru_cell",
    "lstm_cell",
    "SymbolicSizes",
]


# -- fake-tensor workarounds -------------------------------------------------------------------------------------------
# Functions that torch runs differently on fake tensors: the gradient of `cumprod`, and in-place bias addition.


class _CumulativeProduct(torch.autograd.Function):
    """`cumprod` with torch's gradient for nonzero elements: a reverse cumulative sum and a division."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int) -> torch.Tensor:
        product = torch.cumprod(x, dim)
        ctx.save_for_backward(x, product)
        ctx.dim = dim
        return product

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        x, product = ctx.saved_tensors
        shares = product * g
        zeros = x == 0  # alive until the end
        zeros.any()
        return _reverse_cumsum(shares, ctx.dim).div(x), None


def _reverse_cumsum(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return a reverse cumulative sum; intermediates live until the end, as in C++."""
    flipped = x.flip(dim)
    sums = flipped.cumsum(dim)
    return sums.flip(dim)


def cumprod(input: torch.Tensor, dim: int, *, dtype: Any = None) -> torch.Tensor | None:
    """Return a cumulative product; None if torch's own function must run: without gradients, or with named axes."""
    if not torch.is_grad_enabled() or not input.requires_grad or not isinstance(dim, int):
        return None
    x = input if dtype is None else input.to(dtype)
    product: torch.Tensor = _CumulativeProduct.apply(x, dim)  # type: ignore[no-untyped-call]  # torch has no types for it
    return product


def in_place(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    """Add the bias of a linear layer in place, as torch does for noncontiguous inputs; None for contiguous ones.

    For fake tensors, torch would allocate another tensor.
    """
    flat = input.ndim < 3 or weight.ndim != 2 or _prims_common.is_contiguous_or_false(input)
    if bias is None or flat or torch.is_autocast_enabled(input.device.type):  # autocast casts first
        return None
    return torch.matmul(input, weight.T).add_(bias)


# -- spectra and einsum ------------------------------------------------------------------------------------------------
# Short-time Fourier transforms as in aten/src/ATen/native/SpectralOps.cpp, and the contraction order of `einsum`.

_NO_SCALE, _BY_ROOT, _BY_SIZE = 0, 1, 2  # normalization modes of a transform


def _window(x: torch.Tensor, n_fft: int, length: int | None, window: torch.Tensor | None) -> torch.Tensor | None:
    """Return the window, zero-padded to a frame."""
    length = n_fft if length is None else length
    if length == n_fft:
        return window
    padded = torch.zeros(n_fft, dtype=x.real.dtype if window is None else window.dtype, device=x.device)
    inner = padded.narrow(0, (n_fft - length) // 2, length)
    inner.fill_(1) if window is None else inner.copy_(window)
    return padded


def stft(
    input: torch.Tensor,  # torch's parameter names
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: torch.Tensor | None = None,
    center: bool = True,
    pad_mode: str = "reflect",
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool | None = None,
    align_to_window: bool | None = None,
) -> torch.Tensor | None:
    """Decompose `torch.stft`; None if torch's own function must run."""
    if align_to_window or input.ndim > 2:
        return None
    hop = n_fft // 4 if hop_length is None else hop_length
    x = input if input.ndim == 2 else input.unsqueeze(0)
    if center:
        x = functional.pad(x.unsqueeze(0), [n_fft // 2, n_fft // 2], pad_mode).squeeze(0)
    weights = _window(x, n_fft, win_length, window)
    rows, step = x.stride()
    frames = x.as_strided([x.shape[0], 1 + (x.shape[1] - n_fft) // hop, n_fft], [rows, hop * step, step])
    if weights is not None:
        frames = frames * weights
    scale = _BY_ROOT if normalized else _NO_SCALE
    if frames.is_complex():
        spectrum = aten._fft_c2c.default(frames, [2], scale, True)
    else:
        spectrum = aten._fft_r2c.default(frames, [2], scale, onesided is not False)
    spectrum = spectrum.transpose(1, 2)
    spectrum = spectrum if input.ndim == 2 else spectrum.squeeze(0)
    return spectrum if return_complex else torch.view_as_real(spectrum)


def istft(
    input: torch.Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: torch.Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: Any = None,
    return_complex: bool = False,
) -> torch.Tensor:
    """Decompose `torch.istft`, including its check for gaps in the window envelope."""
    hop = n_fft // 4 if hop_length is None else hop_length
    x = (input if input.ndim == 3 else input.unsqueeze(0)).transpose(1, 2)
    weights = _window(x, n_fft, win_length, window)
    if weights is None:
        weights = torch.ones(n_fft, dtype=x.real.dtype, device=x.device)
    scale = _BY_ROOT if normalized else _BY_SIZE
    if return_complex:
        frames = aten._fft_c2c.default(x, [2], scale, False)
    else:
        half = x.narrow(2, 0, n_fft // 2 + 1) if onesided is False else x
        frames = aten._fft_c2r.default(half, [2], scale, n_fft)
    count, total = x.shape[1], n_fft + hop * (x.shape[1] - 1)
    windowed = frames * weights.view(1, 1, n_fft)  # alive until torch's function returns
    signal = _overlap_add(windowed, total, hop)
    squares = weights.pow(2).expand(1, count, n_fft)
    envelope = _overlap_add(squares, total, hop)
    start = n_fft // 2 if center else 0
    end = start + length if length is not None else total - start
    # beyond the last frame, the signal is padded with zeros
    available = torch.sym_min(end, total)  # type: ignore[no-untyped-call]  # torch has no types for it
    signal, envelope = signal[:, start:available], envelope[:, start:available]
    envelope.abs().min().lt(1e-11)
    signal = signal / envelope
    if end > total:
        signal = functional.pad(signal, [0, end - total])
    return signal if input.ndim == 3 else signal.squeeze(0)


def _overlap_add(frames: torch.Tensor, length: Any, hop: int) -> torch.Tensor:
    signal: torch.Tensor = aten.unfold_backward.default(frames, [frames.shape[0], length], 1, frames.shape[2], hop)
    return signal


def einsum(equation: Any, *operands: Any) -> torch.Tensor | None:
    """Contract more than two operands in the cheapest order, which assumes relations between their sizes.

    None if torch does not optimize the order, or for another calling convention.
    """
    if len(operands) < 3 or not isinstance(equation, str) or not (opt_einsum.is_available() and opt_einsum.enabled):
        return None
    import opt_einsum as library  # type: ignore[import-untyped]  # optional in torch

    inputs, output, _ = library.parser.parse_einsum_input([equation, *(t.shape for t in operands)], shapes=True)
    terms = inputs.split(",")
    sizes: dict[str, Any] = {}
    for term, t in zip(terms, operands, strict=True):
        for letter, n in zip(term, t.shape, strict=True):
            if not isinstance(n, int) or n != 1:
                sizes[letter] = n
            sizes.setdefault(letter, n)
    find = library.paths.get_path_fn(opt_einsum.strategy or "auto")
    path = find([frozenset(t) for t in terms], frozenset(output), sizes, None)
    flat = [*itertools.chain.from_iterable(path)]
    out: torch.Tensor = torch._VF.einsum(equation, operands, path=flat)  # type: ignore[attr-defined]
    return out


# -- recurrent layers --------------------------------------------------------------------------------------------------
# Decomposed as in torch's CPU functions (`native/RNN.cpp`, `native/mkldnn/RNN.cpp`), which need sizes as numbers.

aten = torch.ops.aten
# torch's code for the LSTM mode
_LSTM = 2

#: A state tensor, or the pair of an LSTM.
State = Any
#: Weights and biases of a layer in one direction.
Weights = Sequence[torch.Tensor]
#: Input, initial state, weights, whether there are biases, whether time is reversed, and tensors that live until both
#: directions have run -> outputs and final state.
Layer = Callable[[torch.Tensor, State, Weights, bool, bool, dict[Any, Any]], tuple[torch.Tensor, State]]


class _RecurrentArguments(NamedTuple):
    """Arguments of torch's recurrent layers, in order."""

    input: torch.Tensor
    hx: Any
    params: Sequence[torch.Tensor]
    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool

    @property
    def steps(self) -> torch.Tensor:
        """Input with time as the first axis."""
        return self.input.transpose(0, 1) if self.batch_first else self.input

    @property
    def sizes(self) -> tuple[int, int, float]:
        """Numbers of layers and directions, and dropout."""
        return self.num_layers, 1 + self.bidirectional, self.dropout if self.train else 0.0

    def in_input_layout(self, x: torch.Tensor) -> torch.Tensor:
        """Return an output in the layout of the input."""
        return x.transpose(0, 1) if self.batch_first else x


def _lstm(loop_state: Loops, *args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run an LSTM, with one oneDNN op per layer unless its state is projected."""
    arguments = _RecurrentArguments(*args)
    projected = arguments.hx[0].shape[2] != arguments.hx[1].shape[2]
    fused = torch._C._get_mkldnn_enabled() and not projected and arguments.input.dtype == torch.float32
    states = list(zip(*(t.contiguous() if fused else t for t in arguments.hx), strict=True))
    layer, x = _onednn_layer if fused else _stepwise(_lstm_cell, loop_state), arguments.steps
    x, last = _stacked_layers(
        layer, x.contiguous() if fused else x, states, arguments.params, arguments.has_biases, arguments.sizes
    )
    hidden, cell = (torch.stack(states_by_layer) for states_by_layer in zip(*last, strict=True))
    return arguments.in_input_layout(x), hidden, cell


def _one_state(cell: Callable[..., torch.Tensor]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Return a recurrent layer with a single state tensor, run step by step."""

    def layers(loop_state: Loops, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        arguments = _RecurrentArguments(*args)
        states = arguments.hx.unbind(0)
        x, last = _stacked_layers(
            _stepwise(cell, loop_state),
            arguments.steps,
            states,
            arguments.params,
            arguments.has_biases,
            arguments.sizes,
        )
        return arguments.in_input_layout(x), torch.stack(last)

    return layers


def _stacked_layers(
    layer: Layer, x: torch.Tensor, states: Sequence[State], params: Weights, biased: bool, sizes: tuple[int, int, float]
) -> tuple[torch.Tensor, list[State]]:
    """Run stacked layers, each in all directions, with dropout between them."""
    layers, directions, dropout = sizes
    per_layer = len(params) // (layers * directions)
    last: list[State] = []
    outs: dict[int, torch.Tensor] = {}
    for i in range(layers):
        shared: dict[Any, Any] = {}
        for side in range(directions):
            k = i * directions + side
            outs[side], state = layer(
                x, states[k], params[k * per_layer : (k + 1) * per_layer], biased, side > 0, shared
            )
            last.append(state)
            del state
        x = outs[0] if directions == 1 else torch.cat(list(outs.values()), -1)
        if layer is not _onednn_layer:  # its outputs live until the next layer's replace them
            outs.clear()
        del shared
        if dropout and i < layers - 1:
            x = torch.dropout(x, dropout, train=True)
    return x, last


def _onednn_layer(
    x: torch.Tensor, state: State, weights: Weights, biased: bool, reverse: bool, shared: dict[Any, Any]
) -> tuple[torch.Tensor, State]:
    biases = weights[2:] if biased else [torch.zeros(w.shape) for w in weights]
    flags: tuple[Any, ...] = (reverse, [], _LSTM, state[0].shape[-1], 1, biased, False, False, False)
    out, hidden, cell, _ = aten.mkldnn_rnn_layer(x, *weights[:2], *biases, *state, *flags)
    return out, (hidden, cell)


def _stepwise(cell: Callable[..., State], loop_state: Loops) -> Layer:
    def layer(
        x: torch.Tensor, state: State, weights: Weights, biased: bool, reverse: bool, shared: dict[Any, Any]
    ) -> tuple[torch.Tensor, State]:
        bias = weights[2:4] if biased else (None, None)
        project = weights[-1] if len(weights) % 2 else None
        outs = shared[reverse] = []
        # the inputs of the other direction live until these exist
        inputs = in_place(x, weights[0], bias[0])
        inputs = shared["inputs"] = functional.linear(x, weights[0], bias[0]) if inputs is None else inputs
        parts = loop_state.parts(inputs)
        steps = inputs.unbind(0) if parts is None else parts
        for step in reversed(steps) if reverse else steps:
            state = cell(step, state, weights[1], bias[1], project)
            outs.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(outs[::-1] if reverse else outs), state

    return layer


def _gru_cell(x: torch.Tensor, h: torch.Tensor, weight: torch.Tensor, bias: Any, _: None) -> torch.Tensor:
    size = h.shape[1]
    from_input = aten.unsafe_split(x, size, 1)
    from_state = aten.unsafe_split(functional.linear(h, weight, bias), size, 1)
    reset = from_state[0].add_(from_input[0]).sigmoid_()
    update = from_state[1].add_(from_input[1]).sigmoid_()
    new = from_input[2].add(from_state[2].mul_(reset)).tanh_()
    state: torch.Tensor = (h - new).mul_(update).add_(new)
    return state


def gru_cell(
    x: torch.Tensor, h: torch.Tensor, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None
) -> torch.Tensor:
    """Run one step of a GRU."""
    return _gru_cell(functional.linear(x, w_ih, b_ih), h, w_hh, b_hh, None)


def _simple_cell(nonlinearity: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    def cell(x: torch.Tensor, h: torch.Tensor, weight: torch.Tensor, bias: Any, _: None) -> torch.Tensor:
        return nonlinearity(functional.linear(h, weight, bias).add_(x))

    return cell


def lstm_cell(x: torch.Tensor, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> State:
    """Run one step of an LSTM."""
    h, c = hx
    return _lstm_gates(functional.linear(h, w_hh, b_hh).add_(functional.linear(x, w_ih, b_ih)), c)


def _lstm_cell(x: torch.Tensor, state: State, weight: torch.Tensor, bias: Any, project: Any) -> State:
    h, c = _lstm_gates(functional.linear(state[0], weight, bias).add_(x), state[1])
    return h if project is None else h @ project.T, c


def _lstm_gates(gates: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    i, f, g, o = aten.unsafe_split(gates, c.shape[1], 1)
    i, f, g, o = i.sigmoid_(), f.sigmoid_(), g.tanh_(), o.sigmoid_()
    c = (f * c).add_(i * g)
    return o * c.tanh(), c


#: By torch function, called with the loops of the run; packed sequences have data-dependent lengths and are excluded.
RECURRENT: dict[Any, Callable[..., Any]] = {
    torch.lstm: _lstm,
    torch.gru: _one_state(_gru_cell),
    torch.rnn_tanh: _one_state(_simple_cell(torch.tanh)),
    torch.rnn_relu: _one_state(_simple_cell(torch.relu)),
}


# -- functions ---------------------------------------------------------------------------------------------------------

#: Op for each mode of `interpolate`, and whether it takes `align_corners`.
_INTERPOLATION_OPS = {
    "nearest": ("upsample_nearest{}d", False),
    "nearest-exact": ("_upsample_nearest_exact{}d", False),
    "linear": ("upsample_linear{}d", True),
    "bilinear": ("upsample_bilinear{}d", True),
    "bicubic": ("upsample_bicubic{}d", True),
    "trilinear": ("upsample_trilinear{}d", True),
}


class SymbolicSizes(TorchFunctionMode):
    """Function mode that keeps sizes symbolic in torch functions, using the replacements below.

    `has_torch_function` ignores the mode, so layers with a fast path still take it. A saved random state, as in
    activation checkpointing, is recorded as an allocation. `formats`, if given, calls all functions and records casts.
    """

    unseen = True

    def __init__(self, loop_state: Loops, formats: Formats | None = None) -> None:
        super().__init__()
        self._loop_state, self._formats = loop_state, formats

    def __enter__(self) -> SymbolicSizes:
        self._original_check = overrides.has_torch_function
        self._replaced = ExitStack()
        for module, name, replacement in (
            (overrides, "has_torch_function", self._has_torch_function),
            (torch, "get_rng_state", _random_state),
            (torch, "set_rng_state", lambda state: None),  # random draws have no data
        ):
            self._replaced.enter_context(patch.object(module, name, replacement))
        super().__enter__()  # type: ignore[no-untyped-call]  # torch has no types for it
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # as above
        self._replaced.close()

    def _note_replacement(self) -> None:
        if self._formats is not None:
            self._formats.replaced = True

    def _has_torch_function(self, tensors: Any) -> bool:
        with ExitStack() as popped:
            while _is_hidden_mode(torch._C._len_torch_function_stack()):
                popped.enter_context(_pop_mode_temporarily())
            return self._original_check(tensors)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in RECURRENT and isinstance(args[3], bool) and _is_symbolic(args[0]):  # else a packed sequence
            self._note_replacement()
            return RECURRENT[func](self._loop_state, *args)
        replacement = _REPLACEMENTS.get(func)
        result = None if replacement is None else replacement(*args, **(kwargs or {}))
        if func in _SPLITS:
            result = _SPLITS[func](self._loop_state, *args, **(kwargs or {}))
        if result is not None:
            self._note_replacement()
            return result
        return func(*args, **(kwargs or {})) if self._formats is None else self._formats(func, args, kwargs or {})


def _is_hidden_mode(modes: int) -> bool:
    """Whether the innermost mode is hidden from the program."""
    return modes > 0 and getattr(torch._C._get_function_stack_at(modes - 1), "unseen", False)


def _random_state() -> torch.Tensor:
    """Return a tensor as large as the state of torch's generator."""
    return torch.empty(torch.default_generator.get_state().numel(), dtype=torch.uint8)


def _is_symbolic(x: torch.Tensor) -> bool:
    return any(isinstance(n, torch.SymInt) for n in x.shape)


def _interpolate(
    input: torch.Tensor,  # torch's parameter name
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> torch.Tensor | None:
    """Decompose `interpolate`; None if torch's own function must run."""
    axes = input.ndim - 2
    if mode not in _INTERPOLATION_OPS or antialias or (size is None) == (scale_factor is None):
        return None
    target = size if scale_factor is None else scale_factor
    per_axis = list(target) if isinstance(target, tuple | list) else [target] * axes
    if len(per_axis) != axes:
        return None
    name, takes_flag = _INTERPOLATION_OPS[mode]
    flags = [bool(align_corners)] if takes_flag else []
    passes_factors = scale_factor is not None and not recompute_scale_factor
    factors = [float(f) for f in per_axis] if passes_factors else [None] * axes
    sizes = (
        per_axis
        if scale_factor is None
        else [_scaled_size(n, f) for n, f in zip(input.shape[2:], per_axis, strict=True)]
    )
    out: torch.Tensor = getattr(torch.ops.aten, name.format(axes)).default(input, sizes, *flags, *factors)
    return out


def _scaled_size(size: Any, factor: float) -> Any:
    """Return a size times a factor, rounded down as in torch."""
    if isinstance(factor, torch.SymFloat):
        return math.floor(size * factor)
    if round(factor) == factor:
        return size * round(factor)
    part = round(1 / factor) if factor else 0
    if part and 1 / part == factor:
        return size // part
    return torch.sym_int(size * factor)  # type: ignore[no-untyped-call]  # torch has no types for it


def _max_pool1d(
    input: torch.Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> torch.Tensor | None:
    """Decompose `max_pool1d` into `max_pool2d` of height 1, as torch does."""
    if not _is_symbolic(input) or return_indices:
        return None
    parameters = (1, kernel_size), (1, stride or kernel_size), (0, padding), (1, dilation)
    window_arguments = [(high, *n) if isinstance(n, tuple | list) else (high, n) for high, n in parameters]
    outputs = torch.ops.aten.max_pool2d_with_indices.default(input.unsqueeze(-2), *window_arguments, ceil_mode)
    largest: torch.Tensor = outputs[0].squeeze(-2)
    return largest


def _take_along_dim(input: torch.Tensor, indices: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Decompose `take_along_dim` into `gather` with broadcasting."""
    if dim is None:
        return input.reshape(-1).gather(0, indices.reshape(-1))
    axis = dim % input.ndim
    shapes = ([*t.shape[:axis], 1, *t.shape[axis + 1 :]] for t in (input, indices))
    lead = list(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]  # torch has no types for it
    x, positions = (t.expand([*lead[:axis], t.shape[axis], *lead[axis + 1 :]]) for t in (input, indices))
    return x.gather(axis, positions.remainder(input.shape[axis]))  # wraps negative indices


def _arange(n: Any, dtype: torch.dtype | None, device: Any) -> torch.Tensor:
    """Return the integers below a symbolic count."""
    target = device or torch.get_default_device()
    out: torch.Tensor = torch.ops.aten.arange.default(n, dtype=dtype or torch.get_default_dtype(), device=target)
    return out


def _linspace(
    start: Any, end: Any, steps: Any, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any
) -> torch.Tensor | None:
    """Decompose `linspace` with symbolic `steps`."""
    if not isinstance(steps, torch.SymInt) or options.get("out") is not None:
        return None
    return _arange(steps, dtype, device).mul_((end - start) / (steps - 1)).add_(start)


def _hann_window(
    window_length: Any, periodic: bool = True, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any
) -> torch.Tensor | None:
    """Decompose `hann_window`; a periodic window drops the last of one point more, as in torch."""
    if not isinstance(window_length, torch.SymInt):
        return None
    points = window_length + 1 if periodic else window_length
    window = _arange(points, dtype, device).mul_(2 * math.pi / (points - 1)).cos_().mul_(-0.5).add_(0.5)
    return window.narrow(0, 0, window_length) if periodic else window


def _if_symbolic(step: Callable[..., Any]) -> Callable[..., Any]:
    """Apply a replacement only to inputs with symbolic sizes."""
    return lambda input, *args: step(input, *args) if _is_symbolic(input) else None


def _unbind(loop_state: Loops, input: torch.Tensor, dim: int = 0) -> Parts | None:
    return loop_state.parts(input, dim) if input.ndim else None


def _split(loop_state: Loops, tensor: torch.Tensor, split_size: Any, dim: int = 0) -> Parts | None:
    return loop_state.parts(tensor, dim, split_size) if isinstance(split_size, int) and tensor.ndim else None


#: Functions that split a tensor into a symbolic number of views, for loops over them.
_SPLITS: dict[Any, Callable[..., Any]] = {
    torch.unbind: _unbind,
    torch.Tensor.unbind: _unbind,
    torch.split: _split,
    torch.Tensor.split: _split,
}


def _get_item(x: torch.Tensor, index: Any) -> torch.Tensor | None:
    """Index a tensor with symbolic positions, which torch accepts only as slice bounds; None for other indices."""
    indices = list(index) if isinstance(index, tuple) else [index]
    position = next((i for i, k in enumerate(indices) if isinstance(k, torch.SymInt)), None)
    if position is None or any(isinstance(k, torch.Tensor | list | bool) for k in indices):
        return None
    k, indices[position] = indices[position], slice(None)
    before = indices[:position]
    axes = x.ndim - sum(i is not None and i is not Ellipsis for i in indices)  # axes covered by an ellipsis
    axis = sum(axes if i is Ellipsis else not isinstance(i, int) for i in before)
    return x[tuple(indices)].select(axis, k)


def _set_item(x: torch.Tensor, index: Any, value: Any) -> bool | None:
    """Write to symbolic positions."""
    part = _get_item(x, index)
    if part is None:
        return None
    part.copy_(value) if isinstance(value, torch.Tensor) else part.fill_(value)
    return True


def _range_tensor(
    data: Any, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any
) -> torch.Tensor | None:
    """Return a symbolic range as a tensor."""
    if not isinstance(data, Range) or options.get("requires_grad"):
        return None
    out = _arange(data.count, torch.int64, device)
    out = out if data.step == 1 else out.mul_(data.step)
    out = out if isinstance(data.start, int) and not data.start else out.add_(data.start)
    return out if dtype is None else out.to(dtype)


#: Replacements by torch function; a result of None means that the function itself must run.
_REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    interpolate: _interpolate,
    linear: in_place,
    torch.Tensor.__getitem__: _get_item,
    torch.Tensor.__setitem__: _set_item,
    torch.tensor: _range_tensor,
    torch.as_tensor: _range_tensor,
    torch.linspace: _linspace,
    torch.hann_window: _hann_window,
    torch.stft: stft,
    torch.istft: istft,
    torch.einsum: einsum,
    torch.cumprod: cumprod,
    torch.Tensor.cumprod: cumprod,
    torch.max_pool1d: _max_pool1d,
    max_pool1d: _max_pool1d,
    torch.take_along_dim: _take_along_dim,
    torch.Tensor.take_along_dim: _take_along_dim,
    torch.gru_cell: _if_symbolic(gru_cell),
    torch.lstm_cell: _if_symbolic(lstm_cell),
}
