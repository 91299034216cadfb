"""What is told of a model: its sites are found in the program that torch traces of it.

Their steps are the segments between the program's cuts. The first stream is the input itself, the last one the output
where a site stands behind the last cut; a map [B,C,H,W] is the stream [B,HW,C].
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, fx, nn

from calib.inputs import Inputs, tensors_by_name
from corp_deploy.spec.architecture import Architecture
from corp_deploy.spec.merging import Merging
from corp_deploy.spec.widths import HeadGeometry
from corp_deploy.traced.finding.attentions import find_blocks
from corp_deploy.traced.models.array_inputs import is_mask
from corp_deploy.traced.models.mergeable import Mergeable
from corp_deploy.traced.models.module import classes as classes
from corp_deploy.traced.models.module import facts_of as facts_of
from corp_deploy.traced.models.module import input_spec as input_spec
from corp_deploy.traced.models.module import (
    is_librarys,
    merging_module,
    replace_submodules,
    traced_module,
    traced_state,
)
from corp_deploy.traced.models.module import output_ports as output_ports
from corp_deploy.traced.models.module import tracing as tracing
from corp_deploy.traced.models.narrowed_model import narrow_model
from corp_deploy.traced.models.offered import sites_by_segment
from corp_deploy.traced.models.offered import sites_of as sites_of
from corp_deploy.traced.models.segments import Layout, ProgramSegment, TokenRows, layout_of
from corp_deploy.traced.models.sites import Site
from corp_deploy.traced.models.steps import Merge, OutputStep, SegmentStep, Step, StreamState, Unmerge
from corp_deploy.traced.narrowing.whole_removal import fill_empty_readers_
from corp_deploy.traced.programs.attention_masks import SDPA, SOFTMAX
from corp_deploy.traced.programs.exported import (
    build_module_tree,
    has_heads_to_pad,
    pad_uneven_heads,
    set_device_,
    spell_out_causal_attentions_,
    unify_types_,
)
from corp_deploy.traced.programs.program import operation
from corp_deploy.traced.programs.readers import Layer, layer_as_module, layers, remove_biases_, vocabulary_sizes
from ground.errors import BadInput

from . import timm_library
from .module_facts import facts_of_module
from .tokenizer import FILE as TOKENIZER
from .tokenizer import SequenceSpec, TextSpec, content_of_tokenizer

_WHOLE = (
    "its traced program takes several tensors that are no masks, or gives some that are of no one stream, so that none "
    "can be followed from block to block; leave --polish out"
)


def trace_model(model: nn.Module, architecture: Architecture) -> nn.Module:
    """A model of no other family as one whose sites are found in its program. Raises BadInput where what it takes or
    gives can't be told.
    """
    if architecture.family == "timm":
        if architecture.kwargs.get("img_size") is not None:
            timm_library.set_size_(model, architecture.kwargs["img_size"])
        return traced_module(model, timm_library.facts)
    model = model.float()  # statistics, repairs and rounding to other types start from float32
    return traced_module(model, facts_of_module(model, architecture.preprocessing))


def hooked_model(model: nn.Module) -> nn.Module:
    """What hears the model's sites while it runs."""
    return tracing(model).hooked[0]


def count_ids(model: nn.Module) -> dict[str, int]:
    """Of inputs that are looked up in tables, by their ports, how many rows there are."""
    return vocabulary_sizes(tracing(model).program)


def token_weights(model: nn.Module, inputs: Inputs) -> Tensor | None:
    """What its one mask [B,N] says, 0 for padding; None where it takes none, or several."""
    masks = [port.name for port in input_spec(model).ports if is_mask(port) and len(port.shape) == 1]
    return tensors_by_name(inputs)[masks[0]].float() if len(masks) == 1 else None


def layers_of(model: nn.Module, site: Site) -> dict[str, Layer]:
    """The layers that write or read a site's groups by name, as modules that share the model's own parameters."""
    own = tracing(model)
    touched = {span.name for span in (*site.groups.writers, *site.groups.readers)}
    return {
        layer.name: layer_as_module(own.program, replace(layer, bias="") if layer.bias in own.added else layer)
        for layer in layers(own.program)
        if layer.weight in touched and isinstance(own.program.tensor(layer.weight), nn.Parameter)
    }


