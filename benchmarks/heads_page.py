"""What the README says of heads, from the records of benchmarks/rotation.py and whole_heads.py."""

from collections.abc import Mapping
from typing import Any


def rotation(record: Mapping[str, Any]) -> str:
    """What the rotation of reduced heads changes."""
    pairs: dict[tuple[str, int], dict[bool, Mapping[str, Any]]] = {}
    for row in record["rows"]:
        pairs.setdefault((row["model"], row["width"]), {})[row["rotates"]] = row
    said = [
        f"{model}, heads of {width}: logits {plain['int8_logits']:.2%} to {turned['int8_logits']:.2%}, outputs "
        f"{plain['int8_qk']:.2%} to {turned['int8_qk']:.2%} by queries and keys, {plain['int8_v']:.2%} to "
        f"{turned['int8_v']:.2%} by values and what enters the projection; FP16 {plain['fp16']:.2%} to "
        f"{turned['fp16']:.2%}"
        for (model, width), by_way in pairs.items()
        for plain, turned in [(by_way[False], by_way[True])]
    ]
    worst = max(row["fp32"] for row in record["rows"])
    return (
        f"Reduced heads in a rotated basis (`--rotate`), against the same in FP32, which moves by {worst:.0e} at most, "
        f"in simulated INT8 of one scale a tensor, without and with the rotation: {'; '.join(said)}."
    )
