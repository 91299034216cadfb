"""Outputs of timed calls equal plain ones; where they don't, it is said."""

from time import perf_counter_ns

import numpy as np
import pytest
import torch
from torch import nn

from ground.errors import BadInput
from perf.bench.station import Station
from perf.runners.module import ModuleRunner


class Forgetful(nn.Module):
    """Answers the first two calls as it should and every later one with zeros, as a stale graph would."""

    def __init__(self, honest: int) -> None:
        super().__init__()
        self.honest, self.calls = honest, 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        logits = images.flatten(1)[:, :5] + 1.0
        return logits if self.calls <= self.honest else torch.zeros_like(logits)


@pytest.mark.parametrize(("honest", "status"), [(10**6, "PASS"), (3, "FAIL")])
def test_timed_outputs_are_held_against_plain_ones(honest: int, status: str) -> None:
    images = np.random.default_rng(0).standard_normal((4, 3, 2, 2)).astype(np.float32)
    with ModuleRunner(Forgetful(honest)) as runner:
        station = Station("reduced", (runner,), None, None)
        bound = station.bind({"images": images})
        bound.laps(2, perf_counter_ns)
        (found,) = station.tests()
        assert station.tests() == []  # it was let go of
    assert (found.candidate, found.status) == ("reduced at batch 4", status)
    assert found.test == "timed-run"


def test_what_was_bound_and_not_timed_says_nothing() -> None:
    with ModuleRunner(Forgetful(9)) as runner:
        station = Station("dense", (runner,), None, None)
        station.bind({"images": np.zeros((4, 3, 2, 2), np.float32)})
        assert station.tests() == []


class Scalar(nn.Module):
    """One number for whatever it is given."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.amax()


def test_what_answers_no_input_is_no_model() -> None:
    with ModuleRunner(Scalar(), label="m") as runner:
        station = Station("reduced", (runner,), None, None)
        station.bind({"images": np.zeros((4, 3, 2, 2), np.float32)}).laps(2, perf_counter_ns)
        with pytest.raises(
            BadInput, match=r"reduced \(m\): gives logits \[\] to a batch of 4, expected a row for each"
        ):
            station.tests()
