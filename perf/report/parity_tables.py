"""Tables of a report from its parity record."""

import math
from dataclasses import asdict

from ground.quantity import format_number
from perf.parity.labels import ClassAccuracy
from perf.parity.link import Link
from perf.parity.maps import MapMeasures
from perf.parity.parity import Parity
from perf.stats.stats import Interval

from .numbers import MINUS, NOTHING, ReportTable, error_text, percent_text

MOST_CLASSES = 20
"""The most classes in a report's table; the others have a line together."""


def links_table(parity: Parity) -> ReportTable:
    images = parity.images
    agreement = "Top-1 agreement" if parity.compared == "logits" else "Agreement"
    inputs_text = "random inputs, as asked" if images.kind == "random" else f"real {images.kind}"
    where = f"Errors of the {parity.compared} on {images.count:,} {inputs_text}, at the worst batch size."
    return ReportTable(
        key="parity",
        title="Parity chain",
        columns=("Link", "Status", "Relative error", "Max abs", agreement, "Decisive flips", "Top-5", "Cosine, least",
                 "KL, mean"),
        rows=tuple(_link_cells(link) for link in parity.links),
        note=f"{where} A flip is decisive on an image whose margin exceeds the noise.",
    )  # fmt: skip


def _link_cells(link: Link) -> tuple[str, ...]:
    m, bound = link.measures, link.tolerance.max_relative_error
    span, by_role = m.agreement_bounds, asdict(m)
    decisive = by_role.get("decisive_images", by_role.get("decisive_tokens"))
    return (
        f"{link.name}\n{link.reference} → {link.candidate}",
        link.status,
        f"{error_text(m.relative_error)}\n{'no limit' if bound is None else f'{error_text(bound)} allowed'}",
        error_text(m.max_abs),
        percent_text(m.agreement)
        + ("" if span is None else f"\n{percent_text(span[0], 1)} to {percent_text(span[1], 1)}"),
        NOTHING if decisive is None else f"{m.decisive_flips}\nof {decisive:,}",
        percent_text(by_role.get("top5_overlap")),
        f"{m.cosine_min:.4f}",
        error_text(by_role.get("kl_mean")),
    )


def maps_table(parity: Parity) -> ReportTable:
    rows = [(link, link.measures) for link in parity.links]
    heads = ", ".join(f"{head.file} reads {', '.join(head.reads)}" for head in parity.heads)
    return ReportTable(
        key="maps",
        title="Maps of heads",
        columns=("Link", "Status", "Relative error", "Mean of images", "Worst image", "IoU", "IoU, worst image",
                 "Pixels that agree"),
        rows=tuple(
            (
                link.name,
                link.status,
                error_text(m.relative_error),
                error_text(m.relative_error_mean),
                error_text(m.relative_error_worst),
                f"{m.iou:.4f}",
                f"{m.iou_worst:.4f}",
                percent_text(m.pixel_agreement),
            )
            for link, m in rows
            if isinstance(m, MapMeasures)
        ),
        note=f"{heads}. IoU is of what each side's map shows, all images together." if heads else "",
    )  # fmt: skip


def located_table(parity: Parity) -> ReportTable:
    rows = tuple(
        (line.site or "no single site", line.link, line.reason, line.command or NOTHING) for line in parity.located
    )
    return ReportTable(key="located", title="Where links fail", columns=("Site", "Link", "Finding", "Fix"), rows=rows)


def structure_table(parity: Parity) -> ReportTable:
    not_passed = tuple((f"{t.test}\n{t.candidate}", t.status, t.reason) for t in parity.structure if t.status != "PASS")
    passed: dict[str, list[str]] = {}
    for test in parity.structure:
        if test.status == "PASS":
            passed.setdefault(test.candidate, []).append(test.test)
    sound = tuple((candidate, "PASS", ", ".join(dict.fromkeys(names))) for candidate, names in passed.items())
    return ReportTable(
        key="structure", title="Structural tests", columns=("Test", "Status", "Finding"), rows=not_passed + sound
    )


