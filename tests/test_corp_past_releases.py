"""`report --history`: figures, lines, changes and differences of releases, in HTML and Markdown."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from perf.parity.parity import Parity, load_parity
from perf.record.runs import Bench
from perf.report.content import VerdictLine
from perf.report.past_figures import PastRelease
from perf.report.past_markdown import markdown_from_past
from perf.report.past_page import html_from_past
from perf.report.past_releases import PastReleases, build_past_releases
from perf.report.past_texts import move_text, verdict_of_newest
from perf.stats.releases import History, Release
from tests.pasts import DRIVERS, GOLDEN, bench_of, only
from tests.powered import energy_of


def past(*benches: Bench, **more: dict[int, Any]) -> PastReleases:
    """Compare releases; `more` has further fields of the releases by their place."""
    releases = {f"{bench.created}-x": place for place, bench in enumerate(benches)}

    def read(release: Release) -> PastRelease:
        place = releases[release.name]
        own = {name: of_place[place] for name, of_place in more.items() if place in of_place}
        return PastRelease(release=release, label=f"v{place + 1}", **own)

    history = History(releases=tuple(Release(name=name, bench=benches[place]) for name, place in releases.items()))
    return build_past_releases(history, read, where="here")


def verdict(found: PastReleases) -> VerdictLine:
    return verdict_of_newest(found, only(found))


def risen(*, at: int = 8, count: int = 10) -> PastReleases:
    """Compare releases that are 4 % slower since a new driver and another width."""
    days = [bench_of(day, 2.5 if day < at else 2.6, driver=DRIVERS[day >= at]) for day in range(count)]
    recipes = {day: {"reduce.mlp": "0.5" if day < at else "0.4", "reduce.attn": "0.5"} for day in range(count)}
    return past(*days, recipe=recipes)


def test_rise_names_the_driver_and_the_recipe_key_that_differ() -> None:
    found = risen()
    (change,) = only(found).changes
    assert (change.before, change.first) == (7, 8)
    assert {key: (before, after) for key, before, after in change.differences} == {
        "recipe reduce.mlp": ("0.5", "0.4"),
        "driver": DRIVERS,
        "reduced.sha256": (f"{7:064x}", f"{8:064x}"),
    }
    moved = {move.name: move for move in change.moves}
    assert moved.keys() == {f"{name} at batch 1" for name in ("reduced p50", "speed-up", "reduced throughput")}
    assert all(move.is_worse for move in moved.values())
    p50, faster = moved["reduced p50 at batch 1"].ratio, moved["speed-up at batch 1"].ratio
    assert p50.value == pytest.approx(1.04, abs=0.005)
    assert p50.low < p50.value < p50.high
    assert faster.value == pytest.approx(1 / 1.04, abs=0.005)
    stated = verdict(found)
    assert (stated.headline, stated.verdict) == ("Regression", "FAIL")
    assert stated.why.startswith("Newest of 10 releases: v10, 2026-03-10; worse: reduced p50 at batch 1 +3.8 % (+3.6")
    assert "since release 9 (v9)" in stated.why


def test_fall_is_better_and_an_old_rise_is_accepted() -> None:
    fallen = past(*(bench_of(day, 2.5 if day < 8 else 2.4) for day in range(10)))
    assert not any(move.is_worse for change in only(fallen).changes for move in change.moves)
    assert verdict(fallen).headline == "No regression"
    assert "better: reduced p50 at batch 1 −" in verdict(fallen).why
    assert "agreement" not in verdict(fallen).why, "no release has a proof"
    assert "agreement of all releases: no parity record is kept" in markdown_from_past(fallen, "t")
    old = risen(at=6, count=14)
    assert only(old).changes
    assert "no figure changed at the newest 5 releases" in verdict(old).why


def test_changes_of_several_batch_sizes_share_a_line() -> None:
    found = past(*(bench_of(day, 2.5 if day < 8 else 2.6, batches=(1, 8)) for day in range(12)))
    assert re.search(
        r"reduced p50 at batch 1 \+3\.\d %, 8 \+\d\.\d % · speed-up at batch 1 −", markdown_from_past(found, "t")
    )


@pytest.mark.parametrize("recorded", [True, False])
def test_library_that_both_models_use_is_named_once(recorded: bool) -> None:
    days = []
    for day, version in enumerate(("1.20", "1.21")):
        bench = bench_of(day, 2.5, size=1000 * (day + 1))
        dense, reduced = (replace(each, describe={**each.describe, "version": version}) for each in bench.subjects)
        environment = {**bench.environment} | ({"onnxruntime": version} if recorded else {})
        days.append(replace(bench, environment=environment, subjects=(dense, reduced)))
    (change,) = only(past(*days)).changes
    key = "onnxruntime" if recorded else "version"
    assert [name for name, *_ in change.differences if "sha256" not in name] == [key]


def test_machine_that_slows_both_models_changes_no_speed_up() -> None:
    slowed = past(*(bench_of(day, 2.5, machine=1.1 if day >= 8 else 1.0) for day in range(12)))
    assert {move.name for change in only(slowed).changes for move in change.moves} == {
        f"{name} at batch 1" for name in ("dense p50", "reduced p50", "reduced throughput")
    }
    unlike = past(*(bench_of(day, 2.5 if day < 8 else 2.6, sha256=None) for day in range(12)))
    assert "speed-up at batch 1" not in {move.name for change in only(unlike).changes for move in change.moves}
    assert any("changes of the speed-up are not looked for" in note for note in only(unlike).notes)


def proofs(shares: Sequence[float | None], digests: str = "") -> dict[int, Parity]:
    """Return proofs with these agreements by release, None for none; of inputs with these digests."""
    golden, made = load_parity(GOLDEN / "parity.json"), {}
    for place, share in enumerate(shares):
        if share is None:
            continue
        bounds: dict[str, Any] = {
            "top1_agreement": share,
            "top1_agreement_low": share - 0.01,
            "top1_agreement_high": share + 0.005,
        }
        links = tuple(replace(link, measures=replace(link.measures, **bounds)) for link in golden.links)
        images = replace(golden.images, digest=digests[place]) if digests else golden.images
        made[place] = replace(golden, links=links, images=images)
    return made


def test_every_step_of_size_and_of_agreement_on_the_same_inputs_is_a_change() -> None:
    sizes, shares = (1000, 1004, 800), [0.99, 0.985, 0.97]
    found = past(*(bench_of(day, 2.5, size=size) for day, size in enumerate(sizes)), parity=proofs(shares, "aaa"))
    moves = {(change.first, move.name): move for change in only(found).changes for move in change.moves}
    assert moves.keys() == {(1, "top-1 agreement"), (2, "size"), (2, "top-1 agreement")}
    assert not moves[2, "size"].is_worse
    assert moves[2, "top-1 agreement"].is_worse
    assert "top-1 agreement −1.5 points (−2.6 to −0.4)" in markdown_from_past(found, "t")
    assert "size −20.3 % ·" in markdown_from_past(found, "t")
    other = past(*(bench_of(day, 2.5) for day in range(3)), parity=proofs(shares, "abb"))
    assert [change.first for change in only(other).changes] == [2]
    assert ((0,), "top-1 agreement", "judged on other images than the newest proof") in only(other).gaps


def test_missing_figures_are_gaps_with_their_reasons() -> None:
    days = [bench_of(day, 2.5, size=None if day == 2 else 1000, lost=0.5 if day == 4 else 0.0) for day in range(7)]
    found = past(*days, parity=proofs([0.99, 0.99, None, 0.99, 0.99, 0.99, 0.99]))
    reasons = {names: (places, why) for places, names, why in only(found).gaps}
    assert reasons["size"] == ((2,), "the bench record has none")
    assert reasons["top-1 agreement"] == ((2,), "no parity record is kept")
    places, why = reasons["figures at batch 1"]
    assert places == (4,)
    assert "other programs had the CPU" in why
    assert "3 gaps: size of release 3 (v3): the bench record has none; top-1" in markdown_from_past(found, "t")
    page = html_from_past(found, "t")
    assert page.count(">×</text>") == 4 + 1 + 1
    p50 = page[page.index('aria-label="Reduced p50 at batch 1"') :]
    assert p50[: p50.index("</svg>")].count("<polyline") == 2, "the line is interrupted"
    newest = past(*days[:5])
    assert verdict(newest).headline == "Not judged"
    assert "; no figures at batch 1." in verdict(newest).why


def test_batch_sizes_that_only_older_releases_have_are_named() -> None:
    found = past(*(bench_of(day, 2.5, batches=(1, 4) if day == 0 else (1,)) for day in range(6)))
    assert only(found).notes == ("Not shown, as the newest release was not measured there: batch 4.",)


def test_models_machines_and_precisions_are_lines_of_their_own() -> None:
    cpus = ("one", "two", "one", "two", "one", "one", "one")
    half = {"backend": "onnxruntime", "device": "cpu", "precision": "fp16"}
    days = [bench_of(day, 2.5, cpu=cpu) for day, cpu in enumerate(cpus)]
    dense, reduced = (replace(each, describe=half) for each in days[5].subjects)
    days[5] = replace(days[5], subjects=(dense, reduced))
    found = past(*days, model={4: "deit", 6: "vit"})
    assert {line.name: [release.label for release in line.releases] for line in found.lines} == {
        "vit, one, onnxruntime cpu": ["v1", "v3", "v7"],
        "one, onnxruntime cpu fp16": ["v6"],
        "deit, one, onnxruntime cpu": ["v5"],
        "two, onnxruntime cpu": ["v2", "v4"],
    }
    text, page = markdown_from_past(found, "t"), html_from_past(found, "t")
    assert text.count("**Not judged.** ") == 4
    assert "**Not judged.** two, onnxruntime cpu. Newest of 2 releases: v4, 2026-03-04; times are" in text
    assert "## Releases: two, onnxruntime cpu\n" in text
    assert page.count('<div class="verdict ') == 4
    assert "<h2>Changes: two, onnxruntime cpu</h2>" in page
    anchors = re.findall(r'id="([^"]*)"', page)
    assert len(anchors) == len(set(anchors))


def test_dense_multiply_adds_tell_models_without_a_name_apart() -> None:
    days = [bench_of(day, 2.5) for day in range(4)]
    days[1:3] = [replace(each, subjects=(replace(each.reference, macs=7), each.candidate)) for each in days[1:3]]
    found = past(*days)
    assert [line.name for line in found.lines] == [
        "one, onnxruntime cpu",
        "one, onnxruntime cpu, dense multiply-adds 7",
    ]
    assert [[release.label for release in line.releases] for line in found.lines] == [["v1", "v4"], ["v2", "v3"]]
    assert len(past(*days, model=dict.fromkeys(range(4), "m")).lines) == 1


def test_energy_is_a_figure_where_a_release_has_it() -> None:
    days = [bench_of(day, 2.5) for day in range(12)]
    assert "energy" not in html_from_past(past(*days), "t").replace("throughput and energy: ", "")
    for day in range(1, 12):
        spent = (1.5 if day < 7 else 1.6) * (1 + 0.001 * (day % 3))
        run = energy_of({"dense": 2.0, "dense again": 2.0, "reduced": spent}, spread=0.002)
        days[day] = replace(days[day], rows=tuple(replace(row, energy=run) for row in days[day].rows))
    found = past(*days)
    (change,) = only(found).changes
    assert [move_text(move)[:32] for move in change.moves] == ["reduced energy at batch 1 +6.7 %"]
    assert change.first == 7
    assert change.moves[0].is_worse
    assert ((0,), "reduced energy at batch 1", "the record is older than its measurement") in only(found).gaps
    assert "reduced energy, J/image" in markdown_from_past(found, "t")


def test_single_release_is_shown_and_not_judged() -> None:
    found = past(bench_of(0, 2.5))
    stated = verdict(found)
    assert (stated.headline, stated.verdict) == ("Not judged", "UNJUDGED")
    assert stated.why.startswith("The only release: v1, 2026-03-01; times are judged from 5 releases on")
    assert "No figure changed." in html_from_past(found, "t")


def test_markdown_is_short_with_the_verdict_first() -> None:
    lines = markdown_from_past(risen(count=13), "t").splitlines()
    assert lines[2].startswith("**Regression.** Newest of 13 releases: v13")
    assert "## Newest 10 of 13 releases" in lines
    rows = [line for line in lines if re.match(r"\| \d+ \|", line)]
    assert [line.split(" | ")[0] for line in rows] == [f"| {place}" for place in range(13, 3, -1)]
    changes = next(line for line in lines if line.startswith("| release 9 (v9) |"))
    assert "recipe reduce.mlp: 0.5 → 0.4 · driver: 550.54 → 560.35" in changes
    assert len(lines) < 40


def test_page_is_self_contained_and_escapes_names() -> None:
    recipes = {day: {"model.model": "<script>alert(1)</script>" if day else "|a"} for day in range(2)}
    days = [bench_of(day, 2.5, size=1000 + 500 * day) for day in range(2)]
    found = past(*days, recipe=recipes)
    page, text = html_from_past(found, "<b>t</b>"), markdown_from_past(found, "t")
    assert "<script" not in page
    assert "<script" not in text.replace("\\<script", "")
    assert "\\|a" in text
    assert not re.search(r"(?:src|href)=|@import|url\(", page)
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    assert page.count("<summary>Figures of every release</summary>") == page.count("</details>") == 2
    assert page.count('role="img"') == page.count("aria-label=") == 5
