"""A commented recipe to start from."""

import re
from pathlib import Path
from typing import Any

from corp_deploy.families.architecture import Architecture
from corp_deploy.store.hub_snapshot import config_of_directory, is_ours, model_of_snapshot
from corp_deploy.store.model_config import load_model_config
from ground.errors import BadInput

from .recipe_toml import relative_text
from .rendering import rendered


def _description(folder: Path) -> str:
    """What a model directory, or a snapshot of one of timm's repositories, holds."""
    config = config_of_directory(folder)
    if not is_ours(config):
        return model_of_snapshot(folder, config)[0]
    ours = load_model_config(folder)
    shape = "x".join(map(str, ours.input.shape))
    return f"{ours.built.name}, images {shape}, {len(ours.sites)} sites"


def _has_rows(model: str, folder: Path) -> tuple[bool, bool]:
    """Whether rows of convolutions are among the sites, and whether anything else is."""
    if folder.is_dir() and is_ours(config_of_directory(folder)):
        keys = {key for entry in load_model_config(folder).sites.values() for key in entry}
        return "channels" in keys, not keys or not keys <= {"channels", "coupled"}
    import torch

    from corp_deploy.families.channel_site import ChannelSite
    from corp_deploy.families.conv_site import ConvSite
    from corp_deploy.families.head_site import HeadSite
    from corp_deploy.families.idle_options import kinds_of
    from corp_deploy.store.checkpoint import dense_from_architecture

    name, kwargs = model, dict[str, Any]()
    if folder.is_dir():
        name, kwargs, _ = model_of_snapshot(folder, config_of_directory(folder))
    with torch.device("meta"):
        kinds = kinds_of(dense_from_architecture(Architecture(name=name, kwargs=kwargs)))
    return ConvSite.kind in kinds, not kinds or bool(kinds & {ChannelSite.kind, HeadSite.kind})


def _require_timm_name(model: str) -> None:
    from corp_deploy.families.timm_names import is_timm_name, look_alikes, require_local_name

    require_local_name(model)
    if not is_timm_name(model):
        raise BadInput(f"--init {model}: neither a model directory nor a timm name; {look_alikes(model)}")


def starter(model: str, path: Path, *, images: Path | None, held_out: Path | None, labels: Path | None) -> str:
    """A commented recipe for a model directory or timm name, to be written to `path`.

    Raises BadInput for a model that is neither.
    """
    folder = Path(model.removeprefix("local-dir:"))
    directory, description = None, ""
    if folder.is_dir():
        directory, description = relative_text(folder.resolve(), path.parent), _description(folder)
    else:
        _require_timm_name(model)
    convolutions, linear = _has_rows(model, folder)

    def placed(place: Path | None, otherwise: str) -> str:
        return otherwise if place is None else relative_text(place.resolve(), path.parent)

    return rendered(
        "starter.toml",
        file=path.name,
        name=path.stem,
        model=model,
        directory=directory,
        description=description,
        convolutions=convolutions,
        linear=linear,
        images=placed(images, "images/calibration"),
        held_out=placed(held_out, "images/held-out"),
        labels=None if labels is None else relative_text(labels.resolve(), path.parent),
        served=re.sub(r"[^A-Za-z0-9_.-]", "-", path.stem).lstrip("_.-") or "model",
    )
