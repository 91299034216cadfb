"""Calibrating, reducing, planning and polishing where the model is not on the CPU: on a device for machines without a
GPU, which computes on the CPU and refuses what a GPU would refuse.

A tensor there holds one of the CPU. Every operation of tensors of both places is refused, but for copies, for numbers
(tensors without axes) and for indices, which a GPU takes from the CPU too; so is a generator of the CPU for values
there, and giving a tensor to NumPy. Whatever asks whether a device is the CPU is told no.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as tree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from benchmarks.real.head import SaliencyHead
from benchmarks.real.measures import outputs
from calib.images import Images
from calib.moments import Moments
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.planning.execution import reduce_as_asked
from corp_deploy.planning.request import build_request
from corp_deploy.polish.options import PolishOptions
from corp_deploy.polish.polish import polished
from corp_deploy.reduction.calibrate import Statistics, calibrate
from corp_deploy.reduction.closed_loop import reduce_traced
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import Method, method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.store.checkpoint import Checkpoint, on_device
from corp_deploy.traced.models.module import device_of
from tests import small_convnets, tiny

NAME = "pretended"
_ATEN = torch.ops.aten
_COPIES = {_ATEN._to_copy.default, _ATEN.copy_.default, _ATEN.copy.default}
# Of these the tensor itself and, where there are any, the values have to be in one place.
_INDEXED = {_ATEN.index.Tensor, _ATEN.index_put.default, _ATEN.index_put_.default, _ATEN._index_put_impl_.default}


class Elsewhere(Tensor):
    """A tensor there."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "Elsewhere":
        # Views of what was made outside of inference mode are no inference tensors, and these are never to be.
        with torch.inference_mode(False):
            made: Elsewhere = Tensor._make_wrapper_subclass(
                cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
                device=torch.device(NAME, 0),
            )  # fmt: skip
        made.held = held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _run(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.held.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError(f"a tensor on {NAME} can't become an array; copy it to the CPU first")

    def __array__(self, *given: Any, **named: Any) -> Any:
        return self.numpy()

    def __repr__(self, **named: Any) -> str:  # type: ignore[override]
        return f"{self.held!r} on {NAME}"


def _refuse_both(func: Any, args: Sequence[Any], tensors: Sequence[Tensor]) -> None:
    """Raise RuntimeError for tensors of both places."""
    asked = tensors
    if func in _INDEXED:
        asked = [each for each in (args[0], *args[2:3]) if isinstance(each, Tensor)]
        if not isinstance(args[0], Elsewhere) and any(isinstance(each, Elsewhere) for each in tensors):
            raise RuntimeError(f"{func}: indices on {NAME} of a tensor on the CPU")
    if any(isinstance(each, Elsewhere) for each in asked):
        wrong = [tuple(each.shape) for each in asked if not isinstance(each, Elsewhere) and each.dim() > 0]
        if wrong:
            raise RuntimeError(f"{func}: tensors on {NAME} and, of shapes {wrong}, on the CPU")


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
    """The tensor that was given to be written into, where the operation gives that back; else None."""
    if not func._schema.is_mutable or not isinstance(out, Tensor):
        return None
    if "out" in kwargs:
        return kwargs["out"]
    first = func._schema.arguments[0].alias_info
    return args[0] if first is not None and first.is_write else None


def _run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensors = [leaf for leaf in tree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    there = [each for each in tensors if isinstance(each, Elsewhere)]
    asked = None if kwargs.get("device") is None else torch.device(kwargs["device"])
    if func not in _COPIES:
        _refuse_both(func, args, tensors)
    stays = bool(there) if asked is None else asked.type == NAME
    if stays and kwargs.get("generator") is not None:
        raise RuntimeError(f"{func}: a generator of the CPU for values on {NAME}")
    own_args, own_kwargs = tree.tree_map_only(Elsewhere, lambda each: each.held, (args, kwargs))
    if asked is not None and asked.type == NAME:
        own_kwargs = {**own_kwargs, "device": torch.device("cpu"), "pin_memory": False}
        own_kwargs = {key: value for key, value in own_kwargs.items() if key in _names(func)}
    out = func(*own_args, **own_kwargs)
    if (written := _written(func, args, kwargs, out)) is not None:
        return written
    if not stays:
        return out
    return tree.tree_map_only(Tensor, lambda each: each if isinstance(each, Elsewhere) else Elsewhere(each), out)


@cache
def _names(func: Any) -> frozenset[str]:
    return frozenset(argument.name for argument in func._schema.arguments)


class _Running(TorchDispatchMode):
    """What has no tensor there yet: tensors that are made there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Making(TorchFunctionMode):
    """Tensors of Python's numbers, which torch makes without asking a dispatch mode."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and named.get("device") is not None:
            device = torch.device(named["device"])
            if device.type == NAME:
                return func(*args, **{**named, "device": None}).to(device)
        if func is Tensor.new_tensor and isinstance(args[0], Elsewhere):
            return torch.tensor(args[1], **{"dtype": args[0].dtype, **named}).to(args[0].device)
        return func(*args, **named)


class _Module:
    """What torch asks the module of a device."""

    used = False

    @classmethod
    def is_available(cls) -> bool:
        """Return whether a test uses the device: torch tells other tests of its process that it is absent."""
        return cls.used

    is_initialized = staticmethod(lambda: True)
    is_autocast_enabled = staticmethod(lambda: False)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    get_rng_state = staticmethod(lambda device: torch.empty(0, dtype=torch.uint8))
    set_rng_state: Callable[[torch.Tensor, int], None] = staticmethod(lambda state, device: None)
    manual_seed_all: Callable[[int], None] = staticmethod(lambda seed: None)
    _is_in_bad_fork = staticmethod(lambda: False)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])


