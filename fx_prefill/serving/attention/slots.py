"""Where captured graphs write rows of a forward: slots at an address that does not change."""

from __future__ import annotations

import torch

from ...execution.capture import StreamOrder

MAX_VIEWS = 256
"""Views of slots that are kept, one for each count: each would cost a microsecond or two."""


class StaticSlots:
    """Cache slots ``[max_tokens]`` (int64) of the rows of a bucket, for one user at a time.

    Rows of padding, and all rows while nothing may be written, have the ``reserved`` slot.
    """

    def __init__(self, max_tokens: int, reserved: int, device: torch.device) -> None:
        with torch.inference_mode(False):  # written inside and outside of it
            self._slots = torch.full((max_tokens,), reserved, dtype=torch.int64, device=device)
        self._reserved = reserved
        self._views: dict[int, torch.Tensor] = {}
        self._num_written = 0
        # Slots must not change under a replay that another stream is still at.
        self.order = StreamOrder(device)

    def __len__(self) -> int:
        return self._slots.shape[0]

    def prepare(self, locations: torch.Tensor | None) -> None:
        """Slots of a forward's rows; None where none may be written."""
        self.order()
        num_rows = 0 if locations is None else locations.shape[0]
        num_before, self._num_written = self._num_written, max(num_rows, self._num_written)
        if locations is not None:
            self.of(num_rows).copy_(locations)
        if num_rows < num_before:
            self.of(num_before)[num_rows:].fill_(self._reserved)
        self._num_written = num_rows

    def of(self, num_rows: int) -> torch.Tensor:
        """The slots of the first rows."""
        view = self._views.get(num_rows)
        if view is None:
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            view = self._views[num_rows] = self._slots[:num_rows]
        return view
