"""Directories with config.json and weights: snapshots of timm's repositories on a hub, and those of transformers.

Only local files are read. Weights of transformers are read from safetensors, whole or in shards, since its other
formats hold pickled code.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from corp_deploy.spec.architecture import OF_TRANSFORMERS, Preprocessing
from ground.errors import BadInput
from ground.file_kinds import AS_SAFETENSORS, SAFETENSORS, require_kind
from ground.records import record_from_file, record_from_value

from .model_config import CONFIG as CONFIG

PREFIX = OF_TRANSFORMERS
# In the order in which timm looks for them; an index of shards after its single file.
_WEIGHTS = tuple(
    name + suffix
    for name in ("model.safetensors", "pytorch_model.bin", "pytorch_model.pth", "model.pth")
    for suffix in ("", ".index.json")
)


def config_of_directory(directory: Path, expected: str | None = None) -> dict[str, Any]:
    """Return the content of a directory's config.json. Raises BadInput where it is missing or damaged."""
    path = directory / CONFIG
    if not path.exists():
        ours = (
            "expected a directory written by corp-deploy or a snapshot of one of timm's repositories; for weights "
            f"alone give a timm name: --model NAME --weights {directory}/FILE"
        )
        if (directory / "adapter_config.json").is_file():
            raise BadInput(
                f"{directory}: an adapter of PEFT, without the model that it changes; merge it into that, save the "
                f"whole and give it: PeftModel.from_pretrained(model, {str(directory)!r}).merge_and_unload()"
            )
        if expected and not directory.is_dir() and re.fullmatch(r"([\w.-]+/)?[\w.-]+", str(directory)):
            from corp_deploy.families.timm_names import download_hint

            how = download_hint(str(directory), library="transformers")
            raise BadInput(f"{directory}: no such directory, and nothing is ever downloaded; {how}")
        raise BadInput(f"{path}: no such file; {expected or ours}")
    return record_from_file(path, dict[str, Any])


def is_ours(config: Mapping[str, Any]) -> bool:
    """Return whether corp-deploy wrote a config.json."""
    return str(config.get("kind", "")).startswith("corp-deploy/")


def refuse_beside_directory(directory: Path, beside: Mapping[str, Any]) -> None:
    """Raise BadInput for values beside a directory that has its own; `beside` has them by options or keys."""
    extra = [name for name, value in beside.items() if value is not None and value != {}]
    if extra:
        raise BadInput(
            f"--model {directory} is a directory with its own weights, arguments and preprocessing; "
            f"drop {', '.join(extra)}"
        )


def _refuse_foreign(path: Path, config: Mapping[str, Any]) -> None:
    name = config.get("architecture")
    if isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_.-]{1,200}", name):
        return
    kind = config.get("model_type")
    if kind is not None or "architectures" in config:
        raise BadInput(f"{path}: a {kind} of Hugging Face transformers; give it as --model hf:{path.parent}")
    raise BadInput(
        f"{path}: expected a corp-deploy/model record or a configuration of timm with its architecture, "
        f"got keys {', '.join(list(config)[:5]) or 'none'}"
    )


_Size = Annotated[int, msgspec.Meta(ge=1, le=2**16)]


class _Pretrained(msgspec.Struct, frozen=True, kw_only=True):
    """timm's configuration of an architecture, beside its preprocessing."""

    num_classes: int | None = None
    input_size: tuple[_Size, _Size, _Size] | None = None
    fixed_input_size: bool | None = None


class _Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    architecture: str
    num_classes: int | None = None
    pretrained_cfg: dict[str, Any] | None = None
    model_args: dict[str, Any] | None = None


def model_of_snapshot(directory: Path, config: Mapping[str, Any]) -> tuple[str, dict[str, Any], Preprocessing]:
    """Return a snapshot's timm name, arguments and preprocessing. Raises BadInput for another library's snapshot."""
    path = directory / CONFIG
    _refuse_foreign(path, config)
    where, again = str(path), "take the snapshot again"
    snapshot = record_from_value(config, _Snapshot, where=where, remedy=again)
    entries = snapshot.pretrained_cfg or config  # older snapshots have everything on one level
    pretrained = record_from_value(entries, _Pretrained, where=where, remedy=again)
    kwargs = dict(snapshot.model_args or {})
    channels, *sides = pretrained.input_size or (3, 224, 224)
    classes = pretrained.num_classes if snapshot.num_classes is None else snapshot.num_classes
    if classes is not None:
        kwargs.setdefault("num_classes", classes)
    if channels != 3:
        kwargs.setdefault("in_chans", channels)
    # A model that takes images of any size is built for the size in its snapshot, not for its name's default.
    named = pretrained.fixed_input_size is False and pretrained.input_size is not None
    if (pretrained.fixed_input_size or named) and not kwargs.get("dynamic_img_size"):
        kwargs.setdefault("img_size", sides)
    prepared = record_from_value(entries, Preprocessing, where=where, remedy=again).spread(channels)
    return snapshot.architecture, kwargs, prepared


def weights_of_snapshot(directory: Path) -> Path:
    """Return a snapshot's file of weights, or index of shards. Raises BadInput where there is none."""
    weights = next((directory / name for name in _WEIGHTS if (directory / name).is_file()), None)
    if weights is None:
        raise BadInput(f"{directory}: no weights beside {CONFIG}, expected one of {', '.join(_WEIGHTS)}")
    return weights


ORIGIN = "transformers"  # the entry of a lineage's source that has the configuration and the files to be written again
_OF_TRANSFORMERS = ("model.safetensors", "model.safetensors.index.json")
C = TypeVar("C")


def config_of_transformers(directory: Path) -> dict[str, Any]:
    """Return the entries of a transformers directory's config.json. Raises BadInput where it is missing or damaged."""
    return config_of_directory(directory, "expected a directory that save_pretrained of transformers has written")


def read_changes(kwargs: Mapping[str, Any], changes: type[C], takes: str) -> C:
    """Return --model-kwargs as a record. Raises BadInput, with what the model `takes`, for invalid ones."""
    try:
        return msgspec.convert(dict(kwargs), changes)
    except msgspec.ValidationError as error:
        raise BadInput(f"--model-kwargs: {str(error)[:200]}; {takes}") from None


def has_weights(directory: Path) -> bool:
    """Return whether a directory has transformers' weights, in safetensors or pickled, which are refused later."""
    return any((directory / name).is_file() for name in _OF_TRANSFORMERS) or any(directory.glob("pytorch_model*"))


def weights_of_transformers(directory: Path) -> Path:
    """Return a directory's safetensors file, or index of shards. Raises BadInput for none, or only pickled weights."""
    for name in _OF_TRANSFORMERS:
        if (directory / name).is_file():
            for file in directory.glob("model*.safetensors"):
                require_kind(file, SAFETENSORS, AS_SAFETENSORS)
            return directory / name
    pickled = sorted(path.name for path in directory.glob("pytorch_model*"))
    if pickled:
        more = f" and {len(pickled) - 3} more" if len(pickled) > 3 else ""
        raise BadInput(
            f"{directory}: its weights are {', '.join(pickled[:3])}{more}, which may hold code; save them as "
            "safetensors: model.save_pretrained(DIR, safe_serialization=True)"
        )
    raise BadInput(f"{directory}: no weights beside {CONFIG}, expected {' or '.join(_OF_TRANSFORMERS)}")
