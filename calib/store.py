"""The safetensors file of moments: versioned, with checksums, read site by site."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ground.errors import BadInput
from ground.file_kinds import refuse_stand_in_file
from ground.files import regular_file
from ground.records import record_from_text, record_from_value

from .axes import UPPER, name_in_file, pack_if_upper, unpack_triangles
from .fingerprints import Fingerprints, no_hashes
from .moments import ChannelMoments, HeadMoments, Moments, SiteMoments
from .patch_moments import PatchMoments
from .tensor_file import TensorEntry, entries_of_file, write_tensors

KIND = "calib.moments"
VERSION = 2
HEADER = "calib"
IMAGE_IDS, IMAGE_HASHES, GROUP_IDS = "image_ids", "image_hashes", "group_ids"
HALF = "half:"  # prefix of the tensors that cover one half of the images
_REMEDY = "run calibrate again"
_DTYPES = {torch.float64: "F64", torch.int64: "I64"}


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.numpy().data).hexdigest()


def _flatten(moments: Moments, prefix: str = "") -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = {prefix + IMAGE_IDS: moments.image_ids}
    if len(hashes := moments.fingerprints.hashes_M2):
        tensors[prefix + IMAGE_HASHES] = hashes
    sites: dict[str, dict[str, Any]] = {}
    for name, site in moments.sites.items():
        sites[name] = {"type": site.kind}
        for field in fields(site):
            value = getattr(site, field.name)
            if isinstance(value, Tensor):
                tensors[name_in_file(f"{prefix}{name}/{field.name}", value)] = value
            elif value is not None:
                sites[name][field.name] = value
    return tensors, {"images": moments.images, "order": list(sites), "sites": sites}


def _signed(header: dict[str, Any]) -> str:
    """Return the header as one sorted JSON text with its digest, so that equal moments give equal bytes."""
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()
    return json.dumps(header | {"header_sha256": digest}, sort_keys=True)


def _entry(name: str, value: Tensor) -> tuple[TensorEntry, str]:
    """Return a tensor's entry and digest; writing packs the tensor once more, so that memory holds no packed copy."""
    form = pack_if_upper(name, value)
    entry = TensorEntry(
        dtype=_DTYPES[form.dtype],
        shape=tuple(form.shape),
        size=form.nbytes,
        pieces=lambda: [pack_if_upper(name, value).numpy().data],
    )
    return entry, _sha256(form)


def save_moments(moments: Moments, path: Path) -> None:
    tensors, header = _flatten(moments)
    if len(moments.group_ids):
        tensors[GROUP_IDS] = moments.group_ids
    if moments.half is not None:
        of_half, header["half"] = _flatten(moments.half, HALF)
        tensors |= of_half
    entries = {name: _entry(name, tensor) for name, tensor in tensors.items()}
    header |= {
        "kind": KIND,
        "version": VERSION,
        "lineage": dict(moments.lineage),
        "sha256": {name: digest for name, (_, digest) in entries.items()},
    }
    write_tensors(path, {name: entry for name, (entry, _) in entries.items()}, {HEADER: _signed(header)})


class _Numbers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    tokens: int | float


class _Channels(_Numbers, frozen=True, kw_only=True, tag="mlp"):
    eps: float


class _Heads(_Numbers, frozen=True, kw_only=True, tag="attention"):
    images: int


class _Patches(_Numbers, frozen=True, kw_only=True, tag="convolution"):
    taps: int
    eps: float
    map_tokens: int | float


_Entry = _Channels | _Heads | _Patches
_MOMENTS: dict[type, type[SiteMoments]] = {_Channels: ChannelMoments, _Heads: HeadMoments, _Patches: PatchMoments}


class _Sites(msgspec.Struct, frozen=True, kw_only=True):
    images: int
    order: tuple[str, ...]
    sites: dict[str, _Entry]

    def __post_init__(self) -> None:
        if sorted(self.order) != sorted(self.sites):
            raise BadInput("its order names other sites than it holds")


