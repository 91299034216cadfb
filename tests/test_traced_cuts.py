"""Programs cut into segments at tensors that all later ones depend on."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import fx, nn

from corp_deploy.traced.finding.cuts import extract_between, find_cuts
from corp_deploy.traced.finding.sites import FoundSites, find_sites
from corp_deploy.traced.models.segments import layout_of
from corp_deploy.traced.narrowing.proof import narrow
from corp_deploy.traced.programs.program import Program
from corp_deploy.traced.programs.sizes import infer_sizes_, set_sizes
from corp_deploy.traced.programs.tracing import trace
from tests import traced_models as own
from tests.traced_examples import SIDE, Patched

IMAGES = (3, SIDE, SIDE)


def found_of(model: nn.Module, *shapes: tuple[int, ...]) -> FoundSites:
    return find_sites(trace(model.eval(), [torch.zeros(2, *shape) for shape in shapes]))


def chained(program: Program, found: FoundSites, inputs: torch.Tensor) -> torch.Tensor:
    """Run the program segment by segment, at another batch size than it was traced with."""
    at = [None, *(cut.node for cut in find_cuts(found)), None]
    with torch.no_grad():
        for before, after in pairwise(at):
            inputs = extract_between(program, before, after)(inputs)
    return inputs


@pytest.mark.parametrize(
    ("build", "shape", "count"),
    [
        (lambda: Patched(depth=3), IMAGES, 7),  # after the stem, and after each branch of each block
        (own.ResBlocks, (3, 8, 8), 3),  # after the stem and each block; the stream is a site itself
        (own.encoder, (own.TOKENS, own.D), 4),
        (own.UNet, (3, 8, 8), 0),  # skip connections leave no place for a cut
        (own.Gated, (own.D,), 0),
    ],
)
def test_consecutive_segments_equal_the_program(build: type[nn.Module], shape: tuple[int, ...], count: int) -> None:
    torch.manual_seed(0)
    model = build()
    found, inputs = found_of(model, shape), torch.randn(3, *shape)
    assert len(find_cuts(found)) == count
    with torch.no_grad():
        assert torch.allclose(chained(found.program, found, inputs), model(inputs), atol=1e-5)


def test_narrowing_on_meta_gives_the_sizes_of_narrowing_with_weights() -> None:
    dense = Patched().eval()
    one, other = (found_of(each, IMAGES) for each in (dense, Patched().to("meta")))
    kept = {site.key: range(1, site.size, 2) for site in one.sites if site.part_G is None}
    numbers, sizes = (dict(narrow(each, kept).module.named_parameters()) for each in (one, other))
    assert all(each.is_meta for each in sizes.values())
    assert {name: each.shape for name, each in sizes.items()} == {name: each.shape for name, each in numbers.items()}
    assert any(each.shape != dense.get_parameter(name).shape for name, each in numbers.items() if "bias" not in name)


def test_inferred_sizes_equal_those_of_the_outputs() -> None:
    graph = found_of(Patched(depth=3), IMAGES).program.graph
    told = {node.name: node.meta.pop("sizes") for node in graph.graph.nodes if node.op != "output"}
    infer_sizes_(graph, [torch.zeros(2, *IMAGES)], any_batch=True)
    assert {node.name: node.meta["sizes"] for node in graph.graph.nodes if node.op != "output"} == told


@pytest.mark.parametrize(
    ("sizes", "image", "axis"),
    [
        ((8, 5, 5), (3, 10, 10), 1),
        ((5, 5, 8), (3, 10, 10), 3),
        ((7, 7, 7), (3, 14, 14), 1),
        ((9, 2, 3), (3, 4, 6), 1),
        ((2, 3, 9), (3, 4, 6), 3),
        ((16, 8), (3, 4, 6), 2),
        ((8,), (3, 4, 6), 1),
    ],
)
def test_stream_is_read_as_rows_of_channels(sizes: tuple[int, ...], image: tuple[int, ...], axis: int) -> None:
    tensor = torch.randn(2, *sizes)
    node = fx.Graph().placeholder("x")
    set_sizes(node, tensor, tensor)
    layout = layout_of(node, image)
    rows_BNC = layout.rows(tensor)
    assert rows_BNC.shape == (2, math.prod(sizes) // sizes[axis - 1], sizes[axis - 1])
    assert torch.equal(rows_BNC[1, 0], tensor[1].movedim(axis - 1, -1).reshape(-1, sizes[axis - 1])[0])
    assert torch.equal(layout.tensor(rows_BNC), tensor)


def test_cuts_follow_the_last_use_of_a_second_input() -> None:
    assert find_cuts(found_of(own.TwoInputs(), (4,), (5,))) == ()


def test_narrowed_program_has_the_same_cuts() -> None:
    torch.manual_seed(0)
    dense = found_of(Patched(), IMAGES)
    narrower = narrow(dense, {site.key: range(site.size // 2) for site in dense.sites if site.part_G is None})
    infer_sizes_(narrower.module, [torch.zeros(2, *IMAGES)], any_batch=True)
    again = find_sites(replace(dense.program, graph=narrower.module))
    assert [cut.name for cut in find_cuts(again)] == [cut.name for cut in find_cuts(dense)]
