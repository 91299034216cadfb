"""config.json of a model directory, typed where it is read."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ground.errors import BadInput
from ground.quantity import Count, Real

_WIDTH, _SCALE = Count(low=1, high=2**20), Real(low=0.0, high=1e6, low_open=True)
GEOMETRIES = ("square", "padded", "ragged")

Holds = Callable[[Any], bool]


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_geometry(value: object) -> bool:
    return isinstance(value, str) and value in GEOMETRIES


_MLP: Mapping[str, Holds] = {"hidden": _WIDTH.holds, "input_bias": _is_flag, "output_bias": _is_flag}
_ATTENTION: Mapping[str, Holds] = {
    "heads": _WIDTH.holds,
    "qk": _WIDTH.holds,
    "v": _WIDTH.holds,
    "scale": _SCALE.holds,
    "geometry": _is_geometry,
    "qkv_bias": _is_flag,
    "proj_bias": _is_flag,
}
_MAY_LACK = ("input_bias", "qkv_bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """How the dense model is built, the widths of its sites, what its input is, and what its weights' file is."""

    family: str
    name: str
    kwargs: Mapping[str, Any]
    preprocessing: Mapping[str, Any]
    sites: Mapping[str, Mapping[str, Any]]
    weights_sha256: str
    lineage: Mapping[str, Any]


def _entry(config: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
    if key not in config:
        raise BadInput(f"{where}: no entry {key!r}; the file was edited or cut off, write the model again")
    if not isinstance(config[key], kind):
        raise BadInput(f"{where}: {key} is {str(config[key])[:100]!r}, expected {_WORDS[kind]}")
    return config[key]


_WORDS: dict[type, str] = {dict: "an object", str: "a text"}


def _checked_site(name: str, site: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(site, dict):
        raise BadInput(f"{where}: {name[:100]} is {str(site)[:100]!r}, expected an object")
    for key, holds in (_MLP if "hidden" in site else _ATTENTION).items():
        if key in _MAY_LACK and key not in site:
            continue
        if key not in site or not holds(site[key]):
            got = str(site.get(key, "missing"))[:100]
            raise BadInput(f"{where}: {name[:100]}.{key} is {got!r}, which can't be; write the model again")
    if site.get("geometry") == "square" and site["qk"] != site["v"]:
        raise BadInput(f"{where}: {name[:100]} is square, but qk is {site['qk']} and v is {site['v']}")
    return site


def model_config_from_json(config: Mapping[str, Any], *, where: str) -> ModelConfig:
    """Raises BadInput, naming the entry, for one that is missing, of another type or impossible."""
    family = config.get("family", "timm")
    if not isinstance(family, str):
        raise BadInput(f"{where}: family is {str(family)[:100]!r}, expected a text")
    built = _entry(config, "timm" if family == "timm" else "architecture", dict, where)
    given = _entry(config, "input", dict, where)
    digest = _entry(config, "weights_sha256", str, where)
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise BadInput(f"{where}: weights_sha256 is {digest[:100]!r}, expected 64 hex digits")
    sites = _entry(config, "sites", dict, where)
    return ModelConfig(
        family=family,
        name=_entry(built, "name", str, where),
        kwargs=_entry(built, "kwargs", dict, where),
        preprocessing=_entry(given, "preprocessing", dict, where),
        sites={name: _checked_site(name, site, where) for name, site in sites.items()},
        weights_sha256=digest,
        lineage=_entry(config, "lineage", dict, where),
    )
