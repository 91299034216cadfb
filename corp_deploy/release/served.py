"""What is served of a quantised target: its artefact where that was measured to be faster, else its rival."""

from pathlib import Path

from perf.record.runs import Bench, load_bench
from perf.stats.summary import summarise


def to_serve(directory: Path, target: str, quantised: Path) -> tuple[Path, str | None]:
    """What to serve in place of `quantised`, and why where that is another. What has no measurement of its gain beside
    it is no quantised artefact of a release, and stays.
    """
    path = directory / f"gain.{target}.json"
    if not path.is_file():
        return quantised, None
    bench = load_bench(path)
    if is_faster(bench):
        return quantised, None
    rival = _rival(directory, target, bench)
    return rival, (
        f"{quantised.name} is left out: {path.name} doesn't show it to be faster than {rival.name} at every batch, "
        "which is served in its place"
    )


def is_faster(bench: Bench) -> bool:
    """Whether the candidate's speed-up lies above 1 with its whole interval at every batch size."""
    gains = [row.speedup for row in summarise(bench).rows]
    return bool(gains) and all(gain is not None and gain.low > 1.0 for gain in gains)


def quantised_graph(directory: Path, target: str) -> Path | None:
    """The graph that an ONNX Runtime target of a release runs, where it is a quantised one."""
    path = directory / f"gain.{target}.json"
    if not path.is_file():
        return None
    return directory / "reduced" / str(load_bench(path).subjects[1].describe["model"])


def _rival(directory: Path, target: str, bench: Bench) -> Path:
    plans = sorted((directory / "rivals").glob(f"model.{target}.*.plan"))
    return plans[0] if plans else directory / "reduced" / str(bench.subjects[0].describe["model"])
