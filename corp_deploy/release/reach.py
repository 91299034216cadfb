"""What of a recipe its images can never show, told before any stage. Imports no torch."""

from collections.abc import Iterator, Sequence

from calib.count import count_of_images
from corp_deploy.proof.reach import unreachable
from perf.gate.rule import Rule
from perf.parity.measures import SHARES

from .names import PARITY, parity_name
from .recipe import Recipe


def out_of_reach(recipe: Recipe) -> list[str]:
    """A sentence for each limit on a share of inputs that its images are too few for, however well they agree. What
    can't be counted without being opened is left out.
    """
    held_out = _held_out(recipe)
    sentences = [] if held_out is None else _of_limits(recipe, held_out)
    for target in recipe.targets:
        rules = (*(recipe.rules if target == recipe.targets[0] else ()), *target.rules)
        count = held_out if parity_name(target) == PARITY else recipe.samples.count
        sentences += [] if count is None else _of_rules(rules, count, recipe.gate.confidence)
    return sentences


def _held_out(recipe: Recipe) -> int | None:
    """How many images the proof is made on."""
    counts = count_of_images(recipe.held_out.images), recipe.held_out.samples
    return min((count for count in counts if count is not None), default=None)


def _of_limits(recipe: Recipe, count: int) -> list[str]:
    parity = recipe.parity
    every = {"parity.min_agreement": parity.min_agreement, "parity.min_pixels": parity.min_pixels}
    shares = {key: least for key, least in every.items() if least is not None}
    return unreachable(shares, count=count, noun="held-out images", confidence=parity.confidence)


def _of_rules(rules: Sequence[Rule], count: int, confidence: float) -> list[str]:
    """Rules that forbid a share below a number; what a baseline bounds is known when it is read."""
    shares = dict(_least_shares(rules))
    return unreachable(shares, count=count, noun="images", confidence=confidence)


def _least_shares(rules: Sequence[Rule]) -> Iterator[tuple[str, float]]:
    for rule in rules:
        if rule.metric in SHARES and not rule.is_own and rule.name is None and rule.compare in ("<", "<="):
            yield f"rule {rule.text!r}: {rule.metric}", rule.offset
