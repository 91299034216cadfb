"""A module whose sites are found in its traced program, dense or narrowed: whatever it is, it stays what it was, under
the names of its own weights. Copies of models with some modules replaced; models are never edited.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, fx, nn

from corp_deploy.spec.merging import Merging
from corp_deploy.spec.outputs import NamedOutputs
from corp_deploy.traced.finding.site_groups import Index
from corp_deploy.traced.programs.program import Program
from corp_deploy.traced.programs.readers import add_zero_biases_
from corp_deploy.traced.programs.sizes import infer_sizes_
from corp_deploy.traced.programs.tracing import trace
from ground.errors import BadInput
from ground.ports import OutputPort

from .array_inputs import CallOrder, InputSpec, build_forward, build_plain_batch
from .mergeable import build_merged_graph
from .model_program import Tracing as Tracing


def device_of(model: nn.Module) -> torch.device:
    """Where the model's weights are; of one without any, the CPU."""
    return next((each.device for each in model.parameters()), torch.device("cpu"))


def replace_submodules(model: nn.Module, modules: Mapping[str, nn.Module]) -> nn.Module:
    """A copy of the model with the named submodules replaced; the model given is left as it is."""
    memo: dict[int, Any] = {id(model.get_submodule(name)): new for name, new in modules.items()}
    return copy.deepcopy(model, memo)


MOST_PARAMETERS = 20_000_000_000
"""Of a model that is built."""


def refuse_larger(build: Callable[[], nn.Module], what: str) -> None:
    """Raise BadInput for a model of more parameters than are built, before it has memory."""
    with torch.device("meta"):
        count = parameters(build())
    if count > MOST_PARAMETERS:
        raise BadInput(f"{what}: {count:,} parameters; {MOST_PARAMETERS:,} at most are built")


def parameters(*modules: nn.Module) -> int:
    """Parameters of these modules together."""
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def batch_counters(model: nn.Module) -> dict[str, Tensor]:
    """Of how many batches its norms met in training, which older files don't have and what is trained never reads."""
    return {name: each for name, each in model.state_dict().items() if name.endswith("num_batches_tracked")}


EXAMPLES = 2
"""In the batch that a model is traced with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What no program tells: how data becomes its inputs, what its outputs are, and how many classes it tells apart.
    `calling`: None of a module that takes its inputs in the order of its ports, and gives its outputs so. `named`: what
    was asked for by name, None for its own outputs. `sites`: the names of those that its user named, None for all.
    `biasless`: layers that have no bias get none. `multiple`: what widths of channels are best a multiple of, where
    nobody says.
    """

    spec: InputSpec
    outputs: tuple[OutputPort, ...]
    classes: int
    calling: CallOrder | None = None
    named: NamedOutputs | None = None
    sites: tuple[str, ...] | None = None
    biasless: bool = False
    multiple: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptGroups:
    """What was kept of a dense program: by the name of a site its groups, as the dense program counts them.

    `sizes`: of all the dense program's sites; `digest`: of their table; `biases`: of layers that have none there.
    """

    sizes: Mapping[str, int]
    kept: Mapping[str, Index]
    biases: tuple[str, ...]
    digest: str
    any_batch: bool


