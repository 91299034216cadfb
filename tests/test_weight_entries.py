"""Which tensors of a checkpoint become a model's: its own names, then those behind one prefix, by key or by kind."""

import argparse
import pathlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from torch.optim.swa_utils import AveragedModel

from corp_deploy.spec.trusted_code import trusting_code
from corp_deploy.store.checkpoint import load_checkpoint, save
from corp_deploy.store.dense_model import load_dense
from corp_deploy.store.weights import Weights, folded_state, read_weights
from tests.refusals import rejects


class Small(nn.Module):
    """A network under one attribute, and a head beside it."""

    def __init__(self, attribute: str = "model") -> None:
        super().__init__()
        self.attribute = attribute
        self.add_module(attribute, nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
        self.head = nn.Linear(3, 2)


STATE = dict(Small().state_dict())


def before(prefix: str, state: Mapping[str, Tensor] = STATE, by: float = 0.0) -> dict[str, Tensor]:
    return {prefix + name: tensor + by if tensor.is_floating_point() else tensor for name, tensor in state.items()}


def read(content: Any, path: Path, own: Mapping[str, Tensor] = STATE, **how: Any) -> Weights:
    torch.save(content, path / "w.pth")
    return read_weights(path / "w.pth", own, **how)


def same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    torch.testing.assert_close(dict(found), dict(expected), rtol=0, atol=0)


@pytest.mark.parametrize("attribute", ["model", "module", "timm_model", "backbone", "net", "ema"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "model.", "module._orig_mod.net.", "a.b."])
def test_module_loads_its_names_behind_any_prefix(tmp_path: Path, attribute: str, prefix: str) -> None:
    own = Small(attribute).state_dict()
    taken = read({"state_dict": before(prefix, own) | {"loss.weight": torch.ones(1)}}, tmp_path, own)
    same({name: each for name, each in taken.state.items() if name != "loss.weight"}, own)
    assert any("renamed" in note for note in taken.notes) == bool(prefix)


CODE = """
from torch import nn


class Wrapped(nn.Module):
    input_size = (3, 8, 8)

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(4, 2)

    def forward(self, images):
        return self.head(self.model(images))
"""


def test_directory_of_a_nested_module_round_trips(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(CODE)
    model = f"module:{tmp_path / 'net.py'}:Wrapped"
    with trusting_code(True):
        first = load_dense(model, weights=None, kwargs={})
        torch.save(before("module.", first.model.state_dict(), by=1.0), tmp_path / "w.pth")
        dense = load_dense(model, weights=tmp_path / "w.pth", kwargs={})
        same(dense.model.state_dict(), before("", first.model.state_dict(), by=1.0))
        save(dense, tmp_path / "out")
        same(load_checkpoint(tmp_path / "out").model.state_dict(), dense.model.state_dict())
        torch.save({"other.weight": torch.ones(1)}, tmp_path / "other.pth")
        said = r"these weights don't fit the model; missing: .*; unexpected: other\.weight; check that --model"
        rejects(said, load_dense, model, weights=tmp_path / "other.pth", kwargs={})
        rejects("ema says which weights of a file", load_dense, model, weights=None, kwargs={}, ema=True)


def test_torch_averaged_model_loads_without_its_counter(tmp_path: Path) -> None:
    model = Small()
    averaged = AveragedModel(model, use_buffers=True)
    for content in (averaged.state_dict(), {"model_ema": averaged.state_dict(), "model": before("module.", by=1.0)}):
        taken = read(content, tmp_path)
        same(taken.state, model.state_dict())
        assert "w.pth: left out tensors beside the model: n_averaged" in taken.notes


KEYS = ("model_state_dict", "net", "network", "model", "module", "params", "generator", "student", "teacher", "ema")


@pytest.mark.parametrize("key", KEYS)
def test_single_entry_is_used_under_any_key(tmp_path: Path, key: str) -> None:
    content = {"epoch": 3, "optimizer": {"state": {0: {"exp_avg": torch.ones(1)}}}, "ema_decay": 0.9, key: STATE}
    taken = read(content, tmp_path)
    same(taken.state, STATE)
    assert (taken.entry, taken.notes) == (key, ())
    same(read({"checkpoint": {"deep": {key: STATE}}, "other": None}, tmp_path).state, STATE)


def test_all_tensor_entries_are_listed_and_the_choice_reported(tmp_path: Path) -> None:
    content: dict[str, Any] = {
        "epoch": 1,
        "model": STATE,
        "ema": before("", by=1.0),
        "critic": {"weight": torch.ones(1)},
    }
    taken = read(content, tmp_path)
    same(taken.state, content["ema"])
    assert taken.notes == (
        "w.pth: took ema, the moving average of the weights; --no-ema takes model; it also holds critic, which "
        "--weights-key takes",
    )
    same(read(content, tmp_path, ema=False).state, STATE)
    same(read(content, tmp_path, ema=True).state, content["ema"])


def test_unsuitable_average_yields_to_fitting_weights(tmp_path: Path) -> None:
    content = {"ema": {"decay": torch.ones(1)}, "model": STATE}
    same(read(content, tmp_path).state, STATE)


PAIRS: dict[str, tuple[dict[str, Any], str]] = {
    "a model beside its teacher": ({"state_dict": before("model.") | before("teacher.", by=1.0)}, "state_dict.model"),
    "a student and a teacher": (
        {"student": before("module.backbone."), "teacher": before("module.backbone.", by=1.0)},
        "teacher.backbone",
    ),
    "an average by prefix": (before("online_model.") | before("ema_model.", by=1.0), "ema_model"),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_fitting_network_of_two_is_used_and_the_other_named(tmp_path: Path, kind: str) -> None:
    content, entry = PAIRS[kind]
    taken = read(content, tmp_path)
    assert taken.entry == entry
    assert taken.notes[0].startswith(f"w.pth: took {entry}")
    other = next(each for each in ("teacher", "student", "online_model") if each in taken.notes[0].split(";")[-1])
    assert other not in entry


@pytest.mark.parametrize(
    ("key", "by"),
    [("a", 0.0), ("a.net", 0.0), ("b", 1.0), ("b.teacher", 2.0), ("b.student", 1.0), ("c.d", 3.0), ("c", 3.0)],
)
def test_key_names_an_entry_or_a_prefix_in_it(tmp_path: Path, key: str, by: float) -> None:
    content = {
        "a": before("net."),
        "b": before("student.", by=1.0) | before("teacher.", by=2.0),
        "c": {"d": before("module.", by=3.0)},
    }
    taken = read(content, tmp_path, key=key)
    if key != "b":  # which of the two is taken there, is asked above
        same(taken.state, before("", by=by))
    rejects(r"--weights-key 'e': no tensors under it; it holds a \(net\.", read, content, tmp_path, key="e")


HARMLESS: dict[str, Any] = {
    "a number of numpy's": np.float64(0.91),
    "an array of numpy's": np.arange(3),
    "numpy's random state": np.random.RandomState(0).get_state(),
    "a path in arguments": argparse.Namespace(output_dir=pathlib.PurePosixPath("/x"), lr=1e-3),
    "a default dictionary": defaultdict(list, a=[1]),
    "a version": torch.__version__,
}


@pytest.mark.parametrize("kind", HARMLESS)
@pytest.mark.parametrize("zipped", [True, False])
def test_non_tensor_values_are_not_executed(tmp_path: Path, kind: str, zipped: bool) -> None:
    torch.save({"model": STATE, "x": HARMLESS[kind]}, tmp_path / "w.pth", _use_new_zipfile_serialization=zipped)
    same(read_weights(tmp_path / "w.pth", STATE).state, STATE)


def test_non_tensor_values_between_weights_are_skipped_and_named(tmp_path: Path) -> None:
    taken = read({**STATE, "epoch": 3, "arch": "small"}, tmp_path)
    same(taken.state, STATE)
    assert taken.notes == ("w.pth: left out what is no tensor: epoch, arch",)


def _pruned(layer: nn.Module) -> nn.Module:
    return prune.l1_unstructured(layer, "weight", 0.5)


FORMS: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "a mask": (_pruned, "pruning masks"),
    "weight norm": (parametrizations.weight_norm, "weight norm"),
    "spectral norm": (parametrizations.spectral_norm, "spectral norm"),
    "old weight norm": (weight_norm, "weight norm"),
    "old weight norm of the whole": (lambda layer: weight_norm(layer, dim=None), "weight norm"),  # type: ignore[arg-type]
    "old weight norm of inputs": (lambda layer: weight_norm(layer, dim=1), "weight norm"),
    "old spectral norm": (spectral_norm, "spectral norm"),
}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "make", [lambda: nn.Conv2d(3, 4, 3), lambda: nn.ConvTranspose2d(3, 4, 3), lambda: nn.Linear(5, 3)]
)
def test_parametrised_weights_are_folded(tmp_path: Path, form: str, make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, (apply, label) = nn.Sequential(make()), FORMS[form]
    apply(model[0])
    model.eval()
    inputs = torch.randn(2, 5) if isinstance(model[0], nn.Linear) else torch.randn(2, 3, 6, 6)
    expected = model(inputs)
    plain = nn.Sequential(make())
    taken = read({"model": before("module.", model.state_dict())}, tmp_path, plain.state_dict())
    plain.load_state_dict(dict(taken.state))
    torch.testing.assert_close(plain(inputs), expected)
    assert f"w.pth: folded {label} into the weights of module.0.weight" in taken.notes
    same(read(model.state_dict(), tmp_path, model.state_dict()).state, model.state_dict())


def test_mismatched_parametrisations_are_refused() -> None:
    state = {"a.weight_orig": torch.ones(2, 2), "a.weight_mask": torch.ones(3)}
    rejects(r"w: a\.weight: pruning masks of shapes that don't fit", folded_state, state, where="w")


def test_name_with_a_million_dots_is_handled_quickly(tmp_path: Path) -> None:
    same(read({"model": {"." * 1_000_000 + "x": torch.ones(1)} | before("net.")}, tmp_path).state, STATE)


def test_average_in_a_callback_is_found(tmp_path: Path) -> None:
    average = before("", by=1.0)
    callbacks = {"Averaging": {"ema_state_dict": average}, "Best": {"scores": {"a.ckpt": torch.ones(())}}}
    taken = read({"state_dict": STATE, "callbacks": callbacks, "optimizer_states": [{"state": {}}]}, tmp_path)
    same(taken.state, average)
    assert taken.notes[0].endswith("the moving average of the weights; --no-ema takes state_dict")


def test_top_level_weights_beside_an_optimizer_are_used(tmp_path: Path) -> None:
    optimizer = {"state": {"0": {"exp_avg": torch.ones(1)}}}
    same(read({**STATE, "optimizer": optimizer}, tmp_path).state, STATE)


def test_average_without_names_is_reported_as_unread(tmp_path: Path) -> None:
    content = {"model": STATE, "ema": {"decay": 0.9, "shadow_params": list(before("").values())}}
    taken = read(content, tmp_path)
    same(taken.state, STATE)
    assert taken.notes[0].startswith("w.pth: ema.shadow_params: tensors without names, which can't be taken")
    rejects(r"ema\.shadow_params: tensors without names", read, content, tmp_path, ema=True)


def test_state_of_the_inner_network_fits_its_wrapper(tmp_path: Path) -> None:
    inner = Small()
    around = nn.Sequential(OrderedDict(inner=inner)).state_dict()
    same(read(inner.state_dict(), tmp_path, around).state, around)


def test_compiled_and_distributed_prefixes_are_removed(tmp_path: Path) -> None:
    parts = {name.replace("model.0", "model._orig_mod.0.module"): each for name, each in STATE.items()}
    same(read(parts, tmp_path).state, STATE)


def test_object_arrays_are_refused(tmp_path: Path) -> None:
    rejects("pickled code", read, {"model": STATE, "x": np.array([object()], dtype=object)}, tmp_path)
