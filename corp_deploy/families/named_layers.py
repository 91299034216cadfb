"""Sites between layers that the user names, chosen from all sites that are found in a module's program."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from corp_deploy.spec.architecture import Preprocessing
from corp_deploy.traced.finding.site_groups import SiteGroups, Span
from corp_deploy.traced.models.module import TracedModule, Tracing, traced_module, traced_state, tracing
from corp_deploy.traced.models.offered import sites_by_name, traced_sites
from corp_deploy.traced.models.pairs import TracedPairs
from corp_deploy.traced.models.sites import Sites
from corp_deploy.traced.programs.attention_masks import score_factor
from ground.errors import BadInput
from ground.ports import Role

from .module_facts import facts_of_images
from .plain_module import copy_of, plain_module_, require_module, unwrapped

CLOSE = 1e-4
EXPECTED_MLP = 'the names of its linear layers inside it: ("fc1", "fc2"), or ("gate", "fc2", "up") of a gated one'
EXPECTED_ATTENTION = '{"qkv": NAME, "proj": NAME, "heads": N}, and "scale" to compare it with the program\'s'


def with_named_sites(
    model: nn.Module,
    *,
    inputs: tuple[int, int, int],
    mlps: Mapping[str, tuple[str, ...]],
    attentions: Mapping[str, Mapping[str, Any]],
    role: Role,
    preprocessing: Preprocessing,
) -> TracedModule:
    """Return a traced copy of a module with only the named sites, as `corp_deploy.sites` describes it.

    Raises BadInput for names of no layers, for layers between which the program has no such site, and for a module that
    can't be traced.
    """
    if not mlps and not attentions:
        raise BadInput("sites: none named; give mlps or attentions")
    with torch.device("cpu"), torch.inference_mode(False):
        require_module(model, "sites: got")
        copied = plain_module_(copy_of(unwrapped(model)))[0].float().eval()
        facts = facts_of_images(copied, inputs, preprocessing, role)
        traced = traced_module(copied, facts)
        own = tracing(traced)
        found = _Found(traced, own, traced_sites(own), sites_by_name(own))
        chosen = {name for path, layers in mlps.items() for name in found.of_mlp(path, layers)}
        chosen |= {name for path, entry in attentions.items() for name in found.of_attention(path, entry)}
        traced_state(traced).facts = replace(facts, sites=tuple(sorted(chosen)))
    return traced


@dataclass(frozen=True, slots=True)
class _Found:
    """All sites of a module's program, looked up by the layers around them."""

    model: nn.Module
    own: Tracing
    sites: Sites
    named: Mapping[str, SiteGroups]

    def of_mlp(self, path: str, layers: tuple[str, ...]) -> list[str]:
        """Return the names of the sites between an MLP's layers."""
        if len(layers) not in (2, 3) or not all(isinstance(layer, str) for layer in layers):
            raise BadInput(f"{_where(path)}: got {layers!r:.150}, expected {EXPECTED_MLP}")
        first, last, *up = (self._linear(path, layer) for layer in layers)
        return self._between(path, ("channels", "gated channels"), (first, *up), last)

    def of_attention(self, path: str, entry: Mapping[str, Any]) -> list[str]:
        """Return the names of an attention's values, and of its queries and keys where these are sites of their own."""
        if not {"qkv", "proj", "heads"} <= entry.keys() <= {"qkv", "proj", "heads", "scale"}:
            raise BadInput(f"{_where(path)}: got {dict(entry)!r:.150}, expected {EXPECTED_ATTENTION}")
        qkv, proj = (self._linear(path, entry[part]) for part in ("qkv", "proj"))
        values = self._between(path, ("values",), (qkv,), proj)
        heads = sum(groups.parts for name, groups in self.named.items() if name in values)
        if entry["heads"] != heads:
            raise BadInput(f"{_where(path)}: got {entry['heads']!r:.50} heads, the program has {heads}; give {heads}")
        pairs = [name for name, groups in self.named.items() if _is_written(groups, ("queries and keys",), (qkv,))]
        if (scale := entry.get("scale")) is not None:
            own = [_scale(each) for each in self.sites.every if each.name in pairs and isinstance(each, TracedPairs)]
            stated = float(scale) if isinstance(scale, int | float) else math.nan
            if not own or any(each is None or not math.isclose(each, stated, rel_tol=CLOSE) for each in own):
                by = f"by {own[0]:.6g}" if own and own[0] is not None else "otherwise than by one number"
                raise BadInput(f"{_where(path)}: got scale {scale!r:.50}, the program scales {by}; leave `scale` out")
        return [*values, *pairs]

    def _linear(self, path: str, layer: str) -> str:
        name = f"{path}.{layer}" if path else layer
        try:
            module = self.model.get_submodule(name)
        except AttributeError:
            peers = [each for each, _ in self.model.named_modules() if each and each.count(".") == name.count(".")][:4]
            raise BadInput(f"sites: the model has no module {name!r:.150}; it has such as {', '.join(peers)}") from None
        if not isinstance(module, nn.Linear):
            raise BadInput(f"sites: {name} is {type(module).__name__}, expected a linear layer")
        return name

    def _between(self, path: str, kinds: Sequence[str], firsts: Sequence[str], last: str) -> list[str]:
        """Return the names of sites of these kinds that all first layers write and the last layer reads."""
        written = {name: groups for name, groups in self.named.items() if _is_written(groups, kinds, firsts)}
        names = [name for name, groups in written.items() if f"{last}.weight" in _names(groups.readers)]
        reasons = [each.reason for each in self.sites.refused if each.name in names]
        if reasons or not names:
            reason = reasons[0] if reasons else self._why(firsts, last)
            raise BadInput(
                f"{_where(path)}: no {kinds[0]} between {firsts[0]} and {last} can be reduced: {reason}; leave it out"
            )
        return names

    def _why(self, firsts: Sequence[str], last: str) -> str:
        if uncalled := [each for each in (*firsts, last) if f"{each}.weight" not in self.own.uses]:
            return f"{uncalled[0]} is never called"
        stays = {each.name: each.reason for each in self.own.analysis.stays}
        if reasons := [stays[f"{each}.weight"] for each in firsts if f"{each}.weight" in stays]:
            return reasons[0]
        reached_sites = [groups for groups in self.named.values() if f"{firsts[0]}.weight" in _names(groups.writers)]
        readers = {name.removesuffix(".weight") for groups in reached_sites for name in _names(groups.readers)}
        kinds = dict.fromkeys(groups.kind for groups in reached_sites)
        return f"{firsts[0]} gives {' and '.join(kinds)}, which {', '.join(sorted(readers))} reads"


def _where(path: str) -> str:
    return f"sites: {path or 'the model'}"


def _names(spans: Sequence[Span]) -> set[str]:
    return {span.name for span in spans}


def _is_written(groups: SiteGroups, kinds: Sequence[str], layers: Sequence[str]) -> bool:
    return groups.kind in kinds and {f"{layer}.weight" for layer in layers} <= _names(groups.writers)


def _scale(site: TracedPairs) -> float | None:
    """Return the factor of an attention's products of queries and keys; None if unknown or not one for all heads."""
    by_product = score_factor(site.program, site.tracing.by_node[site.product])
    scales = [side.scale_HTD.flatten() for side in site.repair.sides if site.repair.mixing == "free"]
    if by_product is None or not scales or any(not torch.allclose(each, each[:1]) for each in scales):
        return None
    return by_product * math.prod(float(each[0]) for each in scales)
