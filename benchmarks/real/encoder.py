"""A real encoder with its saliency head, and methods that reduce it to shares of the dense MACs."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.quality.subjects import BATCH, Subject, dinov2
from benchmarks.real.head import SaliencyHead, load_head
from benchmarks.real.measures import Outputs, figures, outputs
from benchmarks.real.place import assembled
from benchmarks.real.search import Schedules, Sparsities
from calib.groups import group_ids
from calib.moments import Moments
from corp_deploy.families.counting import macs, parameters
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.planning.execution import reduce_as_asked
from corp_deploy.planning.request import build_request
from corp_deploy.reduction.calibrate import Statistics, calibrate
from corp_deploy.reduction.snapshots import moments_in_splits

SHARES = (0.9, 0.8, 0.7, 0.6, 0.5)
LOOP: Mapping[str, Any] = {"closed_loop": "asymmetric"}
# How to reach a share: uniform widths of MLPs and Q/K or of MLPs alone, a budget, or tokens merged evenly or growing.
Meeting = Literal["joint", "mlp", "budget", "each", "grow"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A line of the table: options of `reduce`, how it reaches the share, and the statistics of its moments."""

    name: str
    options: Mapping[str, Any]
    meets: Meeting = "joint"
    grouped: bool = False
    attention_system: bool = False
    shares: tuple[float, ...] = SHARES


def _best(name: str, meets: Meeting, *, grouped: bool = False, **options: Any) -> Method:
    return Method(name=name, options={"preset": "best", **options}, meets=meets, grouped=grouped)


METHODS = (
    Method(name="none", options={"preset": "none"}),
    Method(name="vbp, MLPs alone", options={"preset": "vbp"}, meets="mlp"),
    Method(name="grail, MLPs alone", options={"preset": "grail"}, meets="mlp"),
    Method(name="corp-v1", options={"preset": "corp-v1"}),
    Method(name="corp", options={"preset": "corp"}, attention_system=True),
    _best("best", "joint"),
    _best("best, closed loop", "joint", **LOOP),
    _best("best, by site", "budget"),
    _best("best, by site, closed loop", "budget", **LOOP),
    _best("best, grouped", "joint", grouped=True),
    _best("best, by site, grouped", "budget", grouped=True),
    replace(_best("best, by site, grouped, closed loop", "budget", grouped=True, **LOOP), shares=(*SHARES, 0.66)),
    _best("merging", "each"),
    _best("merging, growing", "grow"),
    _best("merging, by cosines", "each", merge_metric="stream"),
    _best("merging, growing, by cosines", "grow", merge_metric="stream"),
    _best("merging, growing, closed loop", "grow", **LOOP),
    _best("dropping", "each", merge_how="drop"),
    _best("merging and widths", "budget", grouped=True, merge_tokens="auto"),
    _best("merging and widths, closed loop", "budget", grouped=True, merge_tokens="auto", **LOOP),
)


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """The dense encoder with calibration crops and held-out crops of photographs."""

    subject: Subject
    head: SaliencyHead
    groups: Path
    kept: dict[tuple[bool, bool], Moments] = field(default_factory=dict)

    @classmethod
    def opened(cls, scratch: Path, crops: int, held_out: int) -> "Encoder":
        """Return the encoder of `make real`. Raises Missing without weights and photographs."""
        subject = dinov2(scratch, crops, held_out)
        names = json.loads((assembled() / "calib_groups.json").read_text(encoding="utf-8"))[:crops]
        groups = scratch / "groups.json"
        groups.write_text(json.dumps(names), encoding="utf-8")
        return cls(subject=subject, head=load_head(assembled() / "head.safetensors"), groups=groups)

    @property
    def model(self) -> nn.Module:
        return self.subject.dense.model

    @cached_property
    def answers(self) -> Outputs:
        return outputs(self.model, pixels_of(self.subject.held_out), self.head)

    @cached_property
    def sparsities(self) -> Sparsities:
        return Sparsities(self.model)

    @cached_property
    def schedules(self) -> Schedules:
        return Schedules(self.model)

    def of_photographs(self, count: int) -> "Encoder":
        """Return this encoder with the crops of only the first photographs."""
        names = json.loads(self.groups.read_text(encoding="utf-8"))
        chosen = set(list(dict.fromkeys(names))[:count])
        inputs = self.subject.inputs.subset([place for place, name in enumerate(names) if name in chosen])
        return replace(self, subject=replace(self.subject, inputs=inputs), kept={})

    def moments(self, method: Method) -> Moments:
        """Return the moments of a method, collected once."""
        kind, inputs = (method.grouped, method.attention_system), self.subject.inputs
        if kind not in self.kept:
            statistics = Statistics(attention_system=method.attention_system)

            def take(images: Any, number: int = 0) -> Moments:
                return calibrate(self.subject.dense, images, batch_size=BATCH, statistics=statistics)

            grouped = method.grouped
            groups_B = group_ids(inputs, str(self.groups)) if grouped else None
            self.kept[kind] = take(inputs) if groups_B is None else moments_in_splits(inputs, groups_B, take, seed=0)
        return self.kept[kind]

    def options(self, method: Method, share: float) -> dict[str, Any]:
        """Return the options of `reduce` for a share of the dense MACs."""
        met: dict[str, Any]
        match method.meets:
            case "budget":
                met = {"macs": share}
            case "each" | "grow":
                met = {"merge_tokens": self.schedules.of(method.meets, share)}
            case "mlp":
                met = {"mlp": self.sparsities.of("mlp", share)}
            case "joint":
                sparsity = self.sparsities.of("joint", share)
                met = {"mlp": sparsity, "attn": sparsity}
        return {**method.options, **met}

    def reduced(self, method: Method, share: float) -> tuple[nn.Module, float]:
        """Return the reduced model and the CPU seconds without the moments."""
        moments = self.moments(method)
        asked = build_request(ReduceOptions.from_options(self.options(method, share)))
        started = time.process_time()
        reduction, _ = reduce_as_asked(self.subject.dense, moments, asked, images=self.subject.inputs)
        return reduction.model, time.process_time() - started

    def row(self, method: Method, share: float) -> dict[str, Any]:
        """Return a row: options, sizes, cost, and errors against the dense model."""
        model, cpu_s = self.reduced(method, share)
        return {
            "options": self.options(method, share),
            "macs_share": macs(model) / macs(self.model),
            "parameters": parameters(model),
            "cpu_s": cpu_s,
            "passes": cpu_s / self.subject.pass_s,
            **figures(outputs(model, pixels_of(self.subject.held_out), self.head), self.answers),
        }

    def fitted_row(self, method: Method, share: float) -> dict[str, Any]:
        """Return the errors on the calibration crops and on the held-out ones."""
        model, images = self.reduced(method, share)[0], pixels_of(self.subject.inputs)
        own = figures(outputs(model, images, self.head), outputs(self.model, images, self.head))
        judged = figures(outputs(model, pixels_of(self.subject.held_out), self.head), self.answers)
        return {name: judged[name] for name in ("class_error", "patch_error")} | {
            f"fitted_{name}": own[name] for name in ("class_error", "patch_error")
        }


def pixels_of(inputs: Any) -> Tensor:
    """Return all images [N,3,S,S]."""
    return torch.cat([torch.as_tensor(np.asarray(batch)) for batch in inputs.batches(BATCH)])
