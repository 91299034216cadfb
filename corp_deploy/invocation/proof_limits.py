"""Limits on the difference of a reduced model or decoder. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ground.errors import BadInput
from ground.quantity import CONFIDENCE, ERROR, FACTOR, NATS, RATIO, SHARE

from .option import Record, option


def confidence_option() -> Any:
    """A field of whatever decides by intervals."""
    words = "Confidence of the intervals by which limits are decided; at 0 the point alone decides."
    return option(CONFIDENCE, 0.95, help=words)


@dataclass(frozen=True, kw_only=True)
class LimitOptions(Record, heading="Limits"):
    """None sets no limit. The three behind `max_apart` are of maps that heads apart make, which the first two are not
    of.
    """

    min_agreement: float | None = option(SHARE, help="Least top-1 agreement with the dense model.")
    max_error: float | None = option(ERROR, help="Largest relative logit error of the reduced model.")
    half_factor: float = option(
        FACTOR, 4.0, help="FP16 and BF16 links may err by this multiple of the dense model's own error in that type."
    )
    quantised_factor: float = option(
        FACTOR, 2.0, help="INT8 and FP8 links may err by this multiple of the dense model's error under plain rounding."
    )
    max_apart: float = option(
        SHARE,
        0.05,
        help="Largest share of inputs on which rounding may merge other tokens; these inputs are judged separately.",
    )
    max_map_error: float | None = option(ERROR, help="Largest relative error of a head's maps.")
    min_iou: float | None = option(SHARE, help="Least intersection over union of a head's maps.")
    min_pixels: float | None = option(SHARE, help="Smallest share of a head's pixels with the same class.")
    confidence: float = confidence_option()

    def refuse_ignored(self, options: Mapping[str, Any]) -> None:
        if "confidence" in options and not self.shares:
            raise BadInput(
                "--confidence is of the interval of a share of inputs: give --min-agreement, or --min-pixels with "
                "--head"
            )

    @property
    def shares(self) -> dict[str, float]:
        """The least shares of inputs, by the names of their fields."""
        every = {"min_agreement": self.min_agreement, "min_pixels": self.min_pixels}
        return {name: least for name, least in every.items() if least is not None}


@dataclass(frozen=True, kw_only=True)
class LanguageOptions(Record, heading="Limits"):
    """What every candidate has to keep to; None for no limit."""

    max_ratio: float | None = option(RATIO, help="Largest perplexity, as a multiple of the dense one's.")
    min_agreement: float | None = option(SHARE, help="Smallest share of tokens with the same most likely next token.")
    max_kl: float | None = option(NATS, help="Largest KL from the dense softmax, nats a token.")
    confidence: float = confidence_option()

    @property
    def some(self) -> bool:
        """Whether there is any."""
        return any(limit is not None for limit in (self.max_ratio, self.min_agreement, self.max_kl))
