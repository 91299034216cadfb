"""Traced models of all families: their steps between cuts, merging of tokens, exportable forms and extra files.

A step runs the segment of the program between two cuts. The first stream is the input itself; the last one is the
output where a site lies after the last cut. A map [B,C,H,W] is the stream [B,HW,C].
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, fx, nn

from calib.inputs import Inputs, tensors_by_name
from corp_deploy.spec.architecture import Architecture
from corp_deploy.spec.merging import How, Merging
from corp_deploy.spec.widths import HeadGeometry
from corp_deploy.traced.finding.attentions import find_blocks
from corp_deploy.traced.models.array_inputs import is_mask
from corp_deploy.traced.models.mergeable import Mergeable
from corp_deploy.traced.models.mlp_merging import TokenMlp
from corp_deploy.traced.models.module import (
    TracedModule,
    is_librarys,
    merging_module,
    replace_submodules,
    traced_module,
    traced_state,
)
from corp_deploy.traced.models.module import classes as classes
from corp_deploy.traced.models.module import facts_of as facts_of
from corp_deploy.traced.models.module import input_spec as input_spec
from corp_deploy.traced.models.module import output_ports as output_ports
from corp_deploy.traced.models.module import tracing as tracing
from corp_deploy.traced.models.narrowed_model import narrow_model
from corp_deploy.traced.models.offered import sites_by_segment
from corp_deploy.traced.models.offered import sites_of as sites_of
from corp_deploy.traced.models.segments import Layout, TokenRows, layout_of
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
from corp_deploy.traced.programs.readers import remove_biases_, vocabulary_sizes
from ground.errors import BadInput

from . import timm_library
from .module_facts import facts_of_module
from .tokenizer import FILE as TOKENIZER
from .tokenizer import SequenceSpec, TextSpec, content_of_tokenizer

_NO_STREAM = (
    "its traced program takes several tensors that are no masks, or its outputs don't come from one stream, so that no "
    "stream can be followed from block to block; leave --polish out"
)


def trace_model(model: nn.Module, architecture: Architecture) -> nn.Module:
    """Return the traced model of a family's module. Raises BadInput where its inputs or outputs can't be found."""
    if architecture.family == "timm":
        if architecture.kwargs.get("img_size") is not None:
            timm_library.set_size_(model, architecture.kwargs["img_size"])
        return traced_module(model, timm_library.facts)
    model = model.float()  # statistics, repairs and rounding to other types start from float32
    return traced_module(model, facts_of_module(model, architecture.preprocessing))


def hooked_model(model: nn.Module) -> nn.Module:
    """Return the module that runs the model's program, with a submodule at every tensor that a tap observes."""
    return tracing(model).hooked[0]


def count_ids(model: nn.Module) -> dict[str, int]:
    """Return the number of rows of the table in which each input of ids is looked up, by the input's name."""
    return vocabulary_sizes(tracing(model).program)


def token_weights(model: nn.Module, inputs: Inputs) -> Tensor | None:
    """Return the mask [B,N] of the inputs as weights, 0 for padding; None where the model takes none or several."""
    masks = [port.name for port in input_spec(model).ports if is_mask(port) and len(port.shape) == 1]
    return tensors_by_name(inputs)[masks[0]].float() if len(masks) == 1 else None


def _layout_at(model: nn.Module, *, is_first: bool) -> Layout:
    own = tracing(model)
    if not own.segments:
        raise BadInput(f"{type(model).__name__}: {_NO_STREAM}")
    first, last = own.segments[0], own.segments[-1]
    return layout_of(first.before if is_first else last.after, input_spec(model).shape)


def steps(model: nn.Module) -> Iterator[SegmentStep | Merge | Unmerge]:
    """Yield the segments of the program and the merging of tokens between them; nothing where no stream is followed.

    The last segment is left out where it has no site and outputs are not computed from cuts.
    """
    return (step for step in steps_to_outputs(model) if not isinstance(step, OutputStep))


def steps_to_outputs(model: nn.Module) -> Iterator[Step]:
    """Yield the steps of `steps`, and an output step after each stream but the last that outputs are computed from."""
    own, shape = tracing(model), input_spec(model).shape
    outlets = {cut_output.before: cut_output.name for cut_output in own.cut_outputs[:-1]}
    for segment, inside in sites_by_segment(model).items():
        if not (inside or own.cut_outputs or segment is not own.segments[-1]):
            continue
        start, end = segment.start, segment.end
        if start.is_merged and not end.is_merged and end.raw is end.node:
            yield Unmerge(name=segment.name, gives_back=False)
        yield SegmentStep(module=TokenRows(segment, shape), name=segment.name, sites=inside)
        if end.merge is not None:
            yield Merge(name=end.name, merge=end.merge)
        elif end.raw is not end.node:
            yield Unmerge(name=segment.name, gives_back=True)
        if (name := outlets.get(end.node)) is not None:
            yield OutputStep(name=name)


def outputs_of_walk(model: nn.Module, walk: StreamState, inputs: Inputs) -> tuple[Tensor, ...]:
    """Return the model's outputs from the last stream of a walk and the streams that it kept for output steps.

    Outputs of output steps that the walk did not pass are left out.
    """
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
    """Return the first input as a stream [B,N,C]. Raises BadInput where the program has no stream to follow."""
    entering = _layout_at(model, is_first=True)
    x, *_ = tensors_by_name(inputs).values()
    return entering.rows(x)