def _layout_at(model: nn.Module, *, is_first: bool) -> Layout:
    own = tracing(model)
    if not own.segments:
        raise BadInput(f"{type(model).__name__}: {_WHOLE}")
    first, last = own.segments[0], own.segments[-1]
    return layout_of(first.before if is_first else last.after, input_spec(model).shape)


def steps(model: nn.Module) -> Iterator[SegmentStep | Merge | Unmerge]:
    """The segments of the program, the last one where a site stands there or several outputs are of what is behind it,
    and what becomes of tokens between them; none where no stream can be followed.
    """
    for segment, inside in _followed(model):
        yield from _steps_of(segment, inside, input_spec(model).shape)


def _followed(model: nn.Module) -> Iterator[tuple[ProgramSegment, tuple[str, ...]]]:
    own = tracing(model)
    for segment, inside in sites_by_segment(model).items():
        if inside or own.cut_outputs or segment is not own.segments[-1]:
            yield segment, inside


def _steps_of(
    segment: ProgramSegment, inside: tuple[str, ...], image: tuple[int, ...]
) -> Iterator[SegmentStep | Merge | Unmerge]:
    start, end = segment.start, segment.end
    if start.is_merged and not end.is_merged and end.raw is end.node:
        yield Unmerge(name=segment.name, gives_back=False)
    yield SegmentStep(module=TokenRows(segment, image), name=segment.name, sites=inside)
    if end.merge is not None:
        yield Merge(name=end.name, merge=end.merge)
    elif end.raw is not end.node:
        yield Unmerge(name=segment.name, gives_back=True)


def steps_to_outputs(model: nn.Module) -> Iterator[Step]:
    """With an outlet where outputs are of a stream in front of the last."""
    outlets = {cut_output.before: cut_output.name for cut_output in tracing(model).cut_outputs[:-1]}
    for segment, inside in _followed(model):
        yield from _steps_of(segment, inside, input_spec(model).shape)
        if (name := outlets.get(segment.end.node)) is not None:
            yield OutputStep(name=name)


def outputs_of_walk(model: nn.Module, walk: StreamState, inputs: Inputs) -> tuple[Tensor, ...]:
    """The outputs for what is behind the last step; of several without those at whose outlets the walk wasn't."""
    own, image, (_, *others) = tracing(model), input_spec(model).shape, tensors_by_name(inputs).values()
    if not own.cut_outputs:
        return (output_of_stream(model, walk.tokens.x, inputs),)
    at = {**dict(walk.kept), own.cut_outputs[-1].name: walk.tokens}
    by_number = {
        key: each
        for cut_output in own.cut_outputs
        if cut_output.name in at
        for key, each in cut_output(at[cut_output.name], image, others).items()
    }
    return tuple(by_number[number] for number in sorted(by_number))


def first_stream(model: nn.Module, inputs: Inputs) -> Tensor:
    """The first input itself. Raises BadInput where others than a mask stand beside it."""
    entering = _layout_at(model, is_first=True)
    x, *_ = tensors_by_name(inputs).values()
    return entering.rows(x)


def output_of_stream(model: nn.Module, x_BNC: Tensor, inputs: Inputs) -> Tensor:
    """Raises BadInput where the program gives several tensors."""
    leaving = _layout_at(model, is_first=False)
    last = tracing(model).segments[-1]
    if not sites_by_segment(model)[last]:
        x_BNC = TokenRows(last, input_spec(model).shape)(x_BNC, token_weights(model, inputs))
    return leaving.tensor(x_BNC)


def token_kinds(model: nn.Module) -> tuple[str, ...]:
    """Of the streams that attentions add to, where tokens can be merged; those in front are called class tokens."""
    found = tracing(model).mergeable
    if isinstance(found, str):
        return ()
    return (*["class"] * found.protected, *["patch"] * (found.tokens - found.protected))


def depth(model: nn.Module) -> int:
    """Sums that add attentions to a stream, else sites."""
    found = find_blocks(tracing(model).program)
    return len(sites_of(model).every) if isinstance(found, str) else len(found)


def merging_of(model: nn.Module) -> Merging | None:
    """None for a model that merges nothing."""
    return traced_state(model).merging


def merging_refusal(model: nn.Module) -> str:
    """Why its tokens can't be merged, or nothing: a schedule that suits one text would merge away all of another, and
    each token of a decoder says what comes next.
    """
    spec = input_spec(model)
    if isinstance(spec, TextSpec):
        return "a text encoder's tokens are not merged, since its texts are of different lengths"
    if isinstance(spec, SequenceSpec):
        return "a decoder's tokens are not merged, since each has logits of its own"
    found = tracing(model).mergeable
    return "" if isinstance(found, Mergeable) else found


