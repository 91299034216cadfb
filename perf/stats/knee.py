"""The knee of a throughput curve: the batch size past which a larger one buys little."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

WORTH_REL = 0.10  # a doubled batch, and so about a doubled latency, must bring this much more throughput


@dataclass(frozen=True, slots=True, kw_only=True)
class Knee:
    """The suggested batch size and, in one sentence, why."""

    batch: int
    reason: str


def knee(throughput: Mapping[int, float], worth_rel: float = WORTH_REL) -> Knee | None:
    """The smallest batch from which no larger one gains `worth_rel` per doubling; None below two batch sizes.

    Args:
        throughput: images per second by batch size.
    """
    if len(throughput) < 2:
        return None
    batches = sorted(throughput)
    for index, batch in enumerate(batches):
        if not any(_worth(throughput, batch, larger, worth_rel) for larger in batches[index + 1 :]):
            break
    rate = throughput[batch]
    if batch == batches[-1]:
        return Knee(batch=batch, reason=f"throughput still rises at the largest batch measured, {rate:.0f} images/s")
    best = max(throughput[larger] for larger in batches[index + 1 :])
    reason = f"{rate:.0f} images/s; no larger batch gains {100 * worth_rel:g} % per doubling (the best has {best:.0f})"
    return Knee(batch=batch, reason=reason)


def _worth(throughput: Mapping[int, float], batch: int, larger: int, worth_rel: float) -> bool:
    doublings = math.log2(larger / batch)
    return bool(throughput[larger] > throughput[batch] * (1 + worth_rel) ** doublings)
