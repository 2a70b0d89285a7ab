"""A model of PyTorch's caching allocator: how much device memory a sequence of requests takes.

A pool grows by whole pieces of device memory and is served from the smallest free block that fits,
so its size is not the sum of what is alive at once. Sizes and rules are those of the CUDA caching
allocator with its default settings.
"""

from __future__ import annotations

from dataclasses import dataclass, field

ROUND = 512
SMALL = 1 << 20
"""Largest request served from small pieces."""
SMALL_PIECE = 2 << 20
LARGE_PIECE = 20 << 20
MIN_LARGE = 10 << 20
"""Requests from here on get a piece of their own size."""
ROUND_LARGE = 2 << 20


@dataclass(eq=False)
class Block:
    """A stretch of a piece: free, or handed out."""

    size: int
    free: bool = True
    before: Block | None = field(default=None, repr=False)
    after: Block | None = field(default=None, repr=False)


class PoolModel:
    """Serves and takes back blocks; ``num_bytes`` is the device memory taken so far."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._free: dict[bool, list[Block]] = {True: [], False: []}
        self._small: dict[Block, bool] = {}

    def allocate(self, num_bytes: int) -> Block:
        """A block of at least ``num_bytes``."""
        size = max(ROUND, -(-num_bytes // ROUND) * ROUND)
        small = size <= SMALL
        fitting = [block for block in self._free[small] if block.size >= size]
        block = min(fitting, key=lambda b: b.size) if fitting else self._new_piece(size, small)
        self._free[small].remove(block)
        block.free = False
        rest = block.size - size
        if rest >= ROUND if small else rest > SMALL:
            self._split(block, size, small)
        return block

    def release(self, block: Block) -> None:
        """Take a block back, joined with free neighbours."""
        small = self._small[block]
        block.free = True
        for side in ("before", "after"):
            other = getattr(block, side)
            if other is not None and other.free:
                self._free[small].remove(other)
                self._absorb(block, other, side)
        self._free[small].append(block)

    def _new_piece(self, size: int, small: bool) -> Block:
        piece = SMALL_PIECE if small else LARGE_PIECE
        if not small and size >= MIN_LARGE:
            piece = -(-size // ROUND_LARGE) * ROUND_LARGE
        self.num_bytes += piece
        block = Block(piece)
        self._small[block] = small
        self._free[small].append(block)
        return block

    def _split(self, block: Block, size: int, small: bool) -> None:
        rest = Block(block.size - size, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        self._small[rest] = small
        self._free[small].append(rest)

    def _absorb(self, block: Block, other: Block, side: str) -> None:
        block.size += other.size
        beyond = getattr(other, side)
        setattr(block, side, beyond)
        if beyond is not None:
            setattr(beyond, "after" if side == "before" else "before", block)
        del self._small[other]
