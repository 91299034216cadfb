"""The parity record: the chain of links from the dense model to the shipped artefact, with its verdict."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import GenericAlias
from typing import Any

import msgspec

from ground.errors import BadInput
from ground.ports import Role
from ground.records import json_from_record, record_from_file, record_from_value
from perf.record.runs import FittedInputs
from perf.stats.decision import percent

from .labels import Accuracy, ClassAccuracy, ComparedArtefact, OwnMetric, PairedAccuracy
from .link import Link, json_from_link
from .locate import FaultLocation
from .maps import SeparateHead
from .measures import MEASURES
from .shift import Shift
from .structure import StructuralTest
from .tolerance import Verdict

KIND, VERSION = "parity", 1
HOW_TO_JUDGE = "set --max-error or --min-agreement, or leave an output out with --exclude-output"
AGAIN = "make the record again with `corp-deploy verify`"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSet:
    """The inputs of a proof; `kind` is the noun of real inputs, such as `images`, or `random`."""

    count: int
    digest: str
    kind: str = "images"

    @property
    def noun(self) -> str:
        return "random inputs" if self.kind == "random" else self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """The whole proof; `sources` are compared engines, `fitted` counts its images that candidates were fitted to.

    `classes` compare the dense model with the last candidate, class by class.
    """

    images: ImageSet
    links: tuple[Link, ...]
    structure: tuple[StructuralTest, ...] = ()
    located: tuple[FaultLocation, ...] = ()
    shift: Shift | None = None
    accuracy: tuple[Accuracy, ...] = ()
    comparisons: tuple[PairedAccuracy, ...] = ()
    classes: tuple[ClassAccuracy, ...] = ()
    per_image: str | None = None
    heads: tuple[SeparateHead, ...] = ()
    sources: tuple[ComparedArtefact, ...] = ()
    metrics: tuple[OwnMetric, ...] = ()
    fitted: FittedInputs | None = None

    def __post_init__(self) -> None:
        names = [link.name for link in self.links]
        if not names or len(names) != len(set(names)):
            raise BadInput(f"a proof needs one or more links with different names, got {names}")
        images = self.accuracy[0].images if self.accuracy else 0
        if odd := [each for each in self.comparisons if not images or each.only_a + each.only_b > images]:
            raise BadInput(f"comparisons: got {odd[0].line}, but an accuracy of {images} images, expected no fewer")

    @property
    def verdict(self) -> Verdict:
        """FAIL if a link or test fails, else INCONCLUSIVE if a link is, UNJUDGED if an output is, or PASS."""
        if any(finding.status == "FAIL" for finding in self.structure):
            return "FAIL"
        order: tuple[Verdict, ...] = ("FAIL", "INCONCLUSIVE", "PASS")
        statuses = {link.status for link in self.links}
        verdict: Verdict = next((status for status in order if status in statuses), "UNJUDGED")
        return "UNJUDGED" if verdict == "PASS" and self.unjudged else verdict

    @property
    def outputs(self) -> dict[str, list[Link]]:
        """The links of each output that isn't excluded, by the name that messages use."""
        by_output = dict[str, list[Link]]()
        for each in self.links:
            if not each.tolerance.excluded:
                by_output.setdefault(each.output or each.role, []).append(each)
        return by_output

    @property
    def unjudged(self) -> tuple[str, ...]:
        """The outputs that no limit judged from the dense model to the shipped artefact, as a whole or step by step."""
        return tuple(name for name, links in self.outputs.items() if not _is_judged(links))

    @property
    def excluded(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(each.output or each.role for each in self.links if each.tolerance.excluded))

    @property
    def compared(self) -> str:
        return " and ".join(dict.fromkeys(link.role for link in self.links))

    @property
    def judged(self) -> str:
        """A sentence with the number of judged links, and the outputs that were not judged or were excluded."""
        free = sum(link.status == "UNJUDGED" for link in self.links)
        judged = len(self.links) - free
        sentence = f"{judged} {'link' if judged == 1 else 'links'} judged"
        sentence += f", {free} measured without a limit" if free else ""
        sentence += f"; no limit judged {' and '.join(self.unjudged)}" if self.unjudged and judged else ""
        return f"{sentence}; {' and '.join(self.excluded)} excluded by name" if self.excluded else sentence

    @property
    def reason(self) -> str:
        unmet = [f"{link.name}: {link.reason}" for link in self.links if link.status == "FAIL"]
        unmet += [f"{f.test} of {f.candidate}: {f.reason}" for f in self.structure if f.status == "FAIL"]
        unmet += [f"{link.name}: {link.reason}" for link in self.links if link.status == "INCONCLUSIVE"]
        on = f"on {self.images.count} {self.images.noun}"
        on += "" if self.fitted is None else self.fitted.clause
        apart = [f"{link.name} merges other tokens on {link.apart}" for link in self.links if link.apart]
        on += f" ({', '.join(apart)}, where similarities are equal up to rounding)" if apart else ""
        return f"{on}: {'; '.join(unmet)}" if unmet else on

    @property
    def warnings(self) -> tuple[str, ...]:
        first = self.accuracy[0] if self.accuracy else None
        if first is None or not first.is_near_chance:
            return ()
        return (
            f"{first.model} is right on {percent(first.accuracy)} of {first.images} labelled images, no better than "
            f"chance ({percent(first.chance or 0.0)}): look for (a) labels in another order than the images, (b) class "
            "indices in another order than the model's, (c) other preprocessing than in training, "
            "(d) a model that always answers one class",
        )

    @property
    def accuracy_lines(self) -> tuple[str, ...]:
        pairs = {each.b: each for each in self.comparisons}
        return tuple(
            f"accuracy of {row.model}: {percent(row.accuracy)} ({percent(row.low)} to {percent(row.high)} at 95 % "
            f"confidence, {row.images} images)" + (f"; {pairs[row.model].line}" if row.model in pairs else "")
            for row in self.accuracy
        )

    @property
    def line(self) -> str:
        return f"{self.verdict} ({self.judged}) {self.reason}"

    def to_json(self) -> dict[str, Any]:
        head = {"kind": KIND, "version": VERSION, "verdict": self.verdict, "reason": self.reason, "line": self.line}
        sizes = sorted({batch.batch for link in self.links for batch in link.batches})
        links = [json_from_link(link) for link in self.links]
        fields: dict[str, Any] = json_from_record(self)
        for name in ("heads", "sources", "metrics", "fitted", "classes"):
            if not fields[name]:
                del fields[name]
        return head | fields | {"links": links, "batches": sizes}


