"""A traced model's program, and what is known beside it, of timm's models as timm's configuration says."""

from torch import nn

from ground.ports import OutputPort

from . import timm_library
from .module_facts import Spec
from .traced_module import Facts, Tracing, traced_state, tracing_of


def input_spec(model: nn.Module) -> Spec:
    """Of timm's models as timm's configuration says, of others as they say or as they were tried."""
    facts = traced_state(model).facts
    return timm_library.image_spec(model, timm_library.configured_size(model)) if facts is None else facts.spec


def output_ports(model: nn.Module) -> tuple[OutputPort, ...]:
    facts = traced_state(model).facts
    return timm_library.output_ports(model) if facts is None else facts.outputs


def classes(model: nn.Module) -> int:
    """How many classes its output tells apart; 0 for one that is none of logits."""
    facts = traced_state(model).facts
    return timm_library.classes(model) if facts is None else facts.classes


def facts_of(model: nn.Module) -> Facts:
    """All that is known beside the program."""
    facts = traced_state(model).facts
    return facts or Facts(spec=input_spec(model), outputs=output_ports(model), classes=classes(model))


def tracing(model: nn.Module) -> Tracing:
    """The model's program and what is found there."""
    return tracing_of(model, input_spec(model).ports)