class _Header(_Sites, frozen=True, kw_only=True):
    lineage: dict[str, str]
    sha256: dict[str, str]
    half: _Sites | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        needed = {IMAGE_IDS} if self.half is None else {IMAGE_IDS, GROUP_IDS, HALF + IMAGE_IDS}
        if missing := sorted(needed - self.sha256.keys()):
            raise BadInput(f"the digest of {missing[0]} is missing")


def _open(path: Path) -> Any:
    try:
        return safe_open(regular_file(path), framework="pt")
    except FileNotFoundError as error:
        raise BadInput(f"{path}: no such file, expected moments written by calibrate") from error
    except (SafetensorError, OSError) as error:
        refuse_stand_in_file(path)
        raise BadInput(
            f"{path}: not a valid safetensors file ({error}); it is truncated or foreign: {_REMEDY}"
        ) from error


def _read_header(path: Path, remedy: str = _REMEDY) -> _Header:
    with _open(path) as file:
        text = (file.metadata() or {}).get(HEADER, "{}")
    header = record_from_text(text, dict[str, Any], where=str(path), kind=KIND, version=VERSION, remedy=remedy)
    if _signed({name: value for name, value in header.items() if name != "header_sha256"}) != text:
        raise BadInput(f"{path}: its header does not match its checksum; the file is damaged: {_REMEDY}")
    return record_from_value(header, _Header, where=f"{path}: its header", remedy=_REMEDY)


def _read_tensor(path: Path, file: Any, stored_as: str, expected: str) -> Tensor:
    name = stored_as.removesuffix(UPPER)
    try:
        tensor: Tensor = file.get_tensor(stored_as)
    except SafetensorError as error:
        raise BadInput(f"{path}: {name[:100]} is not in it ({error!s:.100}); the file is damaged: {_REMEDY}") from None
    if tensor.is_floating_point() and not torch.isfinite(tensor).all():
        raise BadInput(f"{path}: {name} holds NaN or Inf, so nothing can be solved with it: {_REMEDY}")
    if _sha256(tensor) != expected:
        raise BadInput(f"{path}: {name} does not match its checksum; the file is damaged: {_REMEDY}")
    return tensor


class _SitesOfFile(Mapping[str, SiteMoments]):
    """The sites of a file, each of which is read and checked at every access."""

    def __init__(self, path: Path, own: _Sites, digests: Mapping[str, str], *, prefix: str = "") -> None:
        self._path, self._own, self._digests, self._prefix = path, own, digests, prefix

    def __getitem__(self, site: str) -> SiteMoments:
        numbers: dict[str, Any] = msgspec.structs.asdict(self._own.sites[site])
        kind = _MOMENTS[type(self._own.sites[site])]
        with _open(self._path) as file:
            tensors = {
                name.rpartition("/")[2]: _read_tensor(self._path, file, name, expected)
                for name, expected in self._digests.items()
                if name.rpartition("/")[0] == self._prefix + site
            }
        where = f"{self._path}: {site}"
        sums: dict[str, Any] = unpack_triangles(tensors, where, _REMEDY)
        names = {each.name for each in fields(kind)} - numbers.keys()
        needed = {each.name for each in fields(kind) if each.default is MISSING} - numbers.keys()
        if sums.keys() - names or needed - sums.keys():
            raise BadInput(f"{where}: its entries are not those of {kind.__name__}; the file is damaged: {_REMEDY}")
        return kind(**numbers, **sums)

    def rows_and_widths(self) -> dict[str, tuple[float, int]]:
        found = dict[str, tuple[float, int]]()
        with _open(self._path) as file:
            for site, own in self._own.sites.items():
                rows, entry = ROWS_AND_WIDTH[_MOMENTS[type(own)]]
                width = file.get_slice(f"{self._prefix}{site}/{entry}").get_shape()[-1]
                found[site] = (msgspec.structs.asdict(own)[rows], width)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._own.order)

    def __len__(self) -> int:
        return len(self._own.sites)


