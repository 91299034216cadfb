"""Modules of users in wrappers, with weights that hooks compute, and what is no module that can be traced."""

import copy
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel

import corp_deploy
from corp_deploy.families.given_module import architecture_of_code, available_module, build_from_code
from corp_deploy.families.plain_module import copy_of, plain_module_, require_module, unwrapped
from corp_deploy.families.traced_model import tracing
from corp_deploy.spec.architecture import Preprocessing
from corp_deploy.spec.trusted_code import Code, trusting_code
from corp_deploy.store.checkpoint import dense_from_architecture
from corp_deploy.store.module_model import checkpoint_from_module
from corp_deploy.traced.models.module import notes_on_module
from tests.refusals import rejects

SIZE = (3, 8, 8)


@pytest.fixture(autouse=True)
def _no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """DataParallel moves its module to an accelerator, for which torch takes a backend that a test has registered."""
    monkeypatch.setattr(sys.modules["torch.nn.parallel.data_parallel"], "_get_available_device_type", lambda: None)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 5)).eval()
    made.input_size = SIZE  # type: ignore[assignment]
    return made


def pixels() -> Tensor:
    return torch.randn(2, *SIZE, generator=torch.Generator().manual_seed(1))


def distributed(module: nn.Module) -> nn.Module:
    """Wrap a module in DistributedDataParallel without a process group."""
    wrapper = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapper)
    wrapper.module = module
    return wrapper


def nested(module: nn.Sequential) -> nn.Module:
    module[2] = torch.compile(module[2])  # type: ignore[assignment]
    return module


WRAPPED: dict[str, Callable[[nn.Sequential], Any]] = {
    "compiled": torch.compile,
    "parallel": nn.DataParallel,
    "distributed": distributed,
    "compiled distributed": lambda module: torch.compile(distributed(module)),
    "averaged": AveragedModel,
    "timm's average": ModelEmaV3,
    "compiled inside": nested,
}


@pytest.mark.parametrize("name", WRAPPED)
def test_wrapped_modules_are_unwrapped_with_a_note(name: str) -> None:
    expected = net()(pixels())
    plain, notes = plain_module_(WRAPPED[name](net()).eval())
    assert type(plain) is nn.Sequential
    assert [type(each) for each in plain] == [type(each) for each in net()]
    assert torch.equal(plain(pixels()), expected)
    assert plain.state_dict().keys() == net().state_dict().keys()
    assert len(notes) == 1
    assert notes[0].startswith("Sequential: taken")
    assert plain_module_(net())[1] == ()


def test_wrapper_declares_the_input_size_of_its_module() -> None:
    inner = net()
    del inner.input_size
    wrapper = nn.DataParallel(inner)
    wrapper.input_size = SIZE  # type: ignore[assignment]
    assert plain_module_(wrapper)[0].input_size == SIZE


def masked(module: nn.Sequential) -> None:
    prune.l1_unstructured(module[0], "weight", 0.5)
    prune.random_unstructured(module[4], "bias", 2)


def normed(module: nn.Sequential) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(module[2])


def spectral(module: nn.Sequential) -> None:
    nn.utils.spectral_norm(module[2])


@pytest.mark.parametrize("change_", [masked, normed, spectral])
def test_masks_and_weight_norms_are_folded_in_a_copy(change_: Callable[[nn.Sequential], None]) -> None:
    given = net()
    change_(given)
    given.eval()
    expected, before = given(pixels()), copy.copy(given.state_dict())
    plain, notes = plain_module_(copy_of(given))
    torch.testing.assert_close(plain(pixels()), expected)
    assert plain.state_dict().keys() == net().state_dict().keys()
    assert "folded into" in notes[0]
    assert not any(each._forward_pre_hooks for each in plain.modules())
    assert given.state_dict().keys() == before.keys()
    assert any(each._forward_pre_hooks for each in given.modules())
    copy.deepcopy(plain)


def test_masked_module_in_memory_is_traced_with_a_note() -> None:
    given = net()
    masked(given)
    checkpoint = checkpoint_from_module(given.eval())
    torch.testing.assert_close(checkpoint.model(pixels()), given(pixels()))
    assert checkpoint.notes == ("Sequential: pruning masks and norms of weights are folded into 0.weight, 4.bias",)
    assert prune.is_pruned(given)


SOURCE = """
import torch
from torch import nn
def make():
    m = torch.compile(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 5)))
    m.input_size = (3, 8, 8)
    return m
"""


def test_compiled_model_of_a_function_is_traced_with_a_note() -> None:
    code = Code(file="net.py", function="make", source=SOURCE)
    with trusting_code(True):
        model = build_from_code(architecture_of_code(code, {}, Preprocessing()))
    assert notes_on_module(model) == ("Sequential: taken out of OptimizedModule",)
    assert tracing(model).program.model == "Sequential"


def partly_on_meta() -> nn.Module:
    made = net()
    made[4] = nn.Linear(128, 5, device="meta")
    return made


def scripted() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(net())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (scripted, "RecursiveScriptModule of torch.jit, .* give the nn.Module that it was made from"),
        (lambda: nn.Sequential(scripted()), "of torch.jit in its module 0"),
        (lambda: torch.export.export(net(), (pixels(),)), "ExportedProgram, .*load_state_dict"),
        (partly_on_meta, r"whose 4.weight, 4.bias are on the meta device, .* assign=True"),
        (lambda: nn.Sequential(nn.LazyLinear(3)), "no shape yet"),
        (lambda: net().state_dict(), "OrderedDict .*load it there"),
        (lambda: nn.Linear, "a class: call it"),
        (lambda: (net(), None), "give the module in it alone"),
    ],
)
def test_untraceable_objects_are_refused_with_a_remedy(make: Callable[[], Any], said: str) -> None:
    rejects(f"^net.py: make\\(\\) gives an? .*{said}", require_module, make(), "net.py: make() gives")


def test_module_in_memory_on_meta_and_exported_program_are_refused() -> None:
    rejects("ExportedProgram", corp_deploy.load, torch.export.export(net(), (pixels(),)))  # type: ignore[arg-type]
    rejects("on the meta device", checkpoint_from_module, partly_on_meta())


def test_directory_loads_beside_its_compiled_module() -> None:
    checkpoint = checkpoint_from_module(net())
    compiled: Any = torch.compile(net())
    assert unwrapped(compiled).__class__ is nn.Sequential
    with available_module(compiled):
        assert dense_from_architecture(checkpoint.architecture).state_dict().keys() == net().state_dict().keys()
