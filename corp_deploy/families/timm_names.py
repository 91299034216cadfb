"""Checks that a model's name and arguments make timm load nothing from elsewhere, and hints at similar names.

Checking a name imports neither timm nor torch; looking for similar names does.
"""

import difflib
import re
from collections.abc import Mapping
from typing import Any

from corp_deploy.spec.architecture import OF_TRANSFORMERS
from ground.errors import BadInput

_SIZES = {"s": "small", "b": "base", "l": "large", "h": "huge", "g": "giant"}
# Other projects' names of architectures that timm has, and timm's names.
_TWINS = (
    (r"vit_([blh])_(\d+)", "vit_{size}_patch{patch}_224"),
    (r"dinov2_vit([sblg])(14)(_reg)?(?:_lc)?", "vit_{size}_patch{patch}{registers}_dinov2"),
    (r"dino_vit([sb])(\d+)", "vit_{size}_patch{patch}_224.dino"),
    (r"ViT-([BLHbl])[-/](\d+)", "vit_{size}_patch{patch}_clip_224"),
)
# Arguments of timm.create_model that would load weights from elsewhere than --weights.
_RESERVED = ("pretrained", "pretrained_cfg", "checkpoint_path", "cache_dir")


def _twin(name: str) -> str:
    for pattern, twin in _TWINS:
        match = re.fullmatch(pattern, name)
        if match is not None:
            registers = "_reg4" if "(_reg)" in pattern and match[3] else ""
            return twin.format(size=_SIZES[match[1].lower()], patch=match[2], registers=registers)
    return ""


def is_timm_name(name: str) -> bool:
    """Return whether timm has an architecture of this name, with or without a tag."""
    import timm

    return bool(timm.is_model(name.partition(".")[0]))


def look_alikes(name: str) -> str:
    import timm

    base = name.partition(".")[0]
    if twin := _twin(name):
        return f"timm's name of this architecture is {twin}"
    if timm.is_model(base):
        tags = [full.partition(".")[2] for full in timm.list_pretrained(f"{base}.*")]
        return f"timm's tags of {base}: {', '.join(tags) or 'none'}"
    close = difflib.get_close_matches(base, timm.list_models(), n=5, cutoff=0.7)
    return f"names that look alike: {', '.join(close) or 'none'}"


def download_hint(repository: str, *, library: str = "") -> str:
    """Return a phrase with the command that downloads a hub's repository and the --model option that names it then."""
    name, _, revision = repository.partition("@")
    folder, of_revision = name.rpartition("/")[2], f" --revision {revision}" if revision else ""
    named = f"--model {folder}" if library == "timm" else f"--model {OF_TRANSFORMERS}{folder}"
    either = "" if library else f", or --model {folder} if its config.json names an architecture of timm"
    return f"where there is a network: hf download {name}{of_revision} --local-dir {folder}; then give {named}{either}"


def _refuse_hub(name: str, repository: str, library: str) -> None:
    raise BadInput(
        f"--model {name!r}: there is no such directory, and nothing is ever downloaded; "
        f"{download_hint(repository, library=library)}, or give a timm name with --weights"
    )


def require_local_name(name: str) -> None:
    """Raise BadInput for a name that timm would look for on the network or in another folder."""
    if match := re.match(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)", name):
        _refuse_hub(name, match[1], "timm" if match[1].startswith("timm/") else "")
    source, colon, rest = name.partition(":")
    if colon and source.lower() in ("hf-hub", "hf_hub"):
        _refuse_hub(name, rest, "timm")
    if re.fullmatch(r"[\w.-]+/[\w.@-]+", name) and not name.startswith(".") and not _twin(name):
        _refuse_hub(name, name, "timm" if name.startswith("timm/") else "")
    if re.search(r"[/:\\]", name):
        hint = (
            look_alikes(name) if _twin(name) else "a model is a directory with config.json and weights, or a timm name"
        )
        raise BadInput(f"--model {name!r}: there is no such directory, and timm's names have no '/' or ':'; {hint}")


def refuse_reserved(kwargs: Mapping[str, Any]) -> None:
    """Raise BadInput for arguments that would load weights from elsewhere, and for features_only."""
    for key in _RESERVED:
        if key in kwargs:
            raise BadInput(
                f"--model-kwargs: {key} is not taken; weights come from --weights or the model's directory, the "
                "preprocessing from the name's tag, the directory, or --mean, --std, --crop-pct, --interpolation, "
                "--crop-mode"
            )
    if kwargs.get("features_only"):
        indices = kwargs.get("out_indices")
        numbers = indices if isinstance(indices, list | tuple) and indices else (1, 3)
        names = ",".join(f"feature{number}_map" for number in numbers)
        raise BadInput(
            "--model-kwargs: features_only wraps the model so that it returns lists of feature maps, which are not "
            f"supported; leave it out with out_indices, and name the maps instead: --outputs {names}"
        )
