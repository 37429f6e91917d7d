"""Memory of oneDNN's LSTM on a CPU: saved tensors and workspace.

Sizes follow `cpu/rnn/rnn_utils.hpp` (v3.12, with AVX2): rows are padded to cache lines, and each part is page-aligned.
Tests compare them with the allocator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["PAGE", "Lstm"]

PAGE = 4096
#: Bytes for weight and bias pointer tables and for padding to the first page, in training and in inference.
_TABLES, _INFERENCE_TABLES = 4664, 4872
_GATES = 4
# block width of packed weights, and the batch size from which input matmuls run step by step
_BLOCK, _STEPWISE_BATCH = 16, 128


@dataclass(frozen=True)
class Lstm:
    """One layer in one direction; steps and batch may be symbolic."""

    steps: Any
    batch: Any
    inner: int
    """input size"""
    size: int
    """hidden size"""
    bytes: int
    """bytes per element"""

    def _row(self, n: int) -> int:
        """Return a row's bytes: whole 64-byte lines, avoiding multiples of 256 elements, which alias in cache."""
        line = 64 // self.bytes
        row = -(-n // line) * line
        return (row + line if row % 256 == 0 else row) * self.bytes

    @property
    def _gates(self) -> int:
        return self._row(_GATES * self.size)

    def _states(self) -> tuple[Any, Any]:
        """Return the bytes for all hidden states, including the layer below, and for all cell states."""
        count = 2 * (self.steps + 1) * self.batch
        return count * self._row(max(self.inner, self.size)), count * self.size * 4

    def saved(self, pages: Callable[[Any], Any]) -> Any:
        """Return the bytes saved by the forward pass: gates, states, and buffers for state gradients."""
        rows = self.steps * self.batch
        outputs, memory = self._states()
        parts = (rows * self._gates, rows * self._row(self.size), outputs, memory, outputs, outputs, memory)
        return sum(map(pages, parts))

    def _scratch(self, rows: Any, pages: Callable[[Any], Any]) -> Any:
        return pages(rows * self._gates) + 2 * pages(self.batch * self._row(self.size)) + _TABLES

    def forward(self, pages: Callable[[Any], Any]) -> Any:
        """Return the training forward pass's workspace: transposed weights, and the gates for all steps."""
        merged = not isinstance(self.batch, int) or self.batch < _STEPWISE_BATCH
        weights = (self.inner + self.size) * self._gates
        return weights + self._scratch(self.steps * self.batch if merged else self.batch, pages)

    def inference(self, pages: Callable[[Any], Any]) -> Any:
        """Return the inference workspace: packed weights, states for all steps, gates for one step."""
        padded = -(-self.size // _BLOCK) * _BLOCK
        weights = (self.inner + self.size) * _GATES * padded * self.bytes
        rows = self.steps if isinstance(self.batch, int) and self.batch == 1 else self.batch
        parts = (*self._states(), rows * self._gates, self.batch * self._row(self.size))
        return weights + sum(map(pages, parts)) + _INFERENCE_TABLES

    def backward(self, pages: Callable[[Any], Any]) -> Any:
        """Return the workspace of the backward pass: padded weights, their gradients, and scratch buffers."""
        rows = [self._row(n) for n in (self.inner, self.size)]
        widths = (self.inner * self.bytes, self.size * self.bytes)
        padded = sum(_GATES * self.size * row for row, n in zip(rows, widths, strict=True) if row != n)
        gradients = (self.inner + self.size) * self._gates
        return padded + gradients + self._scratch(self.steps * self.batch, pages)
