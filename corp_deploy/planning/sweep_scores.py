"""The inputs that a sweep judges by, with what the dense model says to them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from calib.inputs import Inputs, InputSet, as_tuple, chunks, concatenated, run_model
from corp_deploy.families.counting import macs, parameters
from corp_deploy.families.family import output_ports
from ground.ports import OutputPort
from perf.parity.measures import measures

from .sweep_points import DensePoint, OutputScore

Answer = NDArray[np.float32]


def outputs(model: nn.Module, inputs: Inputs, batch_size: int) -> tuple[Answer, ...]:
    """Each output [N, ...] of all inputs."""
    with torch.inference_mode():
        rows = [[output.numpy() for output in as_tuple(run_model(model, part))] for part in chunks(inputs, batch_size)]
    return tuple(np.concatenate(parts) for parts in zip(*rows, strict=True))


def top_k(logits_NC: Answer, labels_N: NDArray[np.int64], k: int) -> float:
    """Share of the inputs whose label is among the k largest logits; all of them where there are no more classes."""
    best_NK = np.argsort(-logits_NC, axis=1, kind="stable")[:, :k]
    return float((best_NK == labels_N[:, None]).any(1).mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracies:
    """Shares of the labelled inputs, Top-1 and Top-5."""

    top1: float
    top5: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Inputs with each of the dense model's outputs [N, ...] for them, and labels where there are any; `digest` tells
    these inputs from others, in this order.
    """

    inputs: Inputs
    ports: tuple[OutputPort, ...]
    dense: tuple[Answer, ...]
    labels_N: NDArray[np.int64] | None
    batch_size: int
    digest: str = ""

    def scores(self, answers: Sequence[Answer]) -> tuple[OutputScore, ...]:
        """How far each of a model's outputs is from the dense one."""
        errors = [
            measures(dense, answer, role=port.role)
            for port, dense, answer in zip(self.ports, self.dense, answers, strict=True)
        ]
        return tuple(
            OutputScore(name=port.name, relative_error=each.relative_error, agreement=each.agreement)
            for port, each in zip(self.ports, errors, strict=True)
        )

    def agreement(self, answers: Sequence[Answer]) -> float | None:
        """The least over the outputs; None for too few inputs."""
        shares = [score.agreement for score in self.scores(answers) if score.agreement is not None]
        return min(shares, default=None)

    def accuracies(self, answers: Sequence[Answer]) -> Accuracies | None:
        """Of the first logits; None without labels."""
        if self.labels_N is None:
            return None
        own = next((place for place, port in enumerate(self.ports) if port.role == "logits"), 0)
        return Accuracies(top1=top_k(answers[own], self.labels_N, 1), top5=top_k(answers[own], self.labels_N, 5))

    def of_dense(self, model: nn.Module) -> DensePoint:
        right = self.accuracies(self.dense)
        return DensePoint(
            macs=macs(model),
            parameters=parameters(model),
            inputs=len(self.dense[0]),
            accuracy=None if right is None else right.top1,
            top5=None if right is None else right.top5,
        )


def scored_inputs(model: nn.Module, source: InputSet, labels_N: NDArray[np.int64] | None, batch_size: int) -> Scored:
    """All of the inputs with the dense model's outputs for them."""
    inputs = concatenated(list(source.batches(batch_size)))
    dense = outputs(model, inputs, batch_size)
    return Scored(
        inputs=inputs,
        ports=output_ports(model),
        dense=dense,
        labels_N=labels_N,
        batch_size=batch_size,
        digest=source.digest,
    )