@cache
def _register() -> None:
    """Once a process, for good."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())


@contextmanager
def pretended() -> Iterator[str]:
    """The device's name, to be used within this context."""
    _register()
    with pytest.MonkeyPatch.context() as patch, _Making(), _Running():  # type: ignore[no-untyped-call]
        patch.setattr(_Module, "used", True)
        yield NAME


KINDS = ("vit", "resnet18d")
SMALLER: dict[str, Any] = {"embed_dim": 32, "depth": 1, "num_heads": 2, "mlp_ratio": 1.0}


@pytest.fixture
def there() -> Iterator[str]:
    with pretended() as name:
        yield name


# The device itself


@pytest.mark.parametrize(
    "mixing",
    [
        lambda x, y: x + y,
        lambda x, y: x @ y,
        lambda x, y: torch.cat((x, y)),
        lambda x, y: torch.where(x > 0, x, y),
        lambda x, y: x.gather(0, y.long()),
        lambda x, y: x.index_select(0, torch.tensor([0])),
        lambda x, y: y[torch.zeros(1, dtype=torch.int64, device=x.device)],
        lambda x, y: x.index_put_((torch.tensor([0]),), y[:1]),
        lambda x, y: torch.mm(x, x, out=y),
        lambda x, y: x.normal_(generator=torch.Generator()),
        lambda x, y: torch.randn(2, generator=torch.Generator(), device=x.device),
        lambda x, y: nn.Linear(2, 2)(x),
    ],
)
def test_mixed_devices_in_one_operation_are_refused(there: str, mixing: object) -> None:
    assert callable(mixing)
    with pytest.raises(RuntimeError, match="CPU"):
        mixing(torch.ones(2, 2, device=there), torch.ones(2, 2))
    mixing(torch.ones(2, 2), torch.ones(2, 2))


# What runs there


@cache
def dense(kind: str) -> Checkpoint:
    if kind == "vit":
        return tiny.checkpoint(**SMALLER)
    return small_convnets.checkpoint(kind)


@cache
def images(kind: str, count: int = 16) -> Images:
    folder = TemporaryDirectory()
    FOLDERS.append(folder)
    size = {"vit": 32, "resnet18d": small_convnets.SIZE}[kind]
    return tiny.opened(Path(folder.name) / "images.npy", tiny.images(count, size=size), dense(kind).model)


FOLDERS: list[TemporaryDirectory[str]] = []


@cache
def moments(kind: str) -> Moments:
    return calibrate(dense(kind), images(kind), batch_size=8, statistics=statistics(kind))


def statistics(kind: str) -> Statistics:
    return Statistics(attention_system=kind != "resnet18d")


def method(preset: str, kind: str) -> Method:
    """Half of what such a model has."""
    shares = {"conv_sparsity": 0.5} if kind == "resnet18d" else {"mlp_sparsity": 0.5, "attention_sparsity": 0.5}
    return method_from_preset(preset, **shares, align_hidden=8, align_head=4, align_conv=8)


def require_same(found: nn.Module, expected: nn.Module, kind: str, where: str) -> None:
    """The same widths, and outputs but for rounding, which closed forms of few images magnify; found on that device."""
    assert device_of(found).type == where
    assert [each.shape for each in found.parameters()] == [each.shape for each in expected.parameters()]
    (batch,) = images(kind).batches(16)
    assert isinstance(batch, Tensor)
    with torch.inference_mode():
        torch.testing.assert_close(found(batch.to(where)).cpu(), expected(batch), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["vit", pytest.param("resnet18d", marks=pytest.mark.slow("models"))])
