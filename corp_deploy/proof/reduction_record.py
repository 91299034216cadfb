"""What a reduced model's config.json says of its reduction, typed where it is read."""

from pathlib import Path

import msgspec

from corp_deploy.families.merging_record import MergingRecord
from corp_deploy.reduction.report import SiteReport
from corp_deploy.store.model_config import CONFIG, ModelConfig
from ground.records import record_from_value
from perf.report.content import BudgetLine


class Covered(msgspec.Struct, frozen=True, kw_only=True):
    """How many of the sites were reduced, in words, and why others were refused."""

    verdict: str
    refused: dict[str, str] = {}


class ReductionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Every part of every site, the ways a budget was weighed by, what was decided by itself, in words, and how
    tokens are merged.
    """

    sites: tuple[SiteReport, ...] = ()
    ways: tuple[BudgetLine, ...] = ()
    decided: tuple[str, ...] = ()
    coverage: Covered | None = None
    merging: MergingRecord | None = None


def reduction_of(config: ModelConfig, directory: Path) -> ReductionRecord:
    """Empty for a model that was never reduced. Raises BadInput, naming the entry, for what can't be read."""
    where = f"{directory / CONFIG}: lineage.reduction"
    return record_from_value(config.lineage.get("reduction", {}), ReductionRecord, where=where)
