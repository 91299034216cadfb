"""Checks of weights against a model: their names and shapes, after timm's filter if need be, and their sparsity."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from corp_deploy.algebra.sparse_patterns import holds
from corp_deploy.families.timm_library import filter_state, unused
from corp_deploy.spec.architecture import Architecture
from corp_deploy.spec.sparsity import sparsity_from_text
from corp_deploy.traced.models.module import batch_counters
from ground.errors import BadInput

from .model_config import REMEDY
from .weight_advice import advice_for, advice_on_names
from .weight_file import State, first_names
from .weights import Weights


class _Misfit:
    """The differences between a state dict and a model; `words` is empty where there are none."""

    def __init__(self, state: State, expected: State) -> None:
        self.missing = sorted(expected.keys() - state.keys())
        common = sorted(expected.keys() & state.keys())
        self.misshapen = [name for name in common if state[name].shape != expected[name].shape]
        shapes = [f"{n} {tuple(state[n].shape)} instead of {tuple(expected[n].shape)}" for n in self.misshapen]
        unexpected = sorted(state.keys() - expected.keys())
        kinds = {"missing": self.missing, "unexpected": unexpected, "wrong shape": shapes}
        self.words = "; ".join(f"{kind}: {first_names(names)}" for kind, names in kinds.items() if names)


def _sides(tensor: torch.Tensor) -> list[int]:
    """Return the sides above 1, which the weights of a 1x1 convolution and a linear layer share."""
    return [side for side in tensor.shape if side > 1]


def _notes(before: State, after: State) -> list[str]:
    """Return notes on what timm's filter changed, found by names, shapes and memory."""
    kept = {tensor.untyped_storage().data_ptr() for tensor in after.values()}
    renamed = sorted(after.keys() - before.keys())
    dropped = sorted(n for n in before.keys() - after.keys() if before[n].untyped_storage().data_ptr() not in kept)
    resized = [n for n in sorted(before.keys() & after.keys()) if _sides(before[n]) != _sides(after[n])]
    grids = [["x".join(map(str, state[name].shape)) for state in (before, after)] for name in resized]
    notes = [f"{name} resampled by timm from {own} to {new}" for name, (own, new) in zip(resized, grids, strict=True)]
    if renamed:
        notes.append(f"names mapped by timm to {first_names(renamed)}")
    if dropped:
        notes.append(f"not used: {first_names(dropped)}")
    return notes


def require_fit(model: nn.Module, state: State, where: Path) -> None:
    """Raise BadInput for a state dict with other names or shapes than the model's."""
    if words := _Misfit(state, model.state_dict()).words:
        raise BadInput(f"{where}: these weights don't fit the model beside them; {words}; write them again")


def match_weights(model: nn.Module, weights: Weights) -> State:
    """Return weights, and missing batch counters, of a model. Raises BadInput for unlike names or shapes."""
    state = {**batch_counters(model), **weights.state}
    if words := _Misfit(state, model.state_dict()).words:
        advice = "check that --model and --model-kwargs make the model whose weights these are"
        raise _refusal(weights, words, advice_on_names(weights.state) or advice)
    return state


def _refusal(weights: Weights, words: str, advice: str) -> BadInput:
    taken = "".join(f"; {note.removeprefix(weights.path.name + ': ')}" for note in weights.notes)
    return BadInput(f"{weights.path}: these weights don't fit the model; {words}; {advice}{taken}")


def fit_weights(model: nn.Module, weights: Weights, architecture: Architecture) -> tuple[State, tuple[str, ...]]:
    """Return weights with the names and shapes of timm's model, and notes on changes; `architecture` built the model.

    Raises BadInput, with the arguments that would fit as far as they are known, or the name of another library.
    """
    expected, counts = model.state_dict(), batch_counters(model)
    with_counts = {**counts, **weights.state}
    before = _Misfit(with_counts, expected).words
    if not before:
        return with_counts, ()
    if reason := advice_on_names(weights.state):
        raise BadInput(f"{weights.path}: {reason}")
    try:
        state = filter_state(model, weights.state)
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError, AssertionError) as error:
        reason = str(error).partition("\n")[0][:150] or type(error).__name__
        words = f"{before}; nor can timm resample them ({reason})"
        raise _refusal(weights, words, advice_for(model, weights.state, architecture)) from None
    notes = _notes(weights.state, state)
    state = {**counts, **state}
    without = [name for name in state if name not in expected and name.startswith(unused(model))]
    if without:
        state = {name: tensor for name, tensor in state.items() if name not in without}
        notes.append(f"not used, as the model was built without: {first_names(without)}")
    misfit = _Misfit(state, expected)
    if misfit.words:
        raise _refusal(weights, misfit.words, advice_for(model, weights.state, architecture))
    return state, tuple(f"{weights.path.name}: {note}" for note in notes)


def rows_of_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight with input channels last: [outputs, inputs], or [outputs, kernel positions, inputs]."""
    weight = weight.detach()
    return weight if weight.ndim == 2 else weight.flatten(2).transpose(1, 2)


def require_sparse(model: nn.Module, patterns: Mapping[str, str], where: str) -> None:
    """Raise BadInput for a layer or weight named in `patterns` that is missing or less sparse than its pattern."""
    state = model.state_dict() if patterns else {}
    for name, text in patterns.items():
        weight, sparsity = state.get(f"{name}.weight", state.get(name)), sparsity_from_text(text)
        if weight is None or weight.ndim < 2:
            raise BadInput(f"{where}: sparsity: the model has no layer {name[:100]!r}; {REMEDY}")
        rows = rows_of_weight(weight)
        if rows.shape[-1] % sparsity.of or not holds(rows.flatten(0, -2), sparsity):
            raise BadInput(
                f"{where}: sparsity: {name} is not {sparsity}: some {sparsity.of} neighbouring weights have more than "
                f"{sparsity.kept} that are not zero; {REMEDY}"
            )
