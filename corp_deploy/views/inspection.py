"""Views of a model: its sites and their costs, origins of preprocessing and weights, and the plan of a budget."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.table import Table

from corp_deploy.families import traced_model
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.hub_snapshot import ORIGIN
from corp_deploy.traced.models.module import assumes_size

from .console import long_reasons, reason_cell

if TYPE_CHECKING:
    from corp_deploy.planning.first_plan import FirstPlan


def _origin(checkpoint: Checkpoint) -> dict[str, Any]:
    source = dict(checkpoint.lineage.get("source", {}))
    source.pop(ORIGIN, None)
    return source


def preprocessing_record(checkpoint: Checkpoint) -> dict[str, Any]:
    origin = _origin(checkpoint)
    return {
        "preprocessing": traced_model.input_spec(checkpoint.model).as_json(),
        "preprocessing_source": origin.pop("preprocessing", "") or _assumed(checkpoint) or DIRECTORY,
        "weights": origin,
    }


def preprocessing_line(checkpoint: Checkpoint) -> str:
    line = f"preprocessing: {traced_model.input_spec(checkpoint.model).as_line()}"
    source = _origin(checkpoint).get("preprocessing")
    assumed = "" if source is not None else _assumed(checkpoint)
    return f"{line}; {assumed}" if assumed else f"{line}; from {source or DIRECTORY}"


DIRECTORY = "the model's directory"


def _assumed(checkpoint: Checkpoint) -> str:
    """Return a sentence on the image size, mean and std assumed for a user's module, "" if nothing is assumed."""
    model = checkpoint.model
    if _origin(checkpoint).keys().isdisjoint({"code", "module"}) or traced_model.input_spec(model).medium != "images":
        return ""
    given, remedies = checkpoint.architecture.preprocessing.settings, dict[str, str]()
    if assumes_size(model) and "input_size" not in checkpoint.architecture.kwargs:
        remedies["the size"] = "let the module say `input_size = (3, height, width)`"
    if given.keys().isdisjoint({"mean", "std"}):
        remedies["ImageNet's mean and std"] = "give --mean and --std"
    return f"assumed: {' and '.join(remedies)} ({'; '.join(remedies.values())})" if remedies else ""


SHOWN = 0.005
"""The smallest share of the MACs of a part that a plan's lines name."""
NAMED = 2
"""The number of layers or sites that are named for one reason."""


def _mmacs(macs: int) -> str:
    return f"{macs / 1e6:,.1f} M"


def inspection_table(record: Mapping[str, Any]) -> Table:
    table = Table("site", "width", "parameters", "MACs", "can't be reduced because")
    for row in record["sites"]:
        cells = f"{row['parameters']:,}", _mmacs(row["macs"]), reason_cell(row["reason"])
        table.add_row(row["site"], row["width"], *cells)
    for row in record["fixed"]:
        share = f"no site, {row['macs'] / (record['macs'] or 1):.0%} of the MACs"
        table.add_row(row["name"], "fixed", f"{row['parameters']:,}", _mmacs(row["macs"]), share)
    return table


def refusal_lines(record: Mapping[str, Any]) -> list[str]:
    sites: dict[str, list[str]] = {}
    for row in record["sites"]:
        sites.setdefault(row["reason"], []).append(row["site"])
    return long_reasons((f"can't be reduced: {_some(names)}", reason) for reason, names in sites.items())


def merging_lines(record: Mapping[str, Any]) -> list[str]:
    merging = record.get("merging")
    if merging is None:
        return []
    if merging["how"] == "mlp":
        counts = (
            f"{all_tokens - merged}" for all_tokens, merged in zip(merging["tokens"], merging["schedule"], strict=True)
        )
        return [*merging["sentences"], f"tokens in each MLP: {' '.join(counts)}"]
    return [*merging["sentences"], f"tokens behind each block: {' '.join(map(str, merging['tokens'][1:]))}"]


def _some(names: Sequence[str]) -> str:
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")


def _least(plan: "FirstPlan") -> str:
    return f"; --macs {plan.least:g} keeps to that" if plan.least < 1.0 else "; no budget keeps to that"


def _plan_lines(plan: "FirstPlan") -> list[str]:
    rest = [f"{name} {share:.0%} ({reason})" for name, share, reason in plan.stays if share >= SHOWN]
    sites = f"{plan.sites} site{'s'[: plan.sites != 1]}"
    have = f"plan: {sites} that a budget may cut have {plan.offered:.0%} of the MACs"
    stays = [f"plan: the rest can't be cut: {'; '.join(rest)}"] if rest else []
    if plan.cut is None:
        never = (
            f"plan: --macs {plan.macs:g} is out of reach: reduce takes {plan.most_cut:g} of each at most{_least(plan)}"
        )
        return [have, *stays, never]
    takes = f"plan: --macs {plan.macs:g} takes the same share, {plan.cut:.2f}, of each of them"
    more = "" if plan.holds else f", where reduce takes {plan.most_cut:g} at most{_least(plan)} (or --most-cut)"
    return [have, *stays, f"{takes}{more}"]


def inspection_shown(checkpoint: Checkpoint, record: Mapping[str, Any], plan: "FirstPlan") -> list[RenderableType]:
    """Return the table of sites and, below it, lines on refusals, outputs, tokens, size, preprocessing and the plan."""
    outputs = [f"{each['name']} {each['shape']} ({each['role']})" for each in record.get("outputs", ())]
    named = [f"outputs of one image: {', '.join(outputs)}"] if outputs else []
    stays = [
        f"stays: {each['count']} channels of {_some(each['layers'])}: {each['reason']}"
        for each in record.get("stays", ())
    ]
    macs = f"{record['macs'] / 1e9:.3f} GMAC"
    size = f"{record['architecture']}: {record['parameters']:,} parameters, {macs} for one image"
    about = (*refusal_lines(record), *named, *merging_lines(record), *stays)
    return [inspection_table(record), *about, size, preprocessing_line(checkpoint), *_plan_lines(plan)]
