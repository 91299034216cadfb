"""How often does a history cry wolf, and how soon does it see a regression?

Histories of thirty releases, looked at after each of them. Noise between releases is drawn from what repeated benches
of one model showed (benchmarks/results/gate_noise*.json): of the ratio to the reference, which is judged where all
releases have the same reference, and of the median time alone. One half of the histories has no change; in the other
the time rises by 3 % at a release between the tenth and the twenty-eighth and stays. It is found when a rise is placed
within 2 releases of the true one, at the latest 2 releases after it.

    python benchmarks/trust/history.py --output benchmarks/results/history.json
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perf.stats.changes import ALPHA, LOOKS, ChangePoint, change_points, critical_score

RESULTS = Path(__file__).parents[1] / "results"
SOURCES = ("gate_noise.json", "gate_noise_one_process.json")
RISE, WITHIN = 0.03, 2
FIRST, LAST = 9, 27  # the release that regresses, counted from 0
Floats = NDArray[np.float64]


def recorded_noise(name: str) -> Floats:
    """Logarithms of one figure of repeated benches, each series about its own mean."""
    series = []
    for source in SOURCES:
        repetitions = json.loads((RESULTS / source).read_text(encoding="utf-8"))["repetitions"]
        for same in repetitions.values():
            logs = np.log([one[name] for one in same])
            series.append(logs - logs.mean())
    return np.concatenate(series)


def is_found(points: tuple[ChangePoint, ...], at: int) -> bool:
    """Whether a rise is placed near the true release, soon enough."""
    return any(p.is_rise and abs(p.first - at) <= WITHIN and at <= p.found <= at + WITHIN for p in points)


def simulated(noise: Floats, histories: int, seed: int) -> dict[str, Any]:
    """Both halves with noise drawn from `noise`."""
    rng, critical = np.random.default_rng(seed), critical_score()
    alarms, found, ever, delays = 0, 0, 0, []
    for _ in range(histories):
        alarms += bool(change_points(np.exp(rng.choice(noise, LOOKS)), critical))
        at = int(rng.integers(FIRST, LAST + 1))
        rises = np.where(np.arange(LOOKS) >= at, np.log1p(RISE), 0.0)
        points = change_points(np.exp(rng.choice(noise, LOOKS) + rises), critical)
        found += is_found(points, at)
        near = [point for point in points if point.is_rise and abs(point.first - at) <= WITHIN]
        ever += bool(near)
        delays += [near[0].found - at] if near else []
    return {
        "noise_sd": round(float(noise.std()), 5),
        "histories": histories,
        "false_alarms": alarms,
        "found_within_2_releases": found,
        "found_by_release_30": ever,
        "median_delay_releases": float(np.median(delays)) if delays else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--histories", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=2026, help="ALPHA was chosen on others: 1 and 2")
    arguments = parser.parse_args()
    document = {
        "kind": "history-simulation",
        "version": 1,
        "releases": LOOKS,
        "rise": RISE,
        "sources": list(SOURCES),
        "alpha": ALPHA,
        "seed": arguments.seed,
        "critical_score": round(critical_score(), 4),
        "ratio_to_the_reference": simulated(recorded_noise("speedup"), arguments.histories, arguments.seed),
        "median_time_alone": simulated(recorded_noise("reference_p50_ms"), arguments.histories, arguments.seed + 1),
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
