"""A KV cache in pages, shared by all requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, cast

import torch

from ..errors import ServingError

DUMMY_PAGE = 0
"""Page that no request gets: rows of padding, if a captured kernel has to write them somewhere, are
written to its first slot, and nothing reads it."""


_VIEWS = frozenset(["keys", "values", "_rows", "_both", "_by_page", "_starts"])


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
        sizes = {
            "num_layers": num_layers,
            "page_size": page_size,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
        }
        for name, value in sizes.items():
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
        with torch.inference_mode(False), torch.no_grad():  # written inside and outside of it
            self._memory = [self._layer() for _ in range(num_layers)]
            self._make_views()
        self._free = list(range(num_pages - 1, DUMMY_PAGE, -1))
        self._users = [0] * num_pages

    def _layer(self) -> tuple[torch.Tensor, ...]:
        """Keys, then values, in one memory where they are of one width, else in one each."""
        if self.head_dim == self.v_head_dim:
            return (self._pages(2 * self.num_pages, self.head_dim),)
        return tuple(self._pages(self.num_pages, w) for w in (self.head_dim, self.v_head_dim))

    def _make_views(self) -> None:
        """All views of the memory, once: each costs as much host time as the launch of a write."""
        num_pages = self.num_pages
        one = [memory[0] if len(memory) == 1 else None for memory in self._memory]
        self.keys = [memory[0][:num_pages] for memory in self._memory]
        pairs = zip(one, self._memory, strict=True)
        self.values = [held[-1] if both is None else both[num_pages:] for both, held in pairs]
        layers = zip(self.keys, self.values, strict=True)
        self._rows = [(self._by_row(keys), self._by_row(values)) for keys, values in layers]
        self._both = [None if both is None else self._by_row(both) for both in one]
        self._by_page = [both for both in one if both is not None]
        starts = [[0], [num_pages]]  # keys come first in the memory of both
        self._starts = torch.tensor(starts, dtype=torch.int32, device=self.device)

    def __getstate__(self) -> dict[str, Any]:
        """Without the views: pickled as tensors, they would be memories of their own."""
        return {name: value for name, value in vars(self).items() if name not in _VIEWS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        with torch.inference_mode(False), torch.no_grad():
            self._make_views()

    def _pages(self, num_pages: int, width: int) -> torch.Tensor:
        inner = (self.page_size, self.num_kv_heads)
        if self.layout == "HND":
            inner = inner[::-1]
        return torch.zeros((num_pages, *inner, width), dtype=self.dtype, device=self.device)

    def _by_row(self, held: torch.Tensor) -> torch.Tensor:
        """``[num_slots, heads, width]``; ``[num_pages, page_size, heads, width]`` for HND, whose
        slots are not evenly spaced."""
        return held.flatten(0, 1) if self.layout == "NHD" else held.transpose(1, 2)

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
        for page in pages:
            self._users[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more user for each page. Raises ServingError for one that nobody has."""
        for page in pages:
            self._check_used(page, "shared")
            self._users[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One user less for each page; those without any are free again.

        Raises ServingError for one that nobody has.
        """
        for page in pages:
            self._check_used(page, "given back")
            self._users[page] -= 1
            if self._users[page] == 0:
                self._free.append(page)

    def _check_used(self, page: int, what: str) -> None:
        if not DUMMY_PAGE < page < self.num_pages or self._users[page] < 1:
            raise ServingError(
                f"page {page} is {what} and nobody has it; required: a page that allocate() gave "
                f"and release() has not taken back, of 1 to {self.num_pages - 1}"
            )

    def _check_pages(self, pages: Sequence[int]) -> None:
        """Beyond the pool a kernel would read and write the memory of others."""
        if len(pages) and not DUMMY_PAGE < min(pages) <= max(pages) < self.num_pages:
            wrong = next(page for page in pages if not DUMMY_PAGE < page < self.num_pages)
            raise ServingError(
                f"page {wrong} holds no request; required: pages that allocate() gave, of 1 to "
                f"{self.num_pages - 1}"
            )

    def slots(self, pages: Sequence[int], start: int, stop: int) -> list[int]:
        """Slots of the tokens ``start`` to ``stop`` of a request that has ``pages``.

        Raises ServingError where the pages do not reach that far, or are none of this pool.
        """
        size = self.page_size
        if start < 0:
            raise ServingError(f"tokens {start} to {stop} are asked for; required: from 0 on")
        if stop > len(pages) * size:
            raise ServingError(
                f"tokens {start} to {stop} are asked for and {len(pages)} pages of {size} tokens "
                f"hold {len(pages) * size}; allocate {self.pages_for(stop) - len(pages)} more"
            )
        self._check_pages(pages[start // size : self.pages_for(stop)])
        return [pages[i // size] * size + i % size for i in range(start, stop)]

    def page_table(self, requests: Sequence[Sequence[int]]) -> torch.Tensor:
        """``[num_requests, max_pages]`` (int32), filled up with the reserved page.

        Raises ServingError for a page that is none of this pool.
        """
        width = max((len(pages) for pages in requests), default=0)
        rows = [[*pages, *[DUMMY_PAGE] * (width - len(pages))] for pages in requests]
        # From pinned memory, so that the host does not wait for the copy.
        pinned = self.device.type == "cuda"
        table = torch.tensor(rows, dtype=torch.int32, device="cpu", pin_memory=pinned)
        good = int(((table > DUMMY_PAGE) & (table < self.num_pages)).sum())
        if good != sum(map(len, requests)):  # of the table, as that is quicker than each list
            for pages in requests:
                self._check_pages(pages)
        return table.view(len(rows), width).to(self.device, non_blocking=True)

    # --- rows -----------------------------------------------------------------------------------

    def write(self, layer: int, locations: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write rows ``[num_tokens, num_kv_heads, width]`` to slots ``[num_tokens]`` (int64)."""
        index = self._index(locations)
        for held, rows in zip(self._rows[layer], (k, v), strict=True):
            rows = rows.to(held.dtype)
            if isinstance(index, tuple):
                held[index] = rows
            else:
                held.index_copy_(0, index, rows)

    def read(self, layer: int, locations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[num, num_kv_heads, width]`` of slots ``[num]`` (int64)."""
        keys, values = self._rows[layer]
        index = self._index(locations)
        if isinstance(index, tuple):
            return keys[index], values[index]
        return keys.index_select(0, index), values.index_select(0, index)

    @property
    def _reads_at_once(self) -> bool:
        """Whether one launch reads what ``read`` does, which a subclass may change."""
        return self._both[0] is not None and type(self).read is PagedKVPool.read

    @property
    def gathers_pages(self) -> bool:
        """Whether :meth:`gathered_pages` may be called: where the rows of a page are in order."""
        return self.layout == "NHD" and self._reads_at_once

    def gathered_slots(self, slots: torch.Tensor) -> Gathered:
        """Keys and values of slots ``[num]``, to be read for one layer after the other."""
        if not self._reads_at_once:
            return Gathered(lambda layer: self.read(layer, slots))
        index = torch.cat([slots, slots + self.num_pages * self.page_size])
        where, both = self._index(index), cast("list[torch.Tensor]", self._both)
        if isinstance(where, tuple):
            return Gathered(lambda layer: both[layer][where].chunk(2))
        return Gathered.of_rows(both, where)

    def gathered_pages(self, pages: torch.Tensor) -> Gathered:
        """The same for all slots of pages ``[num]``, one page after the other."""
        assert self.gathers_pages, f"pages of {self.layout} are not in the order of their rows"
        return Gathered.of_rows(self._by_page, (self._starts + pages).view(-1))

    def _index(self, locations: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if self.layout == "NHD":
            return locations
        return locations // self.page_size, locations % self.page_size


class Gathered:
    """Keys and values ``[num, num_kv_heads, width]`` each, read for one layer after the other."""

    def __init__(self, read: Callable[[int], Sequence[torch.Tensor]]) -> None:
        self._read = read

    def __call__(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of a layer, good until another one is read."""
        keys, values = self._read(layer)
        return keys, values

    @staticmethod
    def of_rows(layers: list[torch.Tensor], index: torch.Tensor) -> Gathered:
        """Rows, or pages of them, of each layer's memory in one launch; the first half are keys.

        All layers are read into the same memory.
        """
        memory: list[torch.Tensor] = []
        halves: list[torch.Tensor] = []

        def read(layer: int) -> list[torch.Tensor]:
            if memory:
                torch.index_select(layers[layer], 0, index, out=memory[0])
            else:
                memory.append(layers[layer].index_select(0, index))
                halves.extend(memory[0].view(-1, *memory[0].shape[-2:]).chunk(2))
            return halves

        return Gathered(read)
