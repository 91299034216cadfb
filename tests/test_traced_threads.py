"""Small operations on labels run in one thread of torch, whose thread count is restored afterwards."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from corp_deploy.traced.finding import sites
from corp_deploy.traced.narrowing import proof
from corp_deploy.traced.programs.threads import one_thread
from corp_deploy.traced.programs.tracing import trace


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """Give torch two threads while a test runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_one_thread_is_used_within_and_the_count_restored_after() -> None:
    with one_thread(), one_thread():
        assert torch.get_num_threads() == 1
    with pytest.raises(ValueError, match="inside"), one_thread():
        raise ValueError("inside")
    assert torch.get_num_threads() == 2


def test_tracing_and_narrowing_use_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = list[int]()

    def watched(work: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            threads.append(torch.get_num_threads())
            return work(*args, **kwargs)

        return run

    monkeypatch.setattr(sites, "walk_program", watched(vars(sites)["walk_program"]))
    monkeypatch.setattr(proof, "remove_elements", watched(vars(proof)["remove_elements"]))
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    found = sites.find_sites(trace(model, [torch.randn(2, 4)]))
    proof.narrow(found, {found.sites[0].key: [0, 2]})
    assert threads == [1, 1]
    assert torch.get_num_threads() == 2
