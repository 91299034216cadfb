"""Limits on how far a reduced model may differ from the dense one. Imports no torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from corp_deploy.invocation.proof import ProofOptions
from ground.precision import QUANTISED, FloatType
from perf.parity import tolerance
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


def unreachable(shares: Mapping[str, float], *, count: int, noun: str, confidence: float) -> list[str]:
    """A sentence for each least share, by its name, that even `count` inputs without exception don't show."""
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


@dataclass(frozen=True, kw_only=True)
class ParityLimits(ProofOptions):
    """What the user allows the reduced model to differ from the dense one by; None sets no limit.

    `max_apart`: the largest share of inputs on which two runtimes may merge other tokens, by rounding alone. The three
    behind it are of maps that heads apart make, which the first two are not of. `confidence`: of the interval with
    which shares of inputs have to keep to their limits, 0 where the point alone decides. `elsewhere`: on what
    those are judged that these inputs leave open. Raises BadInput for what is no limit.
    """

    elsewhere: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.of_outputs(), self.of_maps()

    def of_outputs(self, noise: Measures | None = None) -> Tolerance:
        """What they are for a model's own outputs."""
        return self._of(noise, min_agreement=self.min_agreement, max_error=self.max_error)

    def of_maps(self, noise: Measures | None = None) -> Tolerance:
        """What they are for the maps of heads apart."""
        return self._of(noise, min_agreement=self.min_pixels, max_error=self.max_map_error, min_iou=self.min_iou)

    def _of(self, noise: Measures | None, **least: float | None) -> Tolerance:
        return tolerance.limits(**least, confidence=self.confidence, noise=noise, elsewhere=self.elsewhere)

    def unreachable(self, images: ImageSet) -> list[str]:
        """The limits that so many inputs can never show to be kept, a sentence each."""
        shares = {name.replace("_", " "): least for name, least in self.shares.items()}
        return unreachable(shares, count=images.count, noun=images.noun, confidence=self.confidence)

    def of_few(self, count: int, *, elsewhere: str) -> "ParityLimits":
        """For so few inputs that they can only fail a share: what they leave open is judged `elsewhere`."""
        lowest = share_interval(1.0, count, self.confidence).low
        few = any(least > lowest for least in self.shares.values())
        return replace(self, elsewhere=elsewhere) if few else self

    def factor(self, float_type: FloatType) -> float:
        """How many times the dense model's own error in this type a link may err."""
        return self.quantised_factor if float_type in QUANTISED.values() else self.half_factor
