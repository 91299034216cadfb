"""Trials of new tensors run what these reach alone, and find what whole passes find."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from calib.inputs import as_tuple, tensors_by_name
from corp_deploy.families.traced_model import tracing
from corp_deploy.planning import program_trials
from corp_deploy.planning.program_trials import effects_of_new_tensors
from tests import tiny

IMAGES = 11  # a whole piece and a part of one


@pytest.mark.parametrize("in_place", [False, True])
def test_effects_are_those_of_whole_passes(monkeypatch: pytest.MonkeyPatch, in_place: bool) -> None:
    """Of one tensor in front, one behind, and several at once; also where nothing may be kept."""
    monkeypatch.setattr(program_trials, "changes_in_place", lambda node: in_place)
    program, images = tracing(tiny.checkpoint().model).running, torch.from_numpy(tiny.images(IMAGES))
    names = [str(node.target) for node in program.nodes if node.op == "get_attr"]
    chosen = [names[:1], names[-1:], names[len(names) // 3 :: 5]]
    changes = [{name: program.tensor(name) * 0.5 for name in each} for each in chosen]
    with torch.inference_mode():
        dense = as_tuple(program.graph(images))
        found = effects_of_new_tensors(program, images, changes, dense)
        for effect, change in zip(found, changes, strict=True):
            outputs = as_tuple(functional_call(program.graph, change, tuple(tensors_by_name(images).values())))
            assert effect == pytest.approx(sum(map(_share, outputs, dense)) / len(dense), rel=1e-5)
    assert min(found) > 0.0


def _share(output: Tensor, dense: Tensor) -> float:
    return float((output.double() - dense.double()).square().sum() / dense.double().square().sum())


def test_what_no_change_reaches_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    program, images = tracing(tiny.checkpoint().model).running, torch.from_numpy(tiny.images(4))
    last = [str(node.target) for node in program.nodes if node.op == "get_attr"][-1]
    ran, plain = list[str](), torch.fx.Interpreter.run_node

    def counted(self: torch.fx.Interpreter, n: torch.fx.Node) -> Any:
        ran.append(n.name)
        return plain(self, n)

    monkeypatch.setattr(torch.fx.Interpreter, "run_node", counted)
    with torch.inference_mode():
        dense = as_tuple(program.graph(images))
        effects_of_new_tensors(program, images, [{last: program.tensor(last) * 0.5}] * 3, dense)
    nodes = len(list(program.nodes))
    assert nodes < len(ran) < nodes + 3 * 10
    assert effects_of_new_tensors(program, images, [], dense) == []