def _is_judged(links: Sequence[Link]) -> bool:
    whole = [each for each in links if each.kind == "whole"]
    steps = [each for each in links if each.kind != "whole"]
    if any(each.status != "UNJUDGED" for each in whole):
        return True
    return bool(steps) and all(each.status != "UNJUDGED" or each.tolerance.elsewhere for each in steps)


def load_parity(path: Path) -> Parity:
    return parity_from_value(record_from_file(path, dict[str, Any], remedy=AGAIN), where=str(path))


def parity_from_value(raw: Mapping[str, Any], *, where: str) -> Parity:
    """Return the Parity of parsed JSON, with measures by each link's role. Raises BadInput, naming the entry."""
    roles = record_from_value(raw, _Roles, where=where, kind=KIND, version=VERSION, remedy=AGAIN).links
    kinds = tuple(msgspec.defstruct("Measured", [("measures", MEASURES[each.role])]) for each in roles)
    measured = msgspec.defstruct("Links", [("links", GenericAlias(tuple, kinds))])
    links: Any = record_from_value(raw, measured, where=where, remedy=AGAIN)
    read = [{**old, "measures": new.measures} for old, new in zip(raw["links"], links.links, strict=True)]
    return record_from_value({**raw, "links": read}, Parity, where=where, remedy=AGAIN)


class _OfRole(msgspec.Struct):
    role: Role = "logits"


class _Roles(msgspec.Struct):
    links: list[_OfRole]
