"""Sentences on what a release is decided by: sweeps that measure, latency over releases."""

from typing import Any


def sweep_trials(record: dict[str, Any]) -> str:
    """How long a sweep that measures takes."""
    trials = record["trials"]
    disturbed = sum(trial["disturbed"] for trial in trials)
    said = f"; {disturbed} of them while other programs had the machine" if disturbed else ""
    return (
        f"A sweep of {len(trials)} trials of the digits example, each timed beside the dense model in ONNX Runtime at "
        f"batches 1 and 16 on {record['cpus']} CPUs (`python -m benchmarks.quality.sweep_trials`): "
        f"{record['seconds']:.0f} s{said}; the same command again, all finished: {record['seconds_again']:.0f} s."
    )
