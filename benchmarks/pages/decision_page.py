"""Sentences on what a release is decided by: sweeps that measure, latency over releases."""

from typing import Any


def history(record: dict[str, Any]) -> str:
    """False alarms of simulated histories, and how soon a rise is found."""
    paired, alone = record["ratio_to_the_reference"], record["median_time_alone"]
    return (
        f"Latency over releases (`python -m benchmarks.trust.history`, noise of recorded benches, seed "
        f"{record['seed']}; the level of the test was chosen on other histories): {paired['histories']:,} histories "
        f"of {record['releases']} releases were simulated without a change, and as many with a rise of "
        f"{record['rise']:.0%}. If all releases are measured against the same reference (noise "
        f"{100 * paired['noise_sd']:.2f} %), `gate --history` raises a false alarm in {paired['false_alarms']} and "
        f"finds the rise within 2 releases in {paired['found_within_2_releases']:,}. By the median time alone (noise "
        f"{100 * alone['noise_sd']:.2f} %) it finds {alone['found_within_2_releases']:,}, with {alone['false_alarms']} "
        "false alarms."
    )