def output_of_stream(model: nn.Module, x_BNC: Tensor, inputs: Inputs) -> Tensor:
    """Return the output computed from the last stream. Raises BadInput where the program has no stream to follow."""
    leaving = _layout_at(model, is_first=False)
    last = tracing(model).segments[-1]
    if not sites_by_segment(model)[last]:
        x_BNC = TokenRows(last, input_spec(model).shape)(x_BNC, token_weights(model, inputs))
    return leaving.tensor(x_BNC)


def token_kinds(model: nn.Module) -> tuple[str, ...]:
    """Return the kinds of tokens where they can be merged: `class` for protected tokens, then `patch`; else nothing."""
    found = tracing(model).mergeable
    if isinstance(found, str):
        return ()
    return (*["class"] * found.protected, *["patch"] * (found.tokens - found.protected))


def depth(model: nn.Module) -> int:
    """Return the number of blocks, counted by their attentions; of a model without blocks the number of sites."""
    found = find_blocks(tracing(model).program)
    return len(sites_of(model).every) if isinstance(found, str) else len(found)


def merging_of(model: nn.Module) -> Merging | None:
    """Return the token merging of a model; None if it merges nothing."""
    return traced_state(model).merging


def token_mlps(model: nn.Module) -> tuple[TokenMlp, ...]:
    """Return the MLPs for which a model's tokens can be merged."""
    return tracing(model).token_mlps


def origin_of(model: nn.Module) -> nn.Module | None:
    """Return the model without merging of one that merges tokens for MLPs alone; None for any other model."""
    return traced_state(model).origin if isinstance(model, TracedModule) else None


def merging_refusal(model: nn.Module, how: How = "merge") -> str:
    """Return why a model's tokens can't be merged in this way, or an empty string."""
    spec = input_spec(model)
    if isinstance(spec, TextSpec):
        return "a text encoder's tokens are not merged, since its texts are of different lengths"
    if isinstance(spec, SequenceSpec):
        return "a decoder's tokens are not merged, since each has logits of its own"
    if how == "mlp":
        return "" if token_mlps(model) else "no MLP of linear layers over tokens is added to a residual stream"
    found = tracing(model).mergeable
    if isinstance(found, Mergeable):
        return ""
    return f"{found}; --merge-how mlp merges tokens for MLPs alone" if token_mlps(model) else found


def with_merging(model: nn.Module, merging: Merging | None) -> nn.Module:
    """Return a copy in eval mode that merges tokens like this, or merges none. Raises BadInput where that can't be."""
    if merging is None and merging_of(model) is None:
        return replace_submodules(model, {}).eval()
    if merging is not None and (reason := merging_refusal(model, merging.how)):
        raise BadInput(f"token merging: {reason}; leave --merge-tokens out")
    named = facts_of(model).named
    if merging is not None and merging.in_stream and named is not None:
        if merging.how == "drop" and named.has_patches:  # merged tokens are copied back to each source, dropped are not
            raise BadInput(
                f"merging: {named.describe()} have a vector for each patch, and those that were dropped have none; "
                "merge instead"
            )
        merging = replace(merging, unmerged=merging.unmerged or (named.has_patches and merging.how == "merge"))
    program = replace_submodules(model if traced_state(model).cut is not None else narrow_model(model, {}, {}), {})
    merged = merging_module(program, merging).eval().requires_grad_(False)
    if traced_state(merged).origin is not None:
        traced_state(merged).origin = model
    return merged


def counted_form(model: nn.Module) -> nn.Module:
    """Return the module to count products in: timm's dense model or one of fixed batch, else the program on meta."""
    graph = _program(model)
    if graph is None:
        return model
    set_device_(graph, torch.device("meta"))
    for module in graph.modules():
        vars(module).update({name: each.to("meta") for name, each in vars(module).items() if isinstance(each, Tensor)})
    return graph


def _program(model: nn.Module, *, is_padded: bool = False, is_exported: bool = False) -> fx.GraphModule | None:
    """Return a copy of the program to run in place of the model, without added biases; None if the model itself runs.

    The model runs if its program is for one batch size, and if it is timm's dense model. To be exported, even that one
    is replaced if its program has attention and folded constants: engines fuse attention with constant masks only.
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
    """Return whether any attention has heads that can be padded, with queries and keys unlike values in width."""
    return has_heads_to_pad(tracing(model).running)


def exportable(model: nn.Module, *, geometry: HeadGeometry | None = None) -> nn.Module:
    """Return a copy in eval mode for export: most of timm's dense models unchanged, other models as their program.

    The program runs in any floating type. It consists of modules with the names of the model's own, after which the
    nodes of a graph are named and by which norms are found. Queries and keys of a reduced model are padded with zeros
    to the width of values, unless the geometry is ragged.
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
    """Return the content of the files beside a model's weights, by name: the tokenizer of a model of texts."""
    spec = input_spec(model)
    return {TOKENIZER: spec.tokenizer_json} if isinstance(spec, TextSpec | SequenceSpec) else {}


def load_extra_files_(model: nn.Module, directory: Path) -> None:
    """Set the tokenizer of a model from its directory. Raises BadInput where it is missing or was changed."""
    state, spec = traced_state(model), input_spec(model)
    if isinstance(spec, TextSpec | SequenceSpec):
        content = content_of_tokenizer(directory, sha256=spec.tokenization.sha256)
        state.facts = replace(facts_of(model), spec=replace(spec, tokenizer_json=content))
