"""Processes agree on a fresh part of a store that dead processes have used, in every order of arrival."""

from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from time import sleep

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore

from calib.distributed import fresh_store


def met(store: HashStore, size: int, order: tuple[int, ...], timeout_s: float = 20.0) -> list[PrefixStore]:
    """Return the store part of each rank, with ranks that arrive in this order."""

    def arrive(rank: int) -> PrefixStore:
        sleep(0.03 * order.index(rank))
        return fresh_store(store, rank=rank, size=size, timeout_s=timeout_s)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(arrive, sorted(order)))


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_processes_agree_on_a_part_no_dead_process_wrote_to(order: tuple[int, ...]) -> None:
    store = HashStore()
    met(store, 3, (0, 1, 2))[0].set("address", "dead")
    parts = met(store, 3, order)
    assert not any(part.check(["address"]) for part in parts)
    parts[2].set("address", "alive")
    assert [part.get("address") for part in parts] == [b"alive"] * 3


def test_answer_to_a_dead_process_is_ignored() -> None:
    store = HashStore()
    met(store, 2, (0, 1))
    with pytest.raises(TimeoutError, match="rank 0 did not come"):
        fresh_store(store, rank=1, size=2, timeout_s=0.1)


def test_absent_process_is_named() -> None:
    store = HashStore()
    met(store, 3, (0, 1, 2))  # the store keeps the confirmation of an earlier meeting
    with pytest.raises(TimeoutError, match=r"rank [12] did not come"):
        fresh_store(store, rank=0, size=3, timeout_s=0.1)


def test_single_process_does_not_wait() -> None:
    fresh_store(HashStore(), rank=0, size=1, timeout_s=0.0).set("a", "b")
