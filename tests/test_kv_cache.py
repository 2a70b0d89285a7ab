"""The paged KV pool: pages are counted, rows are found where they were written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fx_prefill.errors import ServingError
from fx_prefill.serving.kv_cache import DUMMY_PAGE, PagedKVPool


def make_pool(**changes: Any) -> PagedKVPool:
    given: dict[str, Any] = dict(
        num_layers=2, num_pages=6, page_size=4, num_kv_heads=2, head_dim=8, dtype=torch.float32
    )
    return PagedKVPool(**{**given, **changes})


def test_the_reserved_page_is_never_given() -> None:
    pool = make_pool()
    assert pool.num_free == 5
    pages = pool.allocate(5)
    assert sorted(pages) == [1, 2, 3, 4, 5]
    assert pool.num_free == 0
    assert pool.dummy_slot == DUMMY_PAGE * 4


def test_running_out_says_what_is_free_and_takes_nothing() -> None:
    pool = make_pool()
    pool.allocate(3)
    with pytest.raises(ServingError, match="3 pages of 4 tokens are needed and 2 of 5 are free"):
        pool.allocate(3)
    assert pool.num_free == 2


def test_a_shared_page_is_free_when_the_last_user_gives_it_back() -> None:
    pool = make_pool()
    pages = pool.allocate(2)
    pool.share(pages[:1])
    pool.release(pages)
    assert pool.num_free == 4
    assert pages[0] not in pool.allocate(4)
    pool.release(pages[:1])
    assert pool.allocate(1) == pages[:1]


@pytest.mark.parametrize("page", [DUMMY_PAGE, 3, -1, 6])
def test_a_page_that_nobody_has_is_neither_shared_nor_given_back(page: int) -> None:
    pool = make_pool()
    with pytest.raises(ServingError, match=f"page {page} is given back and nobody has it"):
        pool.release([page])
    with pytest.raises(ServingError, match=f"page {page} is shared and nobody has it"):
        pool.share([page])
    assert sorted(pool.allocate(5)) == [1, 2, 3, 4, 5]


def test_a_page_is_given_back_once() -> None:
    pool = make_pool()
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(ServingError, match="nobody has it"):
        pool.release(pages)
    assert pool.num_free == 5


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_layers": 0}, "num_layers is 0; required: at least 1"),
        ({"page_size": 0}, "page_size is 0; required: at least 1"),
        ({"num_kv_heads": 0}, "num_kv_heads is 0"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"num_pages": 1}, "num_pages is 1; required: at least 2"),
        ({"layout": "DHN"}, "'DHN'; accepted: 'NHD' or 'HND'"),
    ],
)
def test_sizes_are_checked(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ServingError, match=said):
        make_pool(**changes)


def test_pages_and_slots_of_tokens() -> None:
    pool = make_pool()
    assert [pool.pages_for(n) for n in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]
    assert pool.slots([5, 2], 3, 7) == [23, 8, 9, 10]
    assert pool.slots([5, 2], 4, 4) == []
    with pytest.raises(ServingError, match="2 pages of 4 tokens hold 8; allocate 1 more"):
        pool.slots([5, 2], 3, 9)


@pytest.mark.parametrize("page", [DUMMY_PAGE, -1, 6])
def test_pages_that_are_none_of_the_pool_have_no_slots(page: int) -> None:
    pool = make_pool()
    said = f"page {page} holds no request; required: pages that allocate.. gave, of 1 to 5"
    with pytest.raises(ServingError, match=said):
        pool.slots([5, page], 3, 5)
    with pytest.raises(ServingError, match=said):
        pool.page_table([[5, 2], [], [page]])
    # Pages that are not asked of may be the filling of a table.
    assert pool.slots([5, page], 1, 4) == [21, 22, 23]
    assert pool.slots([page, 5], 4, 5) == [20]
    assert pool.slots([page], 4, 4) == []


def test_tokens_before_the_first_have_no_slots() -> None:
    with pytest.raises(ServingError, match="tokens -1 to 2 are asked for; required: from 0 on"):
        make_pool().slots([5, 2], -1, 2)


def test_the_page_table_is_filled_up_with_the_reserved_page() -> None:
    pool = make_pool()
    table = pool.page_table([[5, 2], [], [3]])
    assert table.dtype == torch.int32
    assert table.tolist() == [[5, 2], [0, 0], [3, 0]]
    assert pool.page_table([]).shape == (0, 0)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_rows_are_read_where_they_were_written(layout: str, page_size: int) -> None:
    pool = make_pool(layout=layout, page_size=page_size, v_head_dim=3)
    for held in (*pool.keys, *pool.values):
        held.fill_(float("nan"))
    slots = torch.tensor(pool.slots([5, 2, 4], 0, 3 * page_size)).flip(0)
    k, v = torch.randn(len(slots), 2, 8), torch.randn(len(slots), 2, 3)
    pool.write(1, slots, k, v)
    found_k, found_v = pool.read(1, slots[1:])
    assert torch.equal(found_k, k[1:])
    assert torch.equal(found_v, v[1:])
    assert pool.keys[0].isnan().all()
    assert pool.values[0].isnan().all()
    assert pool.keys[1].isfinite().sum() == k.numel()
    page, offset = divmod(int(slots[0]), page_size)
    held = pool.keys[1][page, offset] if layout == "NHD" else pool.keys[1][page, :, offset]
    assert torch.equal(held, k[0])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("v_head_dim", [8, 3])
def test_gathered_rows_are_those_that_are_read(layout: str, v_head_dim: int) -> None:
    pool = make_pool(layout=layout, v_head_dim=v_head_dim)
    for held in (*pool.keys, *pool.values):
        held.normal_()
    slots = torch.tensor(pool.slots([5, 2, 4], 0, 11))
    gathered = pool.gathered_slots(slots)
    for layer in range(pool.num_layers):
        found, read = gathered(layer), pool.read(layer, slots)
        assert all(torch.equal(x, y) for x, y in zip(found, read, strict=True))
        assert all(x.is_contiguous() for x in found)


@pytest.mark.parametrize("page_size", [1, 4])
def test_gathered_pages_are_their_slots(page_size: int) -> None:
    pool = make_pool(page_size=page_size)
    for held in (*pool.keys, *pool.values):
        held.normal_()
    assert pool.gathers_pages and not make_pool(layout="HND").gathers_pages
    assert not make_pool(v_head_dim=3).gathers_pages
    gathered = pool.gathered_pages(torch.tensor([5, 2, 4], dtype=torch.int32))
    slots = torch.tensor(pool.slots([5, 2, 4], 0, 3 * page_size))
    for layer in range(pool.num_layers):
        found, read = gathered(layer), pool.read(layer, slots)
        assert all(torch.equal(x, y) for x, y in zip(found, read, strict=True))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_rows_are_kept_in_the_dtype_of_the_pool(layout: str) -> None:
    pool = make_pool(layout=layout, dtype=torch.bfloat16)
    k = torch.randn(2, 2, 8)
    pool.write(0, torch.tensor([4, 5]), k, k)
    assert torch.equal(pool.read(0, torch.tensor([4, 5]))[1], k.bfloat16())


def test_layer_shapes_are_those_of_the_layout() -> None:
    assert make_pool(v_head_dim=3).values[0].shape == (6, 4, 2, 3)
    assert make_pool(v_head_dim=3, layout="HND").values[0].shape == (6, 2, 4, 3)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_nothing_waits_for_the_device(layout: str) -> None:
    pool = make_pool(layout=layout, device="cuda")
    slots = torch.tensor([4, 9], device="cuda")
    k = torch.randn(2, 2, 8, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        table = pool.page_table([[5, 2], [3]])
        pool.write(0, slots, k, k)
        found, _ = pool.read(0, slots)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert table.tolist() == [[5, 2], [3, 0]]
    assert torch.equal(found, k)
