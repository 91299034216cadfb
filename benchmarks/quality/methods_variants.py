"""The rows of benchmarks/quality/methods.py: every preset, and each component of `best` toggled alone."""

import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from types import ModuleType
from typing import Any, Literal

from corp_deploy.algebra import (
    block_obs,
    fold,
    obs,
    quadratic,
    queries_keys,
    regression,
    scores,
    swap,
    values,
)
from corp_deploy.algebra import channels as algebra_channels
from corp_deploy.reduction import (
    correct,
    heads,
    read_tokens,
    traced_change,
    traced_choice,
    traced_fold,
    traced_folds,
    traced_kind,
    traced_layer_sums,
    traced_loop,
    traced_order,
    traced_pairs_kind,
    traced_reads,
    traced_streams,
    traced_targets,
    traced_values_kind,
)
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import Method, method_from_preset

Kind = Literal["mlp", "attention", "joint"]
KINDS: tuple[Kind, ...] = ("mlp", "attention", "joint")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One row of the table: a preset, what differs from it, and which kinds of reduction it can do."""

    name: str
    preset: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    loop: Loop | Literal["symmetric"] | None = None
    kinds: tuple[Kind, ...] = KINDS
    component: bool = False

    def choices(self) -> Method:
        return method_from_preset(self.preset, **self.changes)

    def code(self) -> Iterator[ModuleType]:
        """The modules whose algebra the row follows from."""
        choices = self.choices()
        yield from (quadratic, scores, algebra_channels, queries_keys)
        yield from (traced_kind, traced_reads, traced_choice, traced_change)
        yield from (traced_pairs_kind, traced_values_kind)
        yield heads
        if choices.mlp_selection == "obs":
            yield from (obs, block_obs, swap)
        if choices.geometry == "square":
            yield values
        if choices.merges:
            yield from (fold, traced_fold, traced_folds)
        if choices.merges or self.loop is not None:
            yield regression
        if self.loop is not None:
            yield from (traced_loop, traced_layer_sums, traced_order, traced_streams)
        if self.loop not in (None, "symmetric"):
            yield from (traced_targets, correct, read_tokens)

    def digest(self) -> str:
        """Of what is chosen and of the code that carries it out."""
        chosen = json.dumps([asdict(self.choices()), repr(self.loop)], sort_keys=True)
        whole = "\0".join([chosen, *(inspect.getsource(module) for module in self.code())])
        return hashlib.sha256(whole.encode()).hexdigest()


VARIANTS = (
    Variant(name="best, closed loop", preset="best", loop=Loop()),
    Variant(name="best", preset="best"),
    Variant(name="corp", preset="corp"),
    Variant(name="corp-v1", preset="corp-v1"),
    Variant(name="grail", preset="grail", kinds=("mlp",)),
    Variant(name="grail, symmetric closed loop", preset="grail", loop="symmetric", kinds=("mlp",)),
    Variant(name="grail, producer-l2", preset="grail", changes={"mlp_selection": "producer-l2"}, kinds=("mlp",)),
    Variant(name="grail-fold", preset="grail-fold", kinds=("mlp",)),
    Variant(name="fold", preset="fold", kinds=("mlp",)),
    Variant(name="vbp", preset="vbp", kinds=("mlp",)),
    Variant(name="none", preset="none"),
    *(
        Variant(name=name, preset="best", changes=changes, loop=loop, kinds=("joint",), component=True)
        for name, changes, loop in (
            ("best, combined instead of obs", {"mlp_selection": "combined"}, None),
            ("best, nothing instead of affine", {"mlp_recovery": "none"}, None),
            ("best, logit instead of lowrank", {"qk_recovery": "logit"}, None),
            ("best, select instead of lowrank", {"qk_recovery": "select"}, None),
            ("best, square heads", {"geometry": "square"}, None),
            ("best, square heads, closed loop", {"geometry": "square"}, Loop()),
            ("best, closed loop, first layers not aligned", {}, Loop(align_inputs=False)),
        )
    ),
)
