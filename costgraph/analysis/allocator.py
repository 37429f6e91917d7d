"""Simulate torch's CUDA caching allocator: blocks, segments, and peak allocated bytes.

Source: torch 2.13, c10/cuda/CUDACachingAllocator.cpp (round_size, get_pool, get_allocation_size, should_split,
get_free_block, try_merge_blocks) with default settings.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

__all__ = [
    "CachingAllocator",
]

_BLOCK = 512
#: Requests up to the first size are small and share segments of the second size.
_SMALL, _SMALL_SEGMENT = 1 << 20, 2 << 20
#: Requests below the first size share segments of the second; larger ones are rounded up to multiples of the third.
_LARGE, _LARGE_SEGMENT, _ROUNDED = 10 << 20, 20 << 20, 2 << 20


class _Block(NamedTuple):
    """A block; blocks sort in best-fit order, the smallest first, then by address."""

    size: int
    segment: int
    at: int

    @property
    def end(self) -> int:
        return self.at + self.size


class _Pool:
    """Free blocks for small or for large requests."""

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self.free: list[_Block] = []
        self.starts: dict[tuple[int, int], _Block] = {}
        self.ends: dict[tuple[int, int], _Block] = {}

    def add(self, block: _Block) -> None:
        """Add a free block, merging it with free neighbours."""
        for neighbour in (self.ends.get((block.segment, block.at)), self.starts.get((block.segment, block.end))):
            if neighbour is not None:
                self.remove(neighbour)
                block = _Block(block.size + neighbour.size, block.segment, min(block.at, neighbour.at))
        insort(self.free, block)
        self.starts[block.segment, block.at] = self.ends[block.segment, block.end] = block

    def remove(self, block: _Block) -> None:
        del self.free[bisect_left(self.free, block)], self.starts[block.segment, block.at]
        del self.ends[block.segment, block.end]

    def segment(self, size: int) -> int:
        """Return the segment size for a request that no free block fits."""
        if self.small:
            return _SMALL_SEGMENT
        return _LARGE_SEGMENT if size < _LARGE else -(-size // _ROUNDED) * _ROUNDED

    def splits(self, remainder: int) -> bool:
        """Whether the unused part of a block is split off."""
        return remainder >= _BLOCK if self.small else remainder > _SMALL


class CachingAllocator:
    """Allocate and free blocks; unused bytes of a block that is not split count as allocated."""

    def __init__(self) -> None:
        self.pools = _Pool(small=False), _Pool(small=True)
        self.segments: list[_Pool] = []
        """pool of each segment, in allocation order"""
        self.taken = 0
        """allocated bytes"""
        self.most = 0
        """peak allocated bytes"""

    def take(self, size: int) -> _Block:
        """Allocate a block of at least `size` bytes."""
        size = max(-(-size // _BLOCK) * _BLOCK, _BLOCK)
        pool = self.pools[size <= _SMALL]
        index = bisect_left(pool.free, _Block(size, -1, -1))
        if index < len(pool.free):
            block = pool.free[index]
            pool.remove(block)
        else:
            block = _Block(pool.segment(size), len(self.segments), 0)
            self.segments.append(pool)
        if pool.splits(block.size - size):
            pool.add(_Block(block.size - size, block.segment, block.at + size))
            block = _Block(size, block.segment, block.at)
        self.taken += block.size
        self.most = max(self.most, self.taken)
        return block

    def give(self, block: _Block) -> None:
        """Free a block."""
        self.taken -= block.size
        self.segments[block.segment].add(block)
