"""Calibration by several processes of torchrun: each takes its share of the images, and all get all sums.

torchrun keeps its store across restarts, with addresses of dead processes in it; `fresh_store` avoids these.
"""

import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from ground.errors import BadInput, RankLost

POLL_S = 0.02


def fresh_store(store: Store, *, rank: int, size: int, timeout_s: float) -> PrefixStore:
    """Return the store under a fresh prefix, which only living processes know. Raises TimeoutError if one doesn't come.

    Rank 0 chooses the prefix and answers until every process has confirmed. An answer repeats the process's own fresh
    token, which proves that it comes from a living rank 0.
    """
    own, until = uuid.uuid4().hex, time.monotonic() + timeout_s
    name = _publish_name(store, own, size, until) if rank == 0 else _receive_name(store, own, rank, until)
    return PrefixStore(f"met/{name}", store)


def _publish_name(store: Store, name: str, size: int, until: float) -> str:
    pending = set(range(1, size))
    while pending:
        for rank in sorted(pending):
            token = _read(store, f"here/{rank}")
            if token:
                store.set(f"answer/{rank}", f"{token} {name}")
            if _read(store, f"confirmed/{rank}") == name:
                pending.discard(rank)
        _wait(until, f"rank {min(pending, default=0)}")
    return name


def _receive_name(store: Store, token: str, rank: int, until: float) -> str:
    store.set(f"here/{rank}", token)
    while True:
        token_back, _, name = _read(store, f"answer/{rank}").partition(" ")
        if token_back == token:
            store.set(f"confirmed/{rank}", name)
            return name
        _wait(until, "rank 0")


def _read(store: Store, key: str) -> str:
    return str(store.get(key), "ascii") if store.check([key]) else ""


def _wait(until: float, peer: str) -> None:
    if time.monotonic() > until:
        raise TimeoutError(f"{peer} did not come")
    time.sleep(POLL_S)


T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The rank of this process among all; a single process is rank 0 of 1 and never communicates."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise BadInput(f"rank: got {self.rank} of {self.size}, expected 0 to {self.size - 1}")

    def share(self, count: int) -> range:
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def all_gather(self, value: T) -> list[T]:
        if self.size == 1:
            return [value]
        values: list[T | None] = [None] * self.size
        self._collective(lambda: dist.all_gather_object(values, value))
        return [value for value in values if value is not None]

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        if self.size > 1:
            self._collective(lambda: [dist.all_reduce(tensor) for tensor in tensors])

    def raise_first_problem(self, problem: str) -> None:
        problems = self.all_gather(problem)
        for rank, text in enumerate(problems):
            if text:
                raise BadInput(text if self.size == 1 else f"rank {rank} of {self.size}: {text}")

    def _collective(self, step: Callable[[], object]) -> None:
        try:
            step()
        except RuntimeError as error:
            raise RankLost(
                f"rank {self.rank} of {self.size}: another process of this run has ended or can't be reached "
                f"({str(error).splitlines()[0]}); nothing was written; look at its own message, then start all again"
            ) from error


def under_torchrun() -> bool:
    return dist.is_available() and dist.is_torchelastic_launched()


@contextmanager
def join_ranks(device: torch.device | str, *, timeout_s: float = 1800.0) -> Iterator[Ranks]:
    """Join the other processes of torchrun. Raises RankLost when a process doesn't come within `timeout_s`."""
    on_gpu = torch.device(device).type == "cuda"
    backend = "nccl" if on_gpu else "gloo"
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))  # torchrun's number of the process on its host
    limit = timedelta(seconds=timeout_s)
    try:
        store, rank, size = next(rendezvous("env://", timeout=limit))
        own = fresh_store(store, rank=rank, size=size, timeout_s=timeout_s)
        dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=limit)
    except (RuntimeError, ValueError, TimeoutError) as error:
        raise RankLost(f"the processes of this run did not meet ({error}); start them with torchrun") from error
    try:
        yield Ranks(rank=dist.get_rank(), size=dist.get_world_size())
    finally:
        dist.destroy_process_group()
