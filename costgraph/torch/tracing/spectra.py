"""Functions of torch that are one call below Python and work out sizes as numbers: their parts, with symbols.

Short-time Fourier transforms (aten/src/ATen/native/SpectralOps.cpp) and the order of an einsum's products.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.backends import opt_einsum
from torch.nn import functional

__all__ = ["einsum", "istft", "stft"]

aten = torch.ops.aten
_PLAIN, _BY_ROOT, _BY_SIZE = 0, 1, 2  # how a transform is scaled


def _window(x: torch.Tensor, n_fft: int, length: int | None, window: torch.Tensor | None) -> torch.Tensor | None:
    """Return the window with zeros around it where it is shorter than a frame."""
    length = n_fft if length is None else length
    if length == n_fft:
        return window
    made = torch.zeros(n_fft, dtype=x.real.dtype if window is None else window.dtype, device=x.device)
    inner = made.narrow(0, (n_fft - length) // 2, length)
    inner.fill_(1) if window is None else inner.copy_(window)
    return made


def stft(
    input: torch.Tensor,  # torch's names, which callers use
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
    """Transform overlapping frames, as `torch.stft` does it; None where it has to do that itself."""
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
    scale = _BY_ROOT if normalized else _PLAIN
    if frames.is_complex():
        made = aten._fft_c2c.default(frames, [2], scale, True)
    else:
        made = aten._fft_r2c.default(frames, [2], scale, onesided is not False)
    made = made.transpose(1, 2)
    made = made if input.ndim == 2 else made.squeeze(0)
    return made if return_complex else torch.view_as_real(made)


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
    """Add up transformed frames, as `torch.istft` does it, which also looks whether the window leaves gaps."""
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
    count, whole = x.shape[1], n_fft + hop * (x.shape[1] - 1)
    windowed = frames * weights.view(1, 1, n_fft)  # a variable of torch's function, which lives to its end
    made = _added(windowed, whole, hop)
    squares = weights.pow(2).expand(1, count, n_fft)
    envelope = _added(squares, whole, hop)
    start = n_fft // 2 if center else 0
    end = start + length if length is not None else whole - start
    # what is asked for beyond the last frame is silence
    seen = torch.sym_min(end, whole)  # type: ignore[no-untyped-call]  # torch has no types for it
    made, envelope = made[:, start:seen], envelope[:, start:seen]
    envelope.abs().min().lt(1e-11)
    made = made / envelope
    if end > whole:
        made = functional.pad(made, [0, end - whole])
    return made if input.ndim == 3 else made.squeeze(0)


def _added(frames: torch.Tensor, whole: Any, hop: int) -> torch.Tensor:
    made: torch.Tensor = aten.unfold_backward.default(frames, [frames.shape[0], whole], 1, frames.shape[2], hop)
    return made


def einsum(equation: Any, *operands: Any) -> torch.Tensor | None:
    """Multiply more than two operands in the cheapest order, which is an assumption about their sizes.

    None where torch looks for no order, or takes another way of writing.
    """
    if len(operands) < 3 or not isinstance(equation, str) or not (opt_einsum.is_available() and opt_einsum.enabled):
        return None
    import opt_einsum as library  # type: ignore[import-untyped]  # which torch may do without

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
    made: torch.Tensor = torch._VF.einsum(equation, operands, path=flat)  # type: ignore[attr-defined]
    return made