def test_statistics_equal_those_of_the_cpu(there: str, kind: str) -> None:
    found = calibrate(dense(kind), images(kind), batch_size=8, device=there, statistics=statistics(kind))
    for site, own in moments(kind).sites.items():
        for name, tensor in tensors_of(own).items():
            size = float(tensor.abs().max()) if tensor.numel() else 0.0
            torch.testing.assert_close(tensors_of(found.sites[site])[name], tensor, rtol=1e-5, atol=1e-5 * size)
    assert device_of(dense(kind).model).type == "cpu", "the caller's stays where it is"


def tensors_of(statistics: object) -> dict[str, Tensor]:
    """Its floating-point tensors by name."""
    found = {field.name: getattr(statistics, field.name) for field in fields(statistics)}  # type: ignore[arg-type]
    return {name: each for name, each in found.items() if isinstance(each, Tensor) and each.is_floating_point()}


@pytest.mark.slow("models")
@pytest.mark.parametrize("preset", ["best", "corp", "grail"])
@pytest.mark.parametrize("kind", KINDS)
def test_reductions_equal_those_of_the_cpu(there: str, kind: str, preset: str) -> None:
    own = dense(kind).model
    expected = reduce(own, moments(kind), method(preset, kind)).model
    found = reduce(on_device(dense(kind), there).model, moments(kind), method(preset, kind)).model
    require_same(found, expected, kind, there)


@pytest.mark.slow("models")
@pytest.mark.parametrize("kind", KINDS)
def test_closed_loops_equal_those_of_the_cpu(there: str, kind: str) -> None:
    for loop, preset in ((Loop(), "best"), (None, "grail")):
        expected = reduce_traced(dense(kind).model, images(kind), method(preset, kind), loop=loop).model
        found = reduce_traced(on_device(dense(kind), there).model, images(kind), method(preset, kind), loop=loop).model
        require_same(found, expected, kind, there)


@pytest.mark.slow("models")
@pytest.mark.parametrize("merge", [None, "2"])
def test_budget_is_planned_and_applied_on_the_device(there: str, merge: str | None) -> None:
    asked = build_request(ReduceOptions(macs=0.8, merge_tokens=merge, align={"mlp": 8, "head": 4}))
    own = dense("vit")
    taken = moments("vit")
    expected = reduce_as_asked(own, taken, asked, images=images("vit"))[0].model
    found = reduce_as_asked(on_device(own, there), taken, asked, images=images("vit"))[0].model
    require_same(found, expected, "vit", there)


@pytest.mark.slow("training")
def test_polish_runs_on_the_device(there: str) -> None:
    own, options = on_device(dense("vit"), there), PolishOptions(steps=2)
    start = reduce(dense("vit").model, moments("vit"), method("best", "vit")).model
    begun = on_device(replace(dense("vit"), model=start), there).model
    result = polished(own.model, begun, images("vit"), options)
    expected = polished(dense("vit").model, start, images("vit"), options)
    assert device_of(result.model).type == there
    assert result.report.error == pytest.approx(expected.report.error, rel=1e-3)


def test_encoder_is_judged_on_the_device(there: str) -> None:
    model = tiny.checkpoint(num_classes=0).model
    head, pixels = SaliencyHead((48, 8), patch=8).eval(), torch.from_numpy(tiny.images(4))
    here = outputs(model, pixels, head)
    found = outputs(on_device(tiny.checkpoint(num_classes=0), there).model, pixels, head.to(there))
    assert found.patches_BNC is not None
    assert here.patches_BNC is not None
    torch.testing.assert_close(found.class_BC, here.class_BC)
    torch.testing.assert_close(found.patches_BNC, here.patches_BNC)


def test_new_tensors_are_on_the_device(there: str) -> None:
    made = (
        torch.zeros(2, device=there),
        torch.tensor([1.0, 2.0], device=there),
        torch.ones(2).to(there),
        torch.arange(2, device=there).new_tensor([1]),
        nn.Linear(2, 2).to(there).weight,
        torch.eye(2, device=there)[1:] @ torch.ones(2, 2, device=there),
        torch.autograd.grad((x := torch.ones(2, device=there).requires_grad_()).sum(), x)[0],
    )
    assert {str(each.device) for each in made} == {f"{there}:0"}
    assert torch.ones(2, device=there).cpu().device.type == "cpu"


def test_arrays_are_refused_and_cpu_scalars_and_indices_accepted(there: str) -> None:
    x = torch.ones(2, 2, device=there)
    with pytest.raises(TypeError, match="copy it to the CPU"):
        x.numpy()
    x[:, 1] = 3.0
    assert (x * torch.tensor(2.0))[torch.tensor([1])].tolist() == [[2.0, 6.0]]
    assert torch.ones(2, 2).copy_(x).tolist() == [[1.0, 3.0], [1.0, 3.0]]
    assert float(x.sum()) == 8.0
