"""Memory of oneDNN's LSTM on a CPU: what a training step saves of it, and what its kernels take while they run.

Sizes are those of `cpu/rnn/rnn_utils.hpp` (v3.12, with AVX2): rows are padded to lines of cache, and each part starts
at a page. Held against the allocator in the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["PAGE", "Lstm"]

PAGE = 4096
#: Pointers to weights and biases, and the distance to the first page: of training and of inference.
_TABLES, _TABLES_OF_INFERENCE = 4664, 4872
_GATES = 4
# widths of blocks that weights are packed into, and of a batch whose products of all steps are not made at once
_BLOCK, _MANY = 16, 128


@dataclass(frozen=True)
class Lstm:
    """One layer in one direction; numbers of steps and of batch entries may be symbols of any sort."""

    steps: Any
    batch: Any
    inner: int
    """size of the input"""
    size: int
    """size of the state"""
    bytes: int
    """of an element"""

    def _row(self, n: int) -> int:
        """Return the bytes of a row: whole lines of 64, and no multiple of 256 elements, which would alias."""
        line = 64 // self.bytes
        row = -(-n // line) * line
        return (row + line if row % 256 == 0 else row) * self.bytes

    @property
    def _gates(self) -> int:
        return self._row(_GATES * self.size)

    def _states(self) -> tuple[Any, Any]:
        """Return the bytes of outputs, of this layer and of the one below, and of an LSTM's memory, one step before."""
        places = 2 * (self.steps + 1) * self.batch
        return places * self._row(max(self.inner, self.size)), places * self.size * 4

    def saved(self, pages: Callable[[Any], Any]) -> Any:
        """Return the bytes that the forward pass saves: gates, states, and room for gradients of states."""
        places = self.steps * self.batch
        outputs, memory = self._states()
        parts = (places * self._gates, places * self._row(self.size), outputs, memory, outputs, outputs, memory)
        return sum(map(pages, parts))

    def _scratch(self, places: Any, pages: Callable[[Any], Any]) -> Any:
        return pages(places * self._gates) + 2 * pages(self.batch * self._row(self.size)) + _TABLES

    def forward(self, pages: Callable[[Any], Any]) -> Any:
        """Return what the forward pass of training takes: both weights the other way round, and gates of all steps."""
        merged = not isinstance(self.batch, int) or self.batch < _MANY
        weights = (self.inner + self.size) * self._gates
        return weights + self._scratch(self.steps * self.batch if merged else self.batch, pages)

    def inference(self, pages: Callable[[Any], Any]) -> Any:
        """Return what inference takes: both weights in blocks, states of all steps, gates of one."""
        padded = -(-self.size // _BLOCK) * _BLOCK
        weights = (self.inner + self.size) * _GATES * padded * self.bytes
        places = self.steps if isinstance(self.batch, int) and self.batch == 1 else self.batch
        parts = (*self._states(), places * self._gates, self.batch * self._row(self.size))
        return weights + sum(map(pages, parts)) + _TABLES_OF_INFERENCE

    def backward(self, pages: Callable[[Any], Any]) -> Any:
        """Return what the backward pass takes: weights with padded rows, and their gradients, besides scratch."""
        rows = [self._row(n) for n in (self.inner, self.size)]
        widths = (self.inner * self.bytes, self.size * self.bytes)
        padded = sum(_GATES * self.size * row for row, n in zip(rows, widths, strict=True) if row != n)
        gradients = (self.inner + self.size) * self._gates
        return padded + gradients + self._scratch(self.steps * self.batch, pages)
