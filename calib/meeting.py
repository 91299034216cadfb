"""Processes that meet through a store that outlives them: what an earlier, dead set of them wrote there is passed over.

torchrun keeps its store when it starts its processes again, with the addresses of the dead in it; a process that reads
one of them before its neighbour has written the new one connects to nobody.
"""

import time
import uuid

from torch._C._distributed_c10d import PrefixStore, Store

POLL_S = 0.02


def fresh(store: Store, *, rank: int, size: int, timeout_s: float) -> PrefixStore:
    """A part of the store that these processes alone use, all the same one. Raises TimeoutError when one stays away.

    Rank 0 names the part. It answers every process until each has confirmed that name; a process takes only an answer
    that repeats its own fresh word, which none but a living rank 0 can have read.
    """
    own, until = uuid.uuid4().hex, time.monotonic() + timeout_s
    name = _named(store, own, size, until) if rank == 0 else _heard(store, own, rank, until)
    return PrefixStore(f"met/{name}", store)


def _named(store: Store, own: str, size: int, until: float) -> str:
    away = set(range(1, size))
    while away:
        for rank in sorted(away):
            said = _read(store, f"here/{rank}")
            if said:
                store.set(f"answer/{rank}", f"{said} {own}")
            if _read(store, f"confirmed/{rank}") == own:
                away.discard(rank)
        _wait(until, f"rank {min(away, default=0)}")
    return own


def _heard(store: Store, own: str, rank: int, until: float) -> str:
    store.set(f"here/{rank}", own)
    while True:
        word, _, name = _read(store, f"answer/{rank}").partition(" ")
        if word == own:
            store.set(f"confirmed/{rank}", name)
            return name
        _wait(until, "rank 0")


def _read(store: Store, key: str) -> str:
    return str(store.get(key), "ascii") if store.check([key]) else ""


def _wait(until: float, whom: str) -> None:
    if time.monotonic() > until:
        raise TimeoutError(f"{whom} did not come")
    time.sleep(POLL_S)
