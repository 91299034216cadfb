"""Small operations on labels run in one thread of torch, which leaves the count as it was."""

from collections.abc import Iterator

import pytest
import torch

from corp_deploy.traced.programs.threads import one_thread


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """Torch has two threads while a test runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_one_thread_is_used_within_and_as_many_as_before_behind() -> None:
    with one_thread(), one_thread():
        assert torch.get_num_threads() == 1
    with pytest.raises(ValueError, match="inside"), one_thread():
        raise ValueError("inside")
    assert torch.get_num_threads() == 2
