"""Limits on the difference of a reduced model from the dense one. Imports no torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from corp_deploy.invocation.proof import ProofOptions
from ground.errors import BadInput
from ground.ports import OutputPort, Role
from ground.precision import QUANTISED, FloatType
from perf.parity import tolerance
from perf.parity.logits import threshold_of
from perf.parity.measures import Measures
from perf.parity.parity import ImageSet
from perf.parity.tolerance import Tolerance
from perf.stats.decision import (
    confidence_text,
    fewest_for_share,
    most_confidence,
    percent,
    percent_limit,
    share_interval,
)


def unreachable_shares(shares: Mapping[str, float], *, count: int, noun: str, confidence: float) -> list[str]:
    """Return a sentence for each required share that `count` inputs can't prove even if all of them agree."""
    sentences, lowest = list[str](), share_interval(1.0, count, confidence).low
    for name, least in shares.items():
        if least <= lowest:
            continue
        enough, looser = fewest_for_share(least, confidence), math.floor(1000 * lowest) / 1000
        more = f"no number of {noun} is enough" if enough is None else f"at least {enough:,} {noun} are needed"
        lower = math.floor(100 * most_confidence(least, count)) / 100
        sentences.append(
            f"{name} {percent_limit(least)} can't be shown by {count:,} {noun}: even {count:,} of {count:,} agreeing "
            f"would leave {percent(lowest)} to 100 % {confidence_text(confidence)}; {more}, or a confidence of at most "
            f"{lower:g}{' (the point alone decides)' * (lower == 0)}, or a limit of at most {looser:g}"
        )
    return sentences


# The limits of a score map (True), and of any other output.
MEASURED = {True: ("max_error", "min_agreement", "min_iou"), False: ("max_error", "min_agreement")}


@dataclass(frozen=True, kw_only=True)
class ParityLimits(ProofOptions):
    """Limits on the difference of the reduced model's outputs from the dense one's; None sets no limit.

    `max_apart` is the largest share of inputs on which two runtimes may merge different tokens by rounding. Shares of
    inputs are judged by an interval of this `confidence`, or at 0 by the point estimate. A share that these inputs
    leave open is INCONCLUSIVE, or UNJUDGED if `elsewhere` names other inputs that judge it. Raises BadInput if a number
    is out of range, or an output limit is unknown.
    """

    elsewhere: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        for role in get_args(Role):
            self.of_port(OutputPort(name="", role=role))

    def of_port(self, port: OutputPort, noise: Measures | None = None) -> Tolerance:
        """Return the limits of one output; `noise` is the dense model's own error there in FP16."""
        if port.name in self.exclude_output:
            return tolerance.EXCLUDED
        numbers = {limit: number for limit, (_, number) in self._set_for(port).items()}
        return tolerance.user_tolerance(**numbers, confidence=self.confidence, noise=noise, elsewhere=self.elsewhere)

    def _set_for(self, port: OutputPort) -> dict[str, tuple[str, float]]:
        """Return, by limit of one output, its option and number; an output's own limits replace general ones."""
        is_map, own = port.role == "score map", self.by_output.get(port.name, {})
        every = [
            ("max_error", "--max-error", self.max_error),
            ("min_agreement", "--min-agreement", self.min_agreement),
            *(each for each in self._for_maps if is_map),
            *((limit, f"--output-limit {port.name}:{limit}", own[limit]) for limit in own if limit in MEASURED[is_map]),
        ]
        return {limit: (option, number) for limit, option, number in every if number is not None}

    @property
    def _for_maps(self) -> list[tuple[str, str, float | None]]:
        return [
            ("max_error", "--max-map-error", self.max_map_error),
            ("min_agreement", "--min-pixels", self.min_pixels),
            ("min_iou", "--min-iou", self.min_iou),
        ]

    def threshold_of(self, port: OutputPort, answers: NDArray[np.floating]) -> float | None:
        """Return the threshold above which a single logit or a pixel of a score map counts as positive, None if unused.

        `answers` are the dense model's outputs.
        """
        if port.role == "score map":
            return self.map_threshold
        return threshold_of(answers, self.logit_threshold) if port.role == "logits" else None

    def require_applied(self, ports: Sequence[OutputPort]) -> None:
        """Raise BadInput for a limit that applies to none of the outputs and maps, and if all are excluded."""
        gives = "the model gives " + ", ".join(f"{port.name} ({port.role})" for port in ports)
        names = {port.name for port in ports}
        if unknown := [name for name in (*self.by_output, *self.exclude_output) if name not in names]:
            option = "--output-limit" if unknown[0] in self.by_output else "--exclude-output"
            raise BadInput(f"{option}: there is no output {unknown[0]!r}; {gives}")
        judged = [port for port in ports if port.name not in self.exclude_output]
        if not judged:
            raise BadInput(f"--exclude-output: it excludes every output, so that nothing is judged; {gives}")
        general = [("", "--max-error", self.max_error), ("", "--min-agreement", self.min_agreement), *self._for_maps]
        given = [option for _, option, number in general if number is not None]
        given += [f"--output-limit {name}:{limit}" for name, limits in self.by_output.items() for limit in limits]
        used = {option for port in judged for option, _ in self._set_for(port).values()}
        if self.logit_threshold is not None:
            given.append("--logit-threshold")
            used |= {"--logit-threshold"} if "logits" in {port.role for port in judged} else set()
        if unused := [option for option in given if option not in used]:
            raise BadInput(
                f"{unused[0]}: it applies to no output, since {gives}, and a limit for one output or for score maps "
                "takes the place of a general one; leave it out, or set --max-error, which every output has"
            )

    def unreachable(self, images: ImageSet) -> list[str]:
        """Return a sentence for each limit on a share that so many inputs can't prove."""
        shares = {name.replace("_", " "): least for name, least in self.shares.items()}
        return unreachable_shares(shares, count=images.count, noun=images.noun, confidence=self.confidence)

    def for_few_inputs(self, count: int, *, elsewhere: str) -> "ParityLimits":
        """Return the limits, with `elsewhere` set if `count` inputs are too few to prove any of the required shares."""
        lowest = share_interval(1.0, count, self.confidence).low
        few = any(least > lowest for least in self.shares.values())
        return replace(self, elsewhere=elsewhere) if few else self

    def factor(self, float_type: FloatType) -> float:
        """Return the bound of a link in this type as a multiple of the dense model's own error."""
        return self.quantised_factor if float_type in QUANTISED.values() else self.half_factor
