"""How near float16 values come to the end of float16, whether or not they reached it on these images."""

from __future__ import annotations

from pathlib import Path

import onnx

from ground.errors import BadInput
from ground.feeds import Feeds

from .block_outputs import by_site, half_values, largest_activations
from .locate import HALF_LIMIT
from .structure import StructuralTest


def headroom(candidate: str, single: Path, half: Path, feeds: Feeds) -> StructuralTest:
    """The largest value, computed in float32 by the graph in `single`, among those that the one in `half` holds in
    float16; named by site.

    Both are exports of one model, so that their values have the same names; else BadInput is raised. FAIL over 65,504.
    One graph is in memory at a time.
    """
    held = half_values(onnx.load(str(half)))
    graph = onnx.load(str(single))
    activations = largest_activations(graph, feeds)
    if 2 * len(held & activations.keys()) < len(held):
        raise BadInput(
            f"{candidate}: its values are not named as those of the float32 graph; export both from one model"
        )
    largest = {name: value for name, value in activations.items() if name in held}
    sites = by_site(graph, largest)
    site, value = max(sites.items(), key=lambda item: item[1], default=("no site", 0.0))
    reason = f"{site} reaches {value:,.6g} in float16, which ends at {HALF_LIMIT:,.0f}"
    return StructuralTest(
        candidate=candidate,
        test="headroom",
        status="PASS" if value <= HALF_LIMIT else "FAIL",
        value=value,
        bound=HALF_LIMIT,
        reason=reason,
    )
