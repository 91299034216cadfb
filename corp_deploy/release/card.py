"""The model card of a release: the reduction, the images, agreement, speed and limits."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.proof.report_input import ReductionRecord, effort_lines, read_reduction
from corp_deploy.reduction.report import SiteReport
from corp_deploy.spec.merging import MergingRecord
from corp_deploy.store.manifest import Efforts, input_of_graphs
from corp_deploy.store.model_config import ModelConfig, load_model_config
from ground.quantity import format_number
from ground.text import markdown_line
from perf.gate.verdicts import load_gate
from perf.parity.maps import MapMeasures
from perf.parity.parity import Parity, load_parity
from perf.record.runs import load_bench
from perf.report.render import markdown_from_table
from perf.report.tables import effort_table
from perf.stats.decision import confidence_text
from perf.stats.summary import summarise

from .names import GATE, PARITY, REPOSITORY, bench_name, gain_name, load_moments_summary
from .proven import proof_of_directory
from .recipe import Recipe


def _share(error: float, energy: float | None) -> str:
    return f"{100.0 * error / (energy or 1.0):.2g} %"


def _held_out(site: SiteReport) -> str:
    if site.held_out:
        return _share(site.held_out.error, site.held_out.energy)
    return _share(site.loop.error_held_out, site.loop.energy) + " (stream)" if site.loop else "-"


def _requested_shares(table: ReduceOptions, *, attention: bool) -> str:
    budgets = [
        f"{share:.0%} of the {name} may stay"
        for name, share in (("macs", table.macs), ("params", table.params))
        if share is not None
    ]
    of_rows = [(table.residual, "channels of residual streams"), (table.conv, "channels between convolutions")]
    of_rows = [part for part in of_rows if part[0] is not None]
    parts = [(table.mlp, "MLP channels")] * (not of_rows or table.mlp is not None)
    parts += [(table.whole_heads, "heads")] * (table.whole_heads is not None)
    parts += [(table.attn, "head dimensions")] * attention + of_rows
    shares = f"{' and '.join(f'{share or 0.0:.0%} of the {what}' for share, what in parts)} removed"
    tokens = [] if table.merge_tokens is None else [f"tokens merged away by block: `{table.merge_tokens}`"]
    removes = any((table.mlp, table.attn, table.conv, table.residual, table.whole_heads))
    widths = [budgets[0]] if budgets else [shares] if removes or not tokens else []
    return f"{', '.join([*widths, *tokens])}; preset `{table.preset}`{f', heads `{table.heads}`' * attention}"


def _removed(reduction: ReductionRecord, recipe: Recipe) -> Iterator[str]:
    polish, attention = recipe.reduce.polishing, any(site.part in ("qk", "v") for site in reduction.sites)
    trained = "no training" if polish == "none" else f"least squares after the closed form (polish `{polish}`)"
    yield f"Asked for: {_requested_shares(recipe.reduce, attention=attention)}. No labels, {trained}."
    if coverage := reduction.coverage:
        yield f"Done: {markdown_line(coverage.verdict)}."
        for refused, reason in coverage.refused.items():
            yield f"* {markdown_line(f'{refused} stays as it is: {reason}')}"
    yield ""
    if reduction.decided:
        yield markdown_line(" ".join(f"{each[:1].upper()}{each[1:]}." for each in reduction.decided))
        yield ""
    if reduction.ways:
        yield "| widths | of the dense cost | logit error predicted | on a few calibration images | median image |"
        yield "|---|---|---|---|---|"
        for way in reduction.ways:
            errors = f"{way.predicted_error:.4f} | {way.measured_error:.4f} | {way.median_error:.4f}"
            yield f"| {markdown_line(way.name)} | {way.share:.1%} | {errors} |"
        yield ""
    yield "| site | part | dense width | width | lost without repair | lost | lost, held out |"
    yield "|---|---|---|---|---|---|---|"
    for site in reduction.sites:
        energy = site.energy or 1.0
        lost = f"{site.error_uncompensated / energy:.2%} | {_share(site.error, energy)} | {_held_out(site)}"
        yield f"| {markdown_line(site.site)} | {site.part} | {site.width_dense} | {site.width} | {lost} |"


def _tokens(merging: MergingRecord) -> Iterator[str]:
    yield "## Tokens"
    yield ""
    yield markdown_line(" ".join(f"{words[:1].upper()}{words[1:]}." for words in merging.sentences()))
    yield ""
    yield f"| {merging.unit} | tokens that enter | {merging.verb} | tokens behind |"
    yield "|---|---|---|---|"
    for row in merging.rows:
        yield f"| {' | '.join(map(str, row))} |"
    yield ""


def _calibrated(root: Path, config: ModelConfig) -> Iterator[str]:
    moments = load_moments_summary(root)
    yield f"{moments.images} unlabelled images, digest `{config.lineage['images'][:16]}`; moments"
    yield f"`{moments.sha256[:16]}` ({moments.size_bytes / 1e6:.1f} MB, kept beside the release, not shipped)."
    for warning in moments.warnings:
        yield f"\nNote: {markdown_line(warning)}"
    yield ""
    prepared = ", ".join(f"{name} {value}" for name, value in config.input.preprocessing.items())
    yield f"Images are prepared with: {markdown_line(prepared)}."
    if graph_input := input_of_graphs(root).get("input"):
        inside = f"mean and std are inside, {markdown_line(graph_input['normalised'])}"
        yield f"Graphs and engines take {graph_input['dtype']} pixels of that size: {inside}."


def _agreement(parity: Parity) -> Iterator[str]:
    judging = "images" if parity.fitted is not None and parity.fitted.has_overlap else "held-out images"
    yield f"Judged on {judging}: {markdown_line(parity.line)}."
    yield ""
    agreed = "top-1 agreement" if parity.compared == "logits" else "agreement"
    yield f"| link | against | relative error | {agreed} | verdict |"
    yield "|---|---|---|---|---|"
    for link in parity.links:
        agreement = link.measures.agreement
        figures = f"{link.measures.relative_error:.2e} | {'' if agreement is None else f'{agreement:.2%}'}"
        yield f"| {markdown_line(link.name)} | {markdown_line(link.reference)} | {figures} | {link.status} |"
    yield from _maps(parity)
    if parity.accuracy:
        yield ""
        accuracies = ", ".join(f"{row.model} {row.accuracy:.2%}" for row in parity.accuracy)
        yield f"Accuracy: {markdown_line(accuracies)}."
    for name in dict.fromkeys(row.name for row in parity.metrics):
        rows = [row for row in parity.metrics if row.name == name]
        values = ", ".join(f"{row.model} {format_number(row.value, 6)}" for row in rows)
        yield ""
        made_by = f"{markdown_line(rows[0].command)} `{rows[0].sha256[:16]}`"
        yield f"{markdown_line(name)}: {markdown_line(values)}, by {made_by}."


def _maps(parity: Parity) -> Iterator[str]:
    maps = [(link, link.measures) for link in parity.links if isinstance(link.measures, MapMeasures)]
    if not maps:
        return
    yield ""
    yield f"Separate heads: {', '.join(f'{markdown_line(head.file)} `{head.sha256[:16]}`' for head in parity.heads)}."
    yield ""
    yield "| link | map error, worst image | IoU, worst image |"
    yield "|---|---|---|"
    for link, errors in maps:
        worst = f"{errors.relative_error_worst:.2e} | {errors.iou:.4f}, {errors.iou_worst:.4f}"
        yield f"| {markdown_line(link.name)} | {errors.relative_error:.2e}, {worst} |"


def speed_lines(path: Path) -> Iterator[str]:
    bench = load_bench(path)
    names = [subject.name for subject in bench.subjects]
    costs = []
    for each in bench.subjects:
        counts = {"parameters": each.params, "MACs": each.macs, "bytes": each.size_bytes}
        words = (f"{'unknown' if count is None else f'{count:,}'} {what}" for what, count in counts.items())
        costs.append(f"{each.name}: {', '.join(words)}")
    yield f"{markdown_line(', '.join(costs))}."
    yield ""
    one, other = map(markdown_line, names)
    rows = summarise(bench).rows
    energies = {row.batch: row.energy for row in rows if row.energy is not None}
    joules = f" {one} J/image | {other} J/image |" * bool(energies)
    yield f"| batch | {one} p50 (ms) | {other} p50 (ms) | speed-up (95 % interval) |{joules}"
    yield f"|---|---|---|---|{'---|---|' * bool(energies)}"
    for row in rows:
        sides = [row.sides[name].p50_ms for name in names]
        cells = " | ".join("-" if side is None else f"{side.value:.3f}" for side in sides)
        times = "-" if row.speedup is None else row.speedup.describe()
        spent = map(row.joules, names) if energies else ()
        joules = "".join(f" {'-' if value is None else value.describe('.3g')} |" for value in spent)
        yield f"| {row.batch} | {cells} | {times} |{joules}"
    for row in rows:
        if row.launches is not None:
            yield f"\nBatch {row.batch}, {row.launches.sentence}."
    for batch, energy in energies.items():
        yield f"\nEnergy at batch {batch}: {markdown_line(energy.line)}."
    for warning in bench.warnings:
        yield f"\nNote: {markdown_line(warning)}"


def _limits(recipe: Recipe, parity: Parity) -> Iterator[str]:
    yield f"* Agreement was measured on {parity.images.count} images; on images of another kind it may be lower."
    if parity.fitted is not None and parity.fitted.has_overlap:
        yield f"* Errors may be larger than told here: {markdown_line(parity.fitted.sentence)}."
    yield "* The widths and repairs follow the calibration images: calibrate again when the model meets others."
    yield "* Latencies hold for the machine named in `bench.json`. An engine runs on the GPUs in its record alone."
    limits = recipe.parity
    sure = f" {confidence_text(limits.confidence)}" if limits.shares else ""
    general = {
        "agreement at least": limits.min_agreement,
        "relative error at most": limits.max_error,
        "relative error of score maps at most": limits.max_map_error,
        "IoU of score maps at least": limits.min_iou,
        "pixels of score maps that agree at least": limits.min_pixels,
    }
    given = [f"{words} {number:g}" for words, number in general.items() if number is not None]
    given += map(markdown_line, limits.output_limit)
    yield f"* Limits of every output: {', '.join(given) or 'none; the rules of the gate judge'}{sure}."
    if parity.excluded:
        yield f"* Not judged, since the recipe excludes them: {', '.join(map(markdown_line, parity.excluded))}."


def _unproven(root: Path, recipe: Recipe) -> Iterator[str]:
    """Yield Markdown lines on the failed and undecided parity and gate records, and on the repository if any failed."""
    proof = proof_of_directory(root)
    if proof.failed:
        yield "This model failed its proof:"
        yield ""
        yield from (f"* {markdown_line(line)}" for line in proof.failed)
        yield ""
    if proof.failed and recipe.package.name is not None:
        packed = f"`{REPOSITORY}/` was written all the same (`package.allow_failed`)"
        yield f"{packed if recipe.package.allow_failed else f'`{REPOSITORY}/` was not written'}."
        yield ""
    if proof.undecided:
        yield "Not proven:"
        yield ""
        yield from (f"* {markdown_line(line)}" for line in proof.undecided)
        yield ""


def render_card(root: Path, recipe: Recipe, commands: Sequence[str], efforts: Efforts) -> str:
    """Return the text of a release's model card; `efforts` are the time and memory of its stages."""
    config = load_model_config(root / "reduced")
    parity = load_parity(root / PARITY)
    shape = "x".join(map(str, config.input.shape))
    version = recipe.release.version
    lines = [f"# {markdown_line(recipe.name)}{'' if version is None else f' {markdown_line(version)}'}", ""]
    named = f"`{markdown_line(recipe.model.shown)}` made smaller by corp-deploy; images {shape}."
    built = f"Architecture: {markdown_line(config.architecture_line)}."
    lines += [f"{named} {built} Gate: **{load_gate(root / GATE).verdict}**.", ""]
    lines += _unproven(root, recipe)
    reduction = read_reduction(config, root / "reduced")
    lines += ["## What was removed", "", *_removed(reduction, recipe), ""]
    lines += [] if reduction.merging is None else _tokens(reduction.merging)
    lines += ["## Calibrated on", "", *_calibrated(root, config), ""]
    lines += ["## Agreement with the dense model", "", *_agreement(parity), ""]
    for target in recipe.targets:
        lines += [
            f"## Speed on {target.name}, {target.precision}",
            "",
            *speed_lines(root / bench_name(recipe, target)),
            "",
        ]
        if target.rest is not None:
            against = f"{target.precision} against {target.rest}, both reduced:"
            lines += [against, "", *speed_lines(root / gain_name(target)), ""]
    lines += [*markdown_from_table(effort_table(effort_lines(efforts))), ""]
    lines += ["## Limits", "", *_limits(recipe, parity), ""]
    lines += ["## Made by", "", "In this directory, one after the other:", "", "```", *commands, "```", ""]
    return "\n".join(lines)
