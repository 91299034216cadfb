"""`report --history` and corp_deploy.report read the files of a history, and name those that are damaged."""

import json
from pathlib import Path

import pytest

import corp_deploy
from corp_deploy.proof.past_releases import read_past_releases
from perf.record.runs import save_bench
from perf.report.past_markdown import markdown_from_past
from perf.stats.releases import add_release
from tests.command import invoked, refuses
from tests.pasts import DRIVERS, GOLDEN, bench_of, only
from tests.refusals import rejects


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Return a history of six releases with proofs, recipes and manifests; 1.6 is slower and narrower."""
    history, made = tmp_path / "history", tmp_path / "made"
    made.mkdir()
    manifest = json.loads((GOLDEN / "manifest.json").read_text())
    for day in range(6):
        save_bench(bench_of(day, 2.5 if day < 5 else 2.8, driver=DRIVERS[day == 5]), made / "bench.json")
        (made / "parity.json").write_bytes((GOLDEN / "parity.json").read_bytes())
        mlp = 0.3 if day < 5 else 0.4
        (made / "recipe.toml").write_text(f'[release]\nname = "m"\nversion = "1.{day + 1}"\n[reduce]\nmlp = {mlp}\n')
        (made / "manifest.json").write_text(json.dumps({**manifest, "versions": {"timm": f"1.0.{day // 5}"}}))
        add_release(history, made / "bench.json")
    return history


def test_command_and_function_write_the_same_report(kept: Path, tmp_path: Path) -> None:
    done = invoked("report", "--history", kept, "-o", tmp_path / "h.md", "--json")
    assert json.loads(done.stdout) == {"report": str(tmp_path / "h.md")}
    text = (tmp_path / "h.md").read_text()
    assert text.startswith("# history: releases over time\n\n**Regression.** Newest of 6 releases: 1.6, 2026-03-06; ")
    assert "recipe reduce.mlp: 0.3 → 0.4 · driver: 550.54 → 560.35" in text
    assert "timm: 1.0.0 → 1.0.1" in text
    invoked("report", "--history", kept, "-o", tmp_path / "h.html", "--title", "Ours")
    assert "<title>Ours</title>" in (tmp_path / "h.html").read_text()
    written = corp_deploy.report(history=kept, output=tmp_path / "again.md")
    assert written.read_text() == text


def test_folders_of_releases_are_reported_under_their_names(kept: Path, tmp_path: Path) -> None:
    releases = tmp_path / "releases"
    for name, path in zip("abcdef", sorted(kept.glob("*[0-9a-f].json")), strict=True):
        (releases / name).mkdir(parents=True)
        (releases / name / "bench.json").write_bytes(path.read_bytes())
    assert [release.label for release in only(read_past_releases(releases)).releases] == [*"abcdef"]


def test_damaged_files_are_named_and_stop_nothing(kept: Path, tmp_path: Path) -> None:
    first, second, *_, last = sorted(kept.glob("*[0-9a-f].json"))
    first.write_text("{")
    second.with_name(f"{second.stem}.parity.json").write_text('{"kind": "parity", "ver')
    last.with_name(f"{last.stem}.recipe.toml").write_text("[reduce")
    last.with_name(f"{last.stem}.manifest.json").unlink()
    found = read_past_releases(kept)
    assert [each.name for each in found.left_out] == [first.name]
    ((places, names, why),) = only(found).gaps[:1]
    assert (places, names) == ((0,), "top-1 agreement")
    assert "not JSON" in why
    assert str(tmp_path) not in markdown_from_past(found, "t")
    missing = only(found).releases[-1].missing
    assert "no TOML" in missing["recipe.toml"]
    assert missing["manifest.json"] == "no manifest.json is kept with its record"
    assert only(found).releases[-1].label == last.stem


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{kept}", "--history", "{kept}", "-o", "{out}/h.md"], "(--history): got both"),
        (["-o", "{out}/h.md"], "(--history): got neither"),
        (["--history", "{kept}", "-o", "{out}/h.xml"], "expected one of .html, .md with --history"),
        (["{kept}", "-o", "{out}/h.pdf"], "expected one of .html, .md, .csv, .xml"),
        (["--history", "{kept}", "-o", "{kept}/h.md"], "write the report elsewhere"),
        (["--history", "{out}/none", "-o", "{out}/h.md"], "no such directory"),
        (["--history", "{out}", "-o", "{out}/below/h.md"], "no bench record of a release"),
    ],
)
def test_calls_without_effect_are_refused(words: list[str], message: str, tmp_path: Path) -> None:
    kept, out = tmp_path / "kept", tmp_path / "out"
    kept.mkdir()
    out.mkdir()
    refuses(message, "report", *(word.format(kept=kept, out=out) for word in words))
    assert not list(kept.iterdir())


def test_files_for_trackers_are_no_history(tmp_path: Path) -> None:
    save_bench(bench_of(0, 2.5), tmp_path / "bench.json")
    invoked(
        "gate",
        tmp_path / "bench.json",
        "--fail-if",
        "speedup@b1 < 0.1",
        "--track",
        tmp_path / "t",
        "-o",
        tmp_path / "g.json",
    )
    refuses("left out: bencher.json (", "report", "--history", tmp_path / "t", "-o", tmp_path / "h.md")


def test_messages_in_python_name_parameters(tmp_path: Path) -> None:
    rejects("`history`", corp_deploy.report, output=tmp_path / "h.md")
    rejects("`output`", corp_deploy.report, history=tmp_path, output=tmp_path / "h.pdf")
