"""Moments <-> one safetensors file: versioned, checksummed, read site by site."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ground.errors import BadInput
from ground.files import regular, replacing

from .moments import ChannelMoments, HeadMoments, Moments, SiteMoments

KIND = "calib.moments"
VERSION = 1
HEADER = "calib"
IMAGE_IDS = "image_ids"
_TYPES: Mapping[str, type[SiteMoments]] = {"mlp": ChannelMoments, "attention": HeadMoments}
_REMEDY = "run calibrate again"


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().data).hexdigest()


def _flat(moments: Moments) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Tensors by `site/field`, and per site what is no tensor."""
    tensors = {IMAGE_IDS: moments.image_ids}
    sites: dict[str, dict[str, Any]] = {}
    for name, site in moments.sites.items():
        sites[name] = {"type": "mlp" if isinstance(site, ChannelMoments) else "attention"}
        for field in fields(site):
            value = getattr(site, field.name)
            if isinstance(value, Tensor):
                tensors[f"{name}/{field.name}"] = value.contiguous()
            elif value is not None:
                sites[name][field.name] = value
    return tensors, sites


def _signed(header: dict[str, Any]) -> str:
    """One JSON text: safetensors keeps no order among several entries, and equal moments are to give equal bytes."""
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()
    return json.dumps(header | {"header_sha256": digest}, sort_keys=True)


def save(moments: Moments, path: Path) -> None:
    """Writes `path`, whole or not at all; the same moments give the same bytes."""
    tensors, sites = _flat(moments)
    header = {
        "kind": KIND,
        "version": VERSION,
        "images": moments.images,
        "lineage": dict(moments.lineage),
        "order": list(sites),
        "sites": sites,
        "sha256": {name: _sha256(tensor) for name, tensor in tensors.items()},
    }
    with replacing(path) as temporary:
        save_file(tensors, temporary, metadata={HEADER: _signed(header)})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    images: int
    lineage: dict[str, str]
    sites: dict[str, dict[str, Any]]
    sha256: dict[str, str]


def _opened(path: Path) -> Any:
    try:
        return safe_open(regular(path), framework="pt")
    except FileNotFoundError as error:
        raise BadInput(f"{path}: no such file, expected moments written by calibrate") from error
    except (SafetensorError, OSError) as error:
        raise BadInput(
            f"{path}: not a whole safetensors file ({error}); it is truncated or foreign: {_REMEDY}"
        ) from error


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _read_header(path: Path) -> _Header:
    with _opened(path) as file:
        text = (file.metadata() or {}).get(HEADER, "{}")
    header: dict[str, Any] = _json_object(text)
    if header.get("kind") != KIND:
        raise BadInput(f"{path}: kind is {header.get('kind')!r:.80}, expected {KIND!r}, as calibrate writes")
    if header.get("version") != VERSION:
        raise BadInput(f"{path}: moments version {header.get('version')!r}, expected {VERSION}; {_REMEDY}")
    if _signed({name: value for name, value in header.items() if name != "header_sha256"}) != text:
        raise BadInput(f"{path}: its header does not match its checksum; the file is damaged: {_REMEDY}")
    _require_types(path, header)
    sites = {name: header["sites"][name] for name in header["order"]}
    return _Header(images=header["images"], lineage=header["lineage"], sites=sites, sha256=header["sha256"])


def _texts(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())


def _require_types(path: Path, header: Mapping[str, Any]) -> None:
    """Raise BadInput for a header that is signed, but not one that `save` writes."""
    order, sites, images = header.get("order"), header.get("sites", {}), header.get("images")
    named = isinstance(order, list) and isinstance(sites, dict) and sorted(map(str, order)) == sorted(sites)
    sites = sites if isinstance(sites, dict) else {}
    good = {
        "images": isinstance(images, int) and not isinstance(images, bool),
        "lineage": _texts(header.get("lineage")),
        "sites": named and all(isinstance(each, dict) and str(each.get("type")) in _TYPES for each in sites.values()),
        "sha256": _texts(header.get("sha256")) and IMAGE_IDS in header["sha256"],
    }
    bad = [name for name, holds in good.items() if not holds]
    if bad:
        raise BadInput(f"{path}: its header's {', '.join(bad)} can't be what calibrate wrote: {_REMEDY}")


def _read_tensor(path: Path, file: Any, name: str, expected: str) -> Tensor:
    try:
        tensor: Tensor = file.get_tensor(name)
    except SafetensorError as error:
        raise BadInput(f"{path}: {name[:100]} is not in it ({error!s:.100}); the file is damaged: {_REMEDY}") from None
    if tensor.is_floating_point() and not torch.isfinite(tensor).all():
        raise BadInput(f"{path}: {name} holds NaN or Inf, so nothing can be solved with it: {_REMEDY}")
    if _sha256(tensor) != expected:
        raise BadInput(f"{path}: {name} does not match its checksum; the file is damaged: {_REMEDY}")
    return tensor


def _built(kind: type[SiteMoments], values: dict[str, Any], where: str) -> SiteMoments:
    known = {each.name for each in fields(kind)}
    tensors = {name for name, value in values.items() if isinstance(value, Tensor)}
    counts = {name: value for name, value in values.items() if name not in tensors}
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in counts.values())
    needed = {each.name for each in fields(kind) if each.default is MISSING}
    if values.keys() - known or needed - values.keys() or not numbers or tensors & {"tokens", "images", "eps"}:
        raise BadInput(f"{where}: its entries are not those of {kind.__name__}; the file is damaged: {_REMEDY}")
    return kind(**values)


class _SitesOfFile(Mapping[str, SiteMoments]):
    """Reads and checks a site when it is asked for, and keeps nothing."""

    def __init__(self, path: Path, header: _Header) -> None:
        self._path, self._header = path, header

    def __getitem__(self, site: str) -> SiteMoments:
        values = dict(self._header.sites[site])
        kind = _TYPES[values.pop("type")]
        with _opened(self._path) as file:
            for name, expected in self._header.sha256.items():
                if name.rpartition("/")[0] == site:
                    values[name.rpartition("/")[2]] = _read_tensor(self._path, file, name, expected)
        return _built(kind, values, f"{self._path}: {site}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._header.sites)

    def __len__(self) -> int:
        return len(self._header.sites)


def load(path: Path) -> Moments:
    """The moments in `path`; each access to a site reads that site from the file and checks it.

    Raises BadInput for a file that is missing, truncated, foreign, of another version, or damaged.
    """
    header = _read_header(path)
    with _opened(path) as file:
        ids = _read_tensor(path, file, IMAGE_IDS, header.sha256[IMAGE_IDS])
    if ids.dtype != torch.int64 or ids.ndim != 1:
        raise BadInput(f"{path}: {IMAGE_IDS} are {ids.dtype} {list(ids.shape)}, expected int64 [images]: {_REMEDY}")
    sites = _SitesOfFile(path, header)
    return Moments(sites=sites, lineage=header.lineage, images=header.images, image_ids=ids)