ROWS_AND_WIDTH: Mapping[type[SiteMoments], tuple[str, str]] = {
    ChannelMoments: ("tokens", "sum_F"), HeadMoments: ("tokens", "z_sum_C"), PatchMoments: ("map_tokens", "map_sum_GC"),
}  # fmt: skip


def rows_and_widths(moments: Moments) -> dict[str, tuple[float, int]]:
    if isinstance(moments.sites, _SitesOfFile):
        return moments.sites.rows_and_widths()
    names = {site: ROWS_AND_WIDTH[type(own)] for site, own in moments.sites.items()}
    return {
        site: (getattr(moments.sites[site], rows), getattr(moments.sites[site], entry).shape[-1])
        for site, (rows, entry) in names.items()
    }


def _int64_tensor(path: Path, name: str, digests: Mapping[str, str], trailing: tuple[int, ...] = ()) -> Tensor:
    with _open(path) as file:
        numbers = _read_tensor(path, file, name, digests[name])
    if numbers.dtype != torch.int64 or numbers.ndim != 1 + len(trailing) or numbers.shape[1:] != trailing:
        expected = f"int64 {['images', *trailing]}".replace("'", "")
        raise BadInput(f"{path}: {name} are {numbers.dtype} {list(numbers.shape)}, expected {expected}: {_REMEDY}")
    return numbers


def _moments_of_part(path: Path, header: _Header, own: _Sites, *, prefix: str = "") -> Moments:
    sites = _SitesOfFile(path, own, header.sha256, prefix=prefix)
    ids, hashes = _int64_tensor(path, prefix + IMAGE_IDS, header.sha256), no_hashes()
    if prefix + IMAGE_HASHES in header.sha256:
        hashes = _int64_tensor(path, prefix + IMAGE_HASHES, header.sha256, (2,))
    fingerprints = Fingerprints(ids=ids, hashes_M2=hashes)
    return Moments(sites=sites, lineage=header.lineage, images=own.images, fingerprints=fingerprints)


def load_moments(path: Path, *, remedy: str = _REMEDY) -> Moments:
    """Return the moments in `path`; a site is read and checked at each access.

    Raises BadInput, with the `remedy`, for a file that is missing, truncated, foreign, of another version, or damaged.
    """
    header = _read_header(path, remedy)
    moments = _moments_of_part(path, header, header)
    if header.half is None and GROUP_IDS not in header.sha256:
        return moments
    half = None if header.half is None else _moments_of_part(path, header, header.half, prefix=HALF)
    return replace(moments, group_ids=_int64_tensor(path, GROUP_IDS, header.sha256), half=half)


def _joined_header(parts: Sequence[Path]) -> dict[str, Any]:
    first, *others = [_read_header(path) for path in parts]
    sites, order, digests = dict(first.sites), [*first.order], dict(first.sha256)
    for path, other in zip(parts[1:], others, strict=True):
        same = (other.lineage, other.images, other.sha256[IMAGE_IDS])
        if same != (first.lineage, first.images, first.sha256[IMAGE_IDS]) or other.half or first.half:
            raise BadInput(f"{path}: not of the same images and model as {parts[0]}: {_REMEDY}")
        if both := sorted(sites.keys() & other.sites.keys()):
            raise BadInput(f"{path}: {both[0]} is in another part, too: {_REMEDY}")
        sites, digests = sites | other.sites, digests | other.sha256
        order += other.order
    own = {
        "images": first.images,
        "order": order,
        "sites": {name: msgspec.to_builtins(each) for name, each in sites.items()},
    }
    return own | {"kind": KIND, "version": VERSION, "lineage": first.lineage, "sha256": digests}


def join_moments(parts: Sequence[Path], path: Path) -> None:
    """Join moments of different sites over the same images in one file, by copying bytes.

    Raises BadInput for common sites, other images or another model.
    """
    header = _joined_header(parts)
    entries = dict[str, TensorEntry]()
    for part in parts:
        entries |= {name: entry for name, entry in entries_of_file(part).items() if name not in entries}
    write_tensors(path, entries, {HEADER: _signed(header)})