def with_merging(model: nn.Module, merging: Merging | None) -> nn.Module:
    """A copy in eval mode whose program merges tokens so, or none. Raises BadInput where it can't."""
    if merging is None and merging_of(model) is None:
        return replace_submodules(model, {}).eval()
    if merging is not None and (reason := merging_refusal(model)):
        raise BadInput(f"token merging: {reason}; leave --merge-tokens out")
    named = facts_of(model).named
    if merging is not None and named is not None:
        if merging.how == "drop" and named.has_patches:  # merged ones are given back to each source
            raise BadInput(
                f"merging: {named.describe()} have a vector for each patch, and those that were dropped have none; "
                "merge instead"
            )
        merging = replace(merging, unmerged=merging.unmerged or (named.has_patches and merging.how == "merge"))
    program = replace_submodules(model if traced_state(model).cut is not None else narrow_model(model, {}, {}), {})
    return merging_module(program, merging).eval().requires_grad_(False)


def counted_form(model: nn.Module) -> nn.Module:
    """What is run to count products: a dense model of timm's itself, else the program on meta, which looks at no
    values.
    """
    graph = _program(model)
    if graph is None:
        return model
    set_device_(graph, torch.device("meta"))
    for module in graph.modules():
        vars(module).update({name: each.to("meta") for name, each in vars(module).items() if isinstance(each, Tensor)})
    return graph


def _program(model: nn.Module, *, is_padded: bool = False, is_exported: bool = False) -> fx.GraphModule | None:
    """A copy of what runs at any batch, without biases that the model hasn't; None of timm's dense models, unless they
    compute anew for every batch what is a constant: engines fuse attention with constants alone.
    """
    is_own = is_librarys(model)
    if (is_own and not is_exported) or not (program := tracing(model).running).any_batch:
        return None
    has_attention = any(operation(node) in (SDPA, *SOFTMAX) for node in program.nodes)
    if is_own and not (program.folded and has_attention):
        return None
    graph = copy.deepcopy(pad_uneven_heads(program) if is_padded else program.graph)
    remove_biases_(graph, tracing(model).added)
    return graph


def has_uneven_heads(model: nn.Module) -> bool:
    """Whether queries and keys are of another width than values anywhere."""
    return has_heads_to_pad(tracing(model).running)


def exportable(model: nn.Module, *, geometry: HeadGeometry | None = None) -> nn.Module:
    """A copy in eval mode: of most of timm's dense models as it is, of others the program, which runs in any type, as
    modules by the names of the model's own: the nodes of a graph are named after them, and norms are known. Of a
    reduced one queries and keys are as wide as values, with zeros behind, unless they are to be ragged.
    """
    state = traced_state(model)
    graph = _program(model, is_padded=state.cut is not None and geometry != "ragged", is_exported=True)
    if graph is None:
        return replace_submodules(model, {}).eval().requires_grad_(False)
    spell_out_causal_attentions_(graph)
    fill_empty_readers_(graph)
    unify_types_(graph)
    return build_module_tree(graph, graph.graph).requires_grad_(False)


def extra_files(model: nn.Module) -> Mapping[str, str]:
    """The tokenizer of a model that takes texts."""
    spec = input_spec(model)
    return {TOKENIZER: spec.tokenizer_json} if isinstance(spec, TextSpec | SequenceSpec) else {}


def load_extra_files_(model: nn.Module, directory: Path) -> None:
    """Give a model just built the tokenizer of its directory. Raises BadInput for another one or none."""
    state, spec = traced_state(model), input_spec(model)
    if isinstance(spec, TextSpec | SequenceSpec):
        content = content_of_tokenizer(directory, sha256=spec.tokenization.sha256)
        state.facts = replace(facts_of(model), spec=replace(spec, tokenizer_json=content))


def adapted_state(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict brought to this model by the filter that stands beside its class in timm, where one does."""
    return timm_library.filter_state(model, traced_state(model).plain.__module__, state)


def classes_of_weights(model: nn.Module, state: Mapping[str, Tensor]) -> int | None:
    """Return the number of classes in a state dict of this timm model; None where it has no classifier."""
    return timm_library.count_classes(model, traced_state(model).plain.__module__, state)
