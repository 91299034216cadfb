"""Moments <-> one safetensors file: versioned, checksummed, read site by site."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .errors import BadInput
from .files import regular
from .moments import AttentionMoments, MlpMoments, Moments, SiteMoments

KIND = "calib.moments"
VERSION = 1
HEADER = "calib"
IMAGE_IDS = "image_ids"
_TYPES: Mapping[str, type[SiteMoments]] = {"mlp": MlpMoments, "attention": AttentionMoments}
_REMEDY = "run calibrate again"


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().data).hexdigest()


def _flat(moments: Moments) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Tensors by `site/field`, and per site what is no tensor."""
    tensors = {IMAGE_IDS: moments.image_ids}
    sites: dict[str, dict[str, Any]] = {}
    for name, site in moments.sites.items():
        sites[name] = {"type": "mlp" if isinstance(site, MlpMoments) else "attention"}
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
    """Writes `path`; the same moments give the same bytes."""
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
    save_file(tensors, path, metadata={HEADER: _signed(header)})


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
        raise BadInput(f"{path}: kind is {header.get('kind')!r}, expected {KIND!r}: a file written by calibrate")
    if header.get("version") != VERSION:
        raise BadInput(f"{path}: moments version {header.get('version')!r}, expected {VERSION}; {_REMEDY}")
    if _signed({name: value for name, value in header.items() if name != "header_sha256"}) != text:
        raise BadInput(f"{path}: its header does not match its checksum; the file is damaged: {_REMEDY}")
    sites = {name: header["sites"][name] for name in header["order"]}
    return _Header(images=header["images"], lineage=header["lineage"], sites=sites, sha256=header["sha256"])


def _read_tensor(path: Path, file: Any, name: str, expected: str) -> Tensor:
    tensor: Tensor = file.get_tensor(name)
    if _sha256(tensor) != expected:
        raise BadInput(f"{path}: {name} does not match its checksum; the file is damaged: {_REMEDY}")
    return tensor


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
        return kind(**values)

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
    sites = _SitesOfFile(path, header)
    return Moments(sites=sites, lineage=header.lineage, images=header.images, image_ids=ids.to(torch.int64))


def read_lineage(path: Path) -> dict[str, str]:
    """Where the moments in `path` come from, without reading any."""
    return _read_header(path).lineage