@dataclass(slots=True, kw_only=True)
class TracedState:
    """What is known of a traced module. `plain`: its own class. `facts`: or what tells them of a dense model that runs,
    and is exported, as its library has it. `cut`: None of a dense model. `tracing`: once its sites were asked for; no
    copy shares it. `merging`: how tokens are merged, and `unmerged`, what it would run with all of them; None of one
    that merges nothing.
    """

    plain: type[nn.Module]
    facts: Facts | Callable[[nn.Module], Facts]
    cut: KeptGroups | None
    tracing: Tracing | None = None
    merging: Merging | None = None
    unmerged: fx.Graph | None = None
    notes: tuple[str, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> "TracedState":
        return replace(self, tracing=None)


class TracedModule(nn.Module):
    """What stands before a module's own class in one whose sites are looked for in its program. Its one name is none
    that a user's module would have.
    """

    known_to_corp_deploy: TracedState

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Constants of the program may be computed from the weights."""
        self.known_to_corp_deploy.tracing = None
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self.known_to_corp_deploy.tracing = None
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


def traced_state(model: nn.Module) -> TracedState:
    """Of a traced module. Raises BadInput for one that was not traced."""
    if isinstance(model, TracedModule):
        return model.known_to_corp_deploy
    raise BadInput(
        f"model is {type(model).__name__}, expected one of corp_deploy.load, which traces it, or of "
        "corp_deploy.sites(...)"
    )


def notes_on_module(model: nn.Module) -> tuple[str, ...]:
    """Return what was changed of a user's module before it was traced."""
    return traced_state(model).notes


def is_reduced(model: nn.Module) -> bool:
    """Whether anything was cut of it."""
    return traced_state(model).cut is not None


def assumes_size(model: nn.Module) -> bool:
    """Return whether a dense module of a user's doesn't say of which size its images are."""
    state = traced_state(model)
    is_users = state.cut is None and isinstance(state.facts, Facts) and state.facts.sites is None
    return is_users and not hasattr(model, "input_size") and not hasattr(model, "pretrained_cfg")


def facts_of(model: nn.Module) -> Facts:
    """All that is known beside the program."""
    facts = traced_state(model).facts
    return facts if isinstance(facts, Facts) else facts(model)


def is_librarys(model: nn.Module) -> bool:
    """Whether it is a dense model that runs, and is exported, as its library has it."""
    return not isinstance(traced_state(model).facts, Facts)


def input_spec(model: nn.Module) -> InputSpec:
    return facts_of(model).spec


def output_ports(model: nn.Module) -> tuple[OutputPort, ...]:
    """What a model gives, in its order."""
    return facts_of(model).outputs


def classes(model: nn.Module) -> int:
    """How many classes its output tells apart; 0 for one that is none of logits."""
    return facts_of(model).classes


def _wearing(
    model: nn.Module, plain: type[nn.Module], facts: Facts | Callable[[nn.Module], Facts], cut: KeptGroups | None
) -> TracedModule:
    calling = facts.calling if isinstance(facts, Facts) else None
    own = {} if calling is None else {"forward": build_forward(plain, calling)}
    kind: type[TracedModule] = type(plain.__name__, (TracedModule, plain), own)
    new = kind.__new__(kind)
    new.__dict__ |= vars(model)
    new.__dict__["known_to_corp_deploy"] = TracedState(plain=plain, facts=facts, cut=cut)
    return new


def traced_module(model: nn.Module, facts: Facts | Callable[[nn.Module], Facts]) -> TracedModule:
    """A dense module that is traced where its sites are asked for; it takes over the weights of the one given."""
    plain = traced_state(model).plain if isinstance(model, TracedModule) else type(model)
    return _wearing(model.eval(), plain, facts, None)


def narrowed_module(graph: fx.GraphModule, name: str, facts: Facts, cut: KeptGroups | None) -> TracedModule:
    """A program as a module that remembers what was cut of it; `name` of the dense one's class."""
    plain: type[nn.Module] = type(name, (nn.Module,), {"forward": type(graph).forward})
    return _wearing(graph, plain, replace(facts, calling=None), cut)


def merging_module(model: nn.Module, merging: Merging | None) -> TracedModule:
    """A narrowed module that shares its weights with one, but merges tokens so, or none."""
    state, own = traced_state(model), tracing(model)
    all_tokens = _all_tokens(model)
    graph = all_tokens if merging is None else build_merged_graph(own.program, own.added, merging)
    new = narrowed_module(graph, state.plain.__name__, facts_of(model), state.cut)
    if merging is not None:
        traced_state(new).merging, traced_state(new).unmerged = merging, all_tokens.graph
    return new


def tracing(model: nn.Module) -> Tracing:
    """The model's program and what is found there, made once. Raises BadInput where the module can't be traced."""
    state = traced_state(model)
    if state.tracing is None:
        facts = facts_of(model)
        with torch.inference_mode(False):  # constants are kept, and gradients asked for elsewhere
            inputs = build_plain_batch(facts.spec.ports, EXAMPLES, device_of(model))
            program = trace(model, inputs) if state.cut is None else _again(model, inputs, state.cut)
            added = add_zero_biases_(program)
            state.tracing = Tracing(
                program=program,
                added=added,
                biasless=frozenset(added if facts.biasless else ()),
                multiple=facts.multiple,
                merging=state.merging,
            )
    return state.tracing


def _all_tokens(model: nn.Module) -> fx.GraphModule:
    return fx.GraphModule(model, copy.deepcopy(traced_state(model).unmerged or model._graph))  # type: ignore[arg-type]


def _again(model: nn.Module, inputs: list[Tensor], cut: KeptGroups) -> Program:
    graph = _all_tokens(model)
    infer_sizes_(graph, inputs, any_batch=cut.any_batch)
    return Program(graph=graph, model=type(model).__name__, any_batch=cut.any_batch, folded=())