def accuracy_table(parity: Parity) -> ReportTable:
    rows = [
        (
            a.model,
            f"{percent_text(a.accuracy)}\n{percent_text(a.low, 1)} to {percent_text(a.high, 1)}",
            f"{a.correct:,} of {a.images:,}",
        )
        for a in parity.accuracy
    ]
    rows += [
        (
            f"{c.b}\nminus {c.a}",
            _points_cell(c.change(parity.accuracy[0].images)),
            f"{c.only_b} against {c.only_a} right alone\np = {c.p_value:.2g}",
        )
        for c in parity.comparisons
    ]
    return ReportTable(
        key="accuracy",
        title="Accuracy on labels",
        columns=("Model", "Accuracy", "Images"),
        rows=tuple(rows),
        note="95 % intervals: Wilson's of an accuracy, and Tango's paired one of a difference in points on the same "
        "images; p is that of McNemar's exact test.",
    )


def classes_table(parity: Parity) -> ReportTable:
    every = sorted(parity.classes, key=lambda each: (each.change.value, each.index))
    worst, rest = (every, []) if len(every) <= MOST_CLASSES + 1 else (every[:MOST_CLASSES], every[MOST_CLASSES:])
    rows = [
        _class_cells(f"class {each.index}" if each.name is None else f"{each.name}\nclass {each.index}", each)
        for each in worst
    ]
    if rest:
        counts = {name: sum(getattr(each, name) for each in rest) for name in ("images", "correct", "lost", "gained")}
        rows.append(_class_cells(f"the other {len(rest):,} classes", ClassAccuracy(index=-1, **counts)))
    pair = f"{parity.comparisons[-1].b} after {parity.comparisons[-1].a}. " if parity.comparisons else ""
    lower = sum(each.change.high < 0 for each in every)
    return ReportTable(
        key="classes",
        title="Accuracy by class",
        columns=("Class", "Dense → shipped", "Change, points"),
        rows=tuple(rows),
        note=f"{pair}Sorted by the loss. Paired 95 % intervals, each for one class: {lower:,} of {len(every):,} lie "
        f"wholly below 0, and up to about {math.ceil(0.025 * len(every)):,} do by chance.",
    )


def _class_cells(name: str, counts: ClassAccuracy) -> tuple[str, ...]:
    dense, shipped = (percent_text(each, 1) for each in (counts.accuracy_dense, counts.accuracy))
    return name, f"{dense} → {shipped}\nof {counts.images:,} images", _points_cell(counts.change)


def _points_cell(change: Interval) -> str:
    value, low, high = (f"{100 * end:+.1f}".replace("-", MINUS) for end in (change.value, change.low, change.high))
    return f"{value}\n{low} to {high}"


def own_metrics_table(parity: Parity) -> ReportTable:
    return ReportTable(
        key="metrics",
        title="Measures of your own",
        columns=("Measure", "Model", "Value", "Command"),
        rows=tuple(
            (row.name, row.model, format_number(row.value, 6), f"{row.command}\n{row.sha256[:16]}")
            for row in parity.metrics
        ),
        note="Computed by the command from each artefact's outputs; the digest covers the command, its files and the "
        "labels.",
    )


def shift_table(parity: Parity) -> ReportTable:
    shift = parity.shift
    return ReportTable(
        key="shift",
        title="Inputs compared with calibration",
        columns=("Site", "Status", "Mean distance", "by chance", "Covariance distance", "by chance"),
        rows=tuple(
            (
                s.site,
                s.status,
                *map(error_text, (s.mean_distance, s.mean_noise, s.covariance_distance, s.covariance_noise)),
            )
            for s in (shift.sites if shift else ())
        ),
        note=shift.reason if shift else "",
    )


PARITY_TABLES = (
    links_table,
    maps_table,
    located_table,
    structure_table,
    accuracy_table,
    classes_table,
    own_metrics_table,
    shift_table,
)
