"""A KV cache in pages, shared by all requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch

from ..errors import ServingError

DUMMY_PAGE = 0
"""Page that no request gets: rows of padding, if a captured kernel has to write them somewhere, are
written to its first slot, and nothing reads it."""


class PagedKVPool:
    """Keys and values of all layers, in pages of ``page_size`` token slots.

    Layer tensors are ``[num_pages, page_size, num_kv_heads, head_dim]`` (``"NHD"``) or
    ``[num_pages, num_kv_heads, page_size, head_dim]`` (``"HND"``). A slot is ``page * page_size +
    offset``. Page 0 is reserved. Pages are counted: one that several requests share is free when
    the last gives it back.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        v_head_dim: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        layout: Literal["NHD", "HND"] = "NHD",
    ) -> None:
        for name, value in (("num_layers", num_layers), ("page_size", page_size)):
            if value < 1:
                raise ServingError(f"{name} is {value}; required: at least 1")
        if num_pages < 2:
            raise ServingError(
                f"num_pages is {num_pages}; required: at least 2, as page 0 is reserved"
            )
        if layout not in ("NHD", "HND"):
            raise ServingError(f"layout is {layout!r}; accepted: 'NHD' or 'HND'")
        self.num_layers, self.num_pages, self.page_size = num_layers, num_pages, page_size
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        self.v_head_dim = head_dim if v_head_dim is None else v_head_dim
        self.dtype, self.device, self.layout = dtype, torch.device(device), layout
        self.keys = [self._layer(head_dim) for _ in range(num_layers)]
        self.values = [self._layer(self.v_head_dim) for _ in range(num_layers)]
        self._free = list(range(num_pages - 1, DUMMY_PAGE, -1))
        self._users = [0] * num_pages

    def _layer(self, width: int) -> torch.Tensor:
        inner = (self.page_size, self.num_kv_heads)
        if self.layout == "HND":
            inner = inner[::-1]
        shape = (self.num_pages, *inner, width)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    # --- pages ----------------------------------------------------------------------------------

    @property
    def dummy_slot(self) -> int:
        """Slot that may be written by padding and is never read."""
        return DUMMY_PAGE * self.page_size

    @property
    def num_free(self) -> int:
        """Pages that nobody uses."""
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """How many pages hold this many tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self, num_pages: int) -> list[int]:
        """Pages for one user. Raises ServingError when there are not enough."""
        if num_pages > len(self._free):
            raise ServingError(
                f"{num_pages} pages of {self.page_size} tokens are needed and {len(self._free)} of "
                f"{self.num_pages - 1} are free; finish or preempt a request first"
            )
        pages = [self._free.pop() for _ in range(num_pages)]
        self.share(pages)
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more user for each page."""
        for page in pages:
            self._users[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One user less for each page; those without any are free again."""
        for page in pages:
            if self._users[page] < 1:
                raise ServingError(f"page {page} is given back and nobody had it")
            self._users[page] -= 1
            if self._users[page] == 0:
                self._free.append(page)

    def slots(self, pages: Sequence[int], start: int, stop: int) -> list[int]:
        """Slots of the tokens ``start`` to ``stop`` of a request that has ``pages``."""
        size = self.page_size
        return [pages[i // size] * size + i % size for i in range(start, stop)]

    def page_table(self, requests: Sequence[Sequence[int]]) -> torch.Tensor:
        """``[num_requests, max_pages]`` (int32), filled up with the reserved page."""
        width = max((len(pages) for pages in requests), default=0)
        rows = [[*pages, *[DUMMY_PAGE] * (width - len(pages))] for pages in requests]
        return torch.tensor(rows, dtype=torch.int32, device=self.device).view(len(rows), width)

    # --- rows -----------------------------------------------------------------------------------

    def write(self, layer: int, locations: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write rows ``[num_tokens, num_kv_heads, width]`` to slots ``[num_tokens]`` (int64)."""
        for held, rows in ((self.keys[layer], k), (self.values[layer], v)):
            rows = rows.to(held.dtype)
            if self.layout == "NHD":
                held.view(-1, *held.shape[2:]).index_copy_(0, locations, rows)
            else:
                page, offset = locations // self.page_size, locations % self.page_size
                held[page, :, offset] = rows

    def read(self, layer: int, locations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[num, num_kv_heads, width]`` of slots ``[num]`` (int64)."""
        found = []
        for held in (self.keys[layer], self.values[layer]):
            if self.layout == "NHD":
                found.append(held.view(-1, *held.shape[2:]).index_select(0, locations))
            else:
                page, offset = locations // self.page_size, locations % self.page_size
                found.append(held[page, :, offset])
        return found[0], found[1]
