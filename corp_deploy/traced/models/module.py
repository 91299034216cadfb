"""Modules whose sites are found in their traced programs, dense or narrowed, with their own class and weight names."""

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
    """Return the device of the model's weights, the CPU if it has none."""
    return next((each.device for each in model.parameters()), torch.device("cpu"))


def replace_submodules(model: nn.Module, modules: Mapping[str, nn.Module]) -> nn.Module:
    """Return a copy of the model with the named submodules replaced."""
    memo: dict[int, Any] = {id(model.get_submodule(name)): new for name, new in modules.items()}
    return copy.deepcopy(model, memo)


MOST_PARAMETERS = 20_000_000_000
"""The largest number of parameters of a model that is built."""


def refuse_larger(build: Callable[[], nn.Module], what: str) -> None:
    """Build a model on the meta device, and raise BadInput if it has more than MOST_PARAMETERS; `what`: its name."""
    with torch.device("meta"):
        count = parameters(build())
    if count > MOST_PARAMETERS:
        raise BadInput(f"{what}: {count:,} parameters; {MOST_PARAMETERS:,} at most are built")


def parameters(*modules: nn.Module) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def batch_counters(model: nn.Module) -> dict[str, Tensor]:
    """Return, by name, the buffers num_batches_tracked, which older files lack and evaluation never reads."""
    return {name: each for name, each in model.state_dict().items() if name.endswith("num_batches_tracked")}


EXAMPLES = 2
"""The batch size that a model is traced with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts about a model that its program lacks: its inputs' preparation, its outputs and its number of classes.

    `calling`: None for a module that takes and gives tensors in the order of its ports. `named`: the outputs that were
    asked for by name, None for its own. `sites`: the names of the sites that its user chose, None for all. `biasless`:
    layers without a bias get none. `multiple`: the default multiple for widths of channels.
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
    """The kept groups of a dense program's sites by name, numbered as in the dense program.

    `sizes`: the sizes of all its sites. `digest`: see digest_of. `biases`: the names of those that narrowing added.
    """

    sizes: Mapping[str, int]
    kept: Mapping[str, Index]
    biases: tuple[str, ...]
    digest: str
    any_batch: bool


@dataclass(slots=True, kw_only=True)
class TracedState:
    """The state of a traced module.

    `plain`: its own class. `facts`: a function for a dense model that runs, and is exported, as its library has it.
    `cut`: None for a dense model. `tracing`: None until it is needed; copies don't share it. `merging`: how tokens are
    merged, with the graph for all tokens in `unmerged`; None if no tokens are. `origin`: the model that tokens are
    merged in for MLPs alone, with which moments are taken.
    """

    plain: type[nn.Module]
    facts: Facts | Callable[[nn.Module], Facts]
    cut: KeptGroups | None
    tracing: Tracing | None = None
    merging: Merging | None = None
    unmerged: fx.Graph | None = None
    origin: nn.Module | None = None
    notes: tuple[str, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> "TracedState":
        return replace(self, tracing=None)


class TracedModule(nn.Module):
    """A base put before a module's own class, with its TracedState in an attribute that no user's module has."""

    known_to_corp_deploy: TracedState

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        self.known_to_corp_deploy.tracing = None  # the program's constants may depend on the weights
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self.known_to_corp_deploy.tracing = None
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


def traced_state(model: nn.Module) -> TracedState:
    """Return a traced module's state; raise BadInput for any other module."""
    if isinstance(model, TracedModule):
        return model.known_to_corp_deploy
    raise BadInput(
        f"model is {type(model).__name__}, expected one of corp_deploy.load, which traces it, or of "
        "corp_deploy.sites(...)"
    )


def notes_on_module(model: nn.Module) -> tuple[str, ...]:
    """Return notes on the changes to a user's module before it was traced."""
    return traced_state(model).notes


def is_reduced(model: nn.Module) -> bool:
    return traced_state(model).cut is not None


def assumes_size(model: nn.Module) -> bool:
    """Check for a user's dense module without chosen sites, `input_size` and `pretrained_cfg`."""
    state = traced_state(model)
    is_users = state.cut is None and isinstance(state.facts, Facts) and state.facts.sites is None
    return is_users and not hasattr(model, "input_size") and not hasattr(model, "pretrained_cfg")


def facts_of(model: nn.Module) -> Facts:
    facts = traced_state(model).facts
    return facts if isinstance(facts, Facts) else facts(model)


def is_librarys(model: nn.Module) -> bool:
    """Check for a dense model that runs, and is exported, as its library has it."""
    return not isinstance(traced_state(model).facts, Facts)


def input_spec(model: nn.Module) -> InputSpec:
    return facts_of(model).spec


def output_ports(model: nn.Module) -> tuple[OutputPort, ...]:
    return facts_of(model).outputs


def classes(model: nn.Module) -> int:
    """Return the number of classes of a model's logits; 0 for a model without logits."""
    return facts_of(model).classes


def _with_traced_class(
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
    """Turn a dense module into one that is traced when its sites are needed; it takes over the module's weights."""
    plain = traced_state(model).plain if isinstance(model, TracedModule) else type(model)
    return _with_traced_class(model.eval(), plain, facts, None)


def narrowed_module(graph: fx.GraphModule, name: str, facts: Facts, cut: KeptGroups | None) -> TracedModule:
    """Turn a program into a module that records the kept groups; `name` is that of the dense model's class."""
    plain: type[nn.Module] = type(name, (nn.Module,), {"forward": type(graph).forward})
    return _with_traced_class(graph, plain, replace(facts, calling=None), cut)


def merging_module(model: nn.Module, merging: Merging | None) -> TracedModule:
    """Return a module that shares the model's weights and merges tokens, or computes all if `merging` is None."""
    state, own = traced_state(model), tracing(model)
    all_tokens = _all_tokens(model)
    graph = all_tokens if merging is None else build_merged_graph(own.program, own.added, merging)
    new = narrowed_module(graph, state.plain.__name__, facts_of(model), state.cut)
    if merging is not None:
        traced_state(new).merging, traced_state(new).unmerged = merging, all_tokens.graph
        traced_state(new).origin = None if merging.in_stream else model
    return new


def tracing(model: nn.Module) -> Tracing:
    """Return the model's tracing, made once; raise BadInput if the module can't be traced."""
    state = traced_state(model)
    if state.tracing is None:
        facts = facts_of(model)
        with torch.inference_mode(False):  # the program's constants take part in gradients later
            inputs = build_plain_batch(facts.spec.ports, EXAMPLES, device_of(model))
            program = trace(model, inputs) if state.cut is None else _program_of_narrowed(model, inputs, state.cut)
            added = add_zero_biases_(program)
            state.tracing = Tracing(
                program=program,
                added=added,
                biasless=frozenset(added if facts.biasless else ()),
                multiple=facts.multiple,
                **{"merging" if state.merging is None or state.merging.in_stream else "mlp_merging": state.merging},
            )
    return state.tracing


def _all_tokens(model: nn.Module) -> fx.GraphModule:
    return fx.GraphModule(model, copy.deepcopy(traced_state(model).unmerged or model._graph))  # type: ignore[arg-type]


def _program_of_narrowed(model: nn.Module, inputs: list[Tensor], cut: KeptGroups) -> Program:
    graph = _all_tokens(model)
    infer_sizes_(graph, inputs, any_batch=cut.any_batch)
    return Program(graph=graph, model=type(model).__name__, any_batch=cut.any_batch, folded=())
