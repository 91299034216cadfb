"""Readings of a parity record for rules: of a link, an output, the labels, or a user's own measure."""

import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace

from ground.errors import BadInput
from perf.parity.labels import OwnMetric
from perf.parity.link import Link
from perf.parity.measures import SHARES
from perf.parity.parity import Parity
from perf.stats.decision import share_interval
from perf.stats.stats import Interval, exact_interval, z_of

from .rule import ACCURACY, COUNTED, FITTED, PLACED, TIMED, Rule

DENSE = "dense"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A figure with its interval over `count` units (rounds or images), and the `share` of images if it is a share.

    `launches` is the number of processes that measured it.
    `doubt` is why the figure can't decide the rule, `broken` why it is missing or not finite, which fails the rule.
    """

    interval: Interval | None
    count: int = 0
    unit: str | None = None
    share: float | None = None
    launches: int = 1
    doubt: str | None = None
    broken: str | None = None

    @property
    def known(self) -> Interval:
        assert self.interval is not None, self
        return self.interval


def require_measure(rule: Rule, measures: Collection[str]) -> None:
    if rule.metric not in measures:
        names = ", ".join(dict.fromkeys((*TIMED, *PLACED, *COUNTED, FITTED, ACCURACY, *sorted(measures))))
        raise BadInput(f"rule {rule.text!r}: no figure is called {rule.metric!r}; there are {names}")


def parity_reading(parity: Parity | None, rule: Rule, subject: str | None, where: str, confidence: float) -> Reading:
    if parity is None:
        raise BadInput(
            f"rule {rule.text!r}: {rule.metric} is no figure of a bench record, and {where} has no parity record"
        )
    if rule.metric == FITTED:
        if parity.fitted is None:
            raise BadInput(
                f"rule {rule.text!r}: {where} doesn't say which images the model was fitted to; verify it again with "
                "its directory among the candidates, or with --moments"
            )
        return Reading(interval=exact_interval(parity.fitted.same))
    if rule.metric == ACCURACY:
        return _read_accuracy(parity, rule, subject, where, confidence)
    link = find_link(parity.links, rule, where)
    measures = asdict(link.measures)
    require_measure(rule, measures)
    value = measures[rule.metric]
    if value is None:
        return Reading(interval=None, doubt=f"{link.name}: {link.measures.agreement_line}")
    if not math.isfinite(value):
        return Reading(interval=None, broken=f"{rule.metric} of {link.name} is not finite")
    if rule.metric not in SHARES:
        return Reading(interval=exact_interval(value))
    count, unit = link.measures.images, link.measures.inputs
    return Reading(interval=share_interval(value, count, confidence), count=count, unit=unit, share=value)


def find_own_metric(parity: Parity | None, rule: Rule, subject: str | None, where: str) -> OwnMetric:
    """Return a user's measure of a link's candidate, the shipped artefact or the dense model.

    Raises BadInput if there is none.
    """
    rows = [] if parity is None else [row for row in parity.metrics if row.name == rule.metric]
    if parity is None or not rows:
        known_names = ", ".join(dict.fromkeys(row.name for row in parity.metrics)) if parity else ""
        has = f"it has {known_names}" if known_names else "it has none"
        raise BadInput(
            f"rule {rule.text!r}: {where} has no measure {rule.metric!r} of your own, {has}; give verify --metric "
            f"{rule.metric}='COMMAND {{outputs}}'"
        )
    label = rows[0].model if subject == DENSE else find_link(parity.links, rule, where).candidate
    row = next((row for row in rows if row.model == label), None)
    if row is None:
        raise BadInput(f"rule {rule.text!r}: {where} has no measure {rule.metric!r} of {label}")
    return row


def shipped_links(links: Sequence[Link]) -> list[Link]:
    """Return the links to the shipped artefact, one for each output."""
    last = next((link for link in reversed(links) if link.kind == "whole"), links[-1])
    return [link for link in links if (link.kind, link.candidate) == (last.kind, last.candidate)]


def find_link(links: Sequence[Link], rule: Rule, where: str) -> Link:
    """Return the link that a rule names by link or output, or else the link to the shipped artefact."""
    shipped = shipped_links(links)
    if rule.link is None:
        return shipped[-1]
    named = {link.output: link for link in shipped} | {link.name: link for link in links}
    if rule.link not in named:
        names = ", ".join(
            filter(None, dict.fromkeys((*(link.name for link in links), *(link.output for link in shipped))))
        )
        raise BadInput(f"rule {rule.text!r}: {where} has no parity link or output {rule.link!r}; it has {names}")
    return named[rule.link]


def rules_by_output(rule: Rule, parity: Parity | None) -> list[Rule]:
    if parity is None or rule.link is not None or rule.is_own or rule.is_of_bench or rule.metric in (FITTED, ACCURACY):
        return [rule]
    telling = [link for link in shipped_links(parity.links) if rule.metric in asdict(link.measures)]
    if len(telling) < 2 and all(link.output is None for link in telling):
        return [rule]
    return [replace(rule, link=link.name, text=f"{rule.text} [{link.output}]") for link in telling] or [rule]


def find_judged_outputs(rule: Rule, parity: Parity) -> list[str]:
    """Return the names in Parity.outputs whose difference from the dense model a rule judges."""
    if rule.is_own:  # the user's command gets every output
        return list(parity.outputs)
    if rule.is_of_bench or rule.metric == FITTED:
        return []
    if rule.metric == ACCURACY:
        return [name for name, links in parity.outputs.items() if links[0].role == "logits"][:1]
    links = [find_link(parity.links, each, "this record") for each in rules_by_output(rule, parity)]
    shipped = shipped_links(parity.links)
    return [each.output or each.role for each in links if each in shipped or each.kind == "reduced"]


def _read_accuracy(parity: Parity, rule: Rule, subject: str | None, where: str, confidence: float) -> Reading:
    if not parity.accuracy:
        raise BadInput(
            f"rule {rule.text!r}: {where} has no accuracy, since it was made without labels; verify again with --labels"
        )
    label = parity.accuracy[0].model if subject == DENSE else find_link(parity.links, rule, where).candidate
    own = next(row for row in parity.accuracy if row.model == label)
    interval = share_interval(own.accuracy, own.images, confidence)
    return Reading(interval=interval, count=own.images, unit="images", share=own.accuracy)


def own_reading(metric: OwnMetric, confidence: float) -> Reading:
    if metric.error is None or metric.images is None:
        return Reading(interval=exact_interval(metric.value))
    width = z_of(confidence) * metric.error
    interval = Interval(value=metric.value, low=metric.value - width, high=metric.value + width)
    return Reading(interval=interval, count=metric.images, unit="images")
