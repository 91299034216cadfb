"""Moments <-> one safetensors file: versioned, checksummed, read site by site."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ground.errors import BadInput
from ground.files import regular, replacing
from ground.records import record_from_text, record_from_value

from .moments import ChannelMoments, HeadMoments, Moments, SiteMoments

KIND = "calib.moments"
VERSION = 1
HEADER = "calib"
IMAGE_IDS = "image_ids"
_REMEDY = "run calibrate again"


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().data).hexdigest()


def _flat(moments: Moments) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Tensors by `site/field`, and per site what is no tensor."""
    tensors = {IMAGE_IDS: moments.image_ids}
    sites: dict[str, dict[str, Any]] = {}
    for name, site in moments.sites.items():
        sites[name] = {"type": site.kind}
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


class _Channels(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="mlp"):
    """What is no tensor of ChannelMoments."""

    tokens: int | float
    eps: float


class _Heads(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="attention"):
    """What is no tensor of HeadMoments."""

    images: int
    tokens: int | float


_MOMENTS: dict[type, type[SiteMoments]] = {_Channels: ChannelMoments, _Heads: HeadMoments}


class _Header(msgspec.Struct, frozen=True, kw_only=True):
    images: int
    lineage: dict[str, str]
    order: tuple[str, ...]
    sites: dict[str, _Channels | _Heads]
    sha256: dict[str, str]

    def __post_init__(self) -> None:
        if sorted(self.order) != sorted(self.sites) or IMAGE_IDS not in self.sha256:
            raise BadInput("its order is not one of its sites, or the digest of its images is missing")


def _opened(path: Path) -> Any:
    try:
        return safe_open(regular(path), framework="pt")
    except FileNotFoundError as error:
        raise BadInput(f"{path}: no such file, expected moments written by calibrate") from error
    except (SafetensorError, OSError) as error:
        raise BadInput(
            f"{path}: not a whole safetensors file ({error}); it is truncated or foreign: {_REMEDY}"
        ) from error


def _read_header(path: Path) -> _Header:
    with _opened(path) as file:
        text = (file.metadata() or {}).get(HEADER, "{}")
    header = record_from_text(text, dict[str, Any], where=str(path), kind=KIND, version=VERSION, remedy=_REMEDY)
    if _signed({name: value for name, value in header.items() if name != "header_sha256"}) != text:
        raise BadInput(f"{path}: its header does not match its checksum; the file is damaged: {_REMEDY}")
    return record_from_value(header, _Header, where=f"{path}: its header", remedy=_REMEDY)


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


def _built(entry: _Channels | _Heads, tensors: Mapping[str, Any], where: str) -> SiteMoments:
    kind = _MOMENTS[type(entry)]
    counts: dict[str, Any] = msgspec.structs.asdict(entry)
    known = {each.name for each in fields(kind)} - counts.keys()
    needed = {each.name for each in fields(kind) if each.default is MISSING} - counts.keys()
    if tensors.keys() - known or needed - tensors.keys():
        raise BadInput(f"{where}: its entries are not those of {kind.__name__}; the file is damaged: {_REMEDY}")
    return kind(**counts, **tensors)


class _SitesOfFile(Mapping[str, SiteMoments]):
    """Reads and checks a site when it is asked for, and keeps nothing."""

    def __init__(self, path: Path, header: _Header) -> None:
        self._path, self._header = path, header

    def __getitem__(self, site: str) -> SiteMoments:
        entry = self._header.sites[site]
        with _opened(self._path) as file:
            tensors = {
                name.rpartition("/")[2]: _read_tensor(self._path, file, name, expected)
                for name, expected in self._header.sha256.items()
                if name.rpartition("/")[0] == site
            }
        return _built(entry, tensors, f"{self._path}: {site}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._header.order)

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
