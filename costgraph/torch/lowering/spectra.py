"""Fourier transforms, and views of complex numbers."""

from __future__ import annotations

import torch

from ...ops.spectra import SCALES, Fourier, ViewAs
from .site import Site
from .table import lowering

__all__: list[str] = []  # its lowerings are found in LOWERINGS

_VIEWS = {"real": torch.view_as_real, "complex": torch.view_as_complex, "conjugate": torch.conj}
aten = torch.ops.aten


@lowering(ViewAs)
def _view_as(site: Site[ViewAs]) -> None:
    site.alias(site.call(_VIEWS[site.kind.what], site.operands[0]))


@lowering(Fourier)
def _fourier(site: Site[Fourier]) -> None:
    kind, (x,) = site.kind, site.operands
    axes, scale = list(kind.axes), SCALES.index(kind.scale)
    if site.op.operands[0].dtype.kind != "complex":
        site.own(aten._fft_r2c.default, x, axes, scale, kind.last is not None)
    elif kind.last is not None:
        site.own(aten._fft_c2r.default, x, axes, scale, site.of(kind.last))
    else:
        site.own(aten._fft_c2c.default, x, axes, scale, not kind.inverse)
