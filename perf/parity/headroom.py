"""How near float16 values come to the end of float16, whether or not they reached it on these images."""

from __future__ import annotations

from pathlib import Path

from ground.errors import BadInput
from ground.feeds import Feeds
from ground.onnx_file import read_onnx
from ground.precision import FLOAT16, FLOAT32

from .block_outputs import by_site, fp16_values, largest_activations
from .structure import StructuralTest


def headroom(candidate: str, fp32: Path, fp16: Path, feeds: Feeds) -> StructuralTest:
    """The largest value, computed in float32 by the graph in `fp32`, among those that the one in `fp16` holds in
    float16; named by site. What reaches the very end of float32 is hidden by a mask: a graph in float16 has the end of
    that type there.

    Both are exports of one model, so that their values have the same names; else BadInput is raised. FAIL over 65,504.
    One graph is in memory at a time.
    """
    fp16_names = fp16_values(read_onnx(fp16))
    graph = read_onnx(fp32)
    activations = largest_activations(graph, feeds)
    if 2 * len(fp16_names & activations.keys()) < len(fp16_names):
        raise BadInput(
            f"{candidate}: its values are not named as those of the float32 graph; export both from one model"
        )
    largest = {name: value for name, value in activations.items() if name in fp16_names and value != FLOAT32.largest}
    sites = by_site(graph, largest)
    site, value = max(sites.items(), key=lambda item: item[1], default=("no site", 0.0))
    reason = f"{site} reaches {value:,.6g} in float16, which ends at {FLOAT16.largest:,.0f}"
    return StructuralTest(
        candidate=candidate,
        test="headroom",
        status="PASS" if value <= FLOAT16.largest else "FAIL",
        value=value,
        bound=FLOAT16.largest,
        reason=reason,
    )
