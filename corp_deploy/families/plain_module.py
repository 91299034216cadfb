"""Plain modules: users' modules without wrappers of compilers and trainers, pruning masks and norms of weights.

The user's own module is never changed; a copy of it is, or the module that the user's function made.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import prune, remove_spectral_norm, remove_weight_norm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.optim.swa_utils import AveragedModel

from corp_deploy.traced.models.module import TracedModule, traced_state
from ground.errors import BadInput

_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel, AveragedModel)
_TIMMS = "timm.utils.model_ema"  # its classes have the averaged model in `module`
_DECLARED = ("input_size", "inputs", "outputs")
_EAGER = "give the nn.Module that it was made from, with its weights: MODULE.load_state_dict(IT.state_dict())"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside of the wrappers that compile, train or average it."""
    inner = _inside(module)
    return module if inner is None else unwrapped(inner)


def _inside(module: nn.Module) -> nn.Module | None:
    if isinstance(module, _WRAPPERS) or type(module).__module__ == _TIMMS:
        inner = getattr(module, "module", None)
    else:
        inner = vars(module).get("_modules", {}).get("_orig_mod")  # torch.compile's
    return inner if isinstance(inner, nn.Module) else None


def require_module(model: object, where: str) -> None:
    """Raise BadInput for an object that is no module, and for scripted modules and lazy or meta tensors in one."""
    if isinstance(model, torch.export.ExportedProgram):
        raise BadInput(f"{where} a torch.export.ExportedProgram, expected a torch.nn.Module; {_EAGER}")
    if not isinstance(model, nn.Module):
        raise BadInput(f"{where} {_described(model)}, expected a torch.nn.Module")
    for name, each in model.named_modules():
        if isinstance(each, torch.jit.ScriptModule):
            part = f" in its module {name}" if name else ""
            raise BadInput(
                f"{where} a {type(each).__name__} of torch.jit{part}, whose calls can't be followed, expected a plain "
                f"torch.nn.Module; {_EAGER}"
            )
    named = [*model.named_parameters(), *model.named_buffers()]
    if lazy := [name for name, each in named if is_lazy(each)]:
        raise BadInput(
            f"{where} a module whose {_listed(lazy)} {'have' if lazy[1:] else 'has'} no shape yet (a lazy "
            "layer); run it once on an input before you give it"
        )
    if empty := [name for name, each in named if each.is_meta]:
        raise BadInput(
            f"{where} a module whose {_listed(empty)} {'are' if empty[1:] else 'is'} on the meta device, so "
            "without values; make it outside of torch.device('meta') and load its weights, or call "
            "MODULE.load_state_dict(WEIGHTS, assign=True) and set every buffer"
        )


def _described(model: object) -> str:
    remedy = ""
    if isinstance(model, type):
        remedy = " (a class: call it)"
    elif isinstance(model, dict):
        remedy = " (a state dict? make the module and load it there)"
    elif isinstance(model, tuple | list) and any(isinstance(each, nn.Module) for each in model):
        remedy = " (give the module in it alone)"
    return f"a {type(model).__name__}{remedy}"


def copy_of(module: nn.Module) -> nn.Module:
    """Return a deep copy; attributes that were computed from parameters are copied without their gradients."""
    return copy.deepcopy(module, {id(each): each.detach().clone() for _, _, each in _computed(module)})


def _computed(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for each in module.modules():
        for name, value in vars(each).items():
            if isinstance(value, Tensor) and not value.is_leaf:
                yield each, name, value


def plain_module_(model: nn.Module) -> tuple[nn.Module, tuple[str, ...]]:
    """Return the module inside of wrappers with plain weights, and notes on changes; the argument itself is changed."""
    notes, plain = list[str](), model
    while (inner := _inside(plain)) is not None:
        for name in _DECLARED:
            if name in vars(plain) and not hasattr(inner, name):
                setattr(inner, name, vars(plain)[name])
        plain = inner
    if plain is not model:
        notes.append(f"{type(plain).__name__}: taken out of {type(model).__name__}")
    if compiled := [name for name, each in plain.named_modules() if name and "_orig_mod" in each._modules]:
        for name in reversed(compiled):
            plain.set_submodule(name, unwrapped(plain.get_submodule(name)))
        notes.append(f"{type(plain).__name__}: taken without torch.compile in {_listed(compiled)}")
    for each in plain.modules():
        vars(each).pop("_compiled_call_impl", None)  # of module.compile()
    if folded := [name for path, each in plain.named_modules() for name in _fold_(path, each)]:
        notes.append(f"{type(plain).__name__}: pruning masks and norms of weights are folded into {_listed(folded)}")
    for owner, name, value in list(_computed(plain)):
        vars(owner)[name] = value.detach()
    return plain, tuple(notes)


def _fold_(path: str, module: nn.Module) -> Iterator[str]:
    """Turn weights that hooks compute before every call into plain parameters, and yield their names."""
    for hook in list(module._forward_pre_hooks.values()):
        if isinstance(hook, prune.BasePruningMethod):
            name = str(hook._tensor_name)
            prune.remove(module, name)
        elif isinstance(hook, WeightNorm):
            name = hook.name
            remove_weight_norm(module, name)
        elif isinstance(hook, SpectralNorm):
            name = hook.name
            remove_spectral_norm(module, name)
        else:
            continue
        yield f"{path}.{name}" if path else name


def plain_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module, which for a traced module is the class that was traced."""
    return traced_state(module).plain if isinstance(module, TracedModule) else type(module)


def copy_with_forward(model: TracedModule, forward: Callable[..., Any]) -> nn.Module:
    """Return a plain copy of a dense traced module, of a class of the same name with this forward."""
    plain = traced_state(model).plain
    kind: type[nn.Module] = type(plain.__name__, (plain,), {"forward": forward, "__module__": plain.__module__})
    copied = kind.__new__(kind)
    copied.__dict__ |= copy.deepcopy({key: each for key, each in vars(model).items() if key != "known_to_corp_deploy"})
    return copied
