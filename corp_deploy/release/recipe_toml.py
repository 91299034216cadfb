"""Recipes as text: the resolved one that is kept with a release, and the commented starter."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from corp_deploy.store.hub_snapshot import CONFIG, config_of_directory, is_ours, model_of_snapshot
from ground.errors import BadInput
from ground.files import read_json, whole

from .recipe import SECTIONS, Recipe

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def toml_value(value: object) -> str:
    """One value in TOML; texts are basic strings."""
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
        case list() | tuple():
            return "[" + ", ".join(map(toml_value, value)) + "]"
        case Mapping():
            pairs = (f"{toml_key(str(key))} = {toml_value(item)}" for key, item in value.items() if item is not None)
            return "{ " + ", ".join(pairs) + " }" if value else "{}"
    raise AssertionError(value)


def toml_key(word: str) -> str:
    """A key, quoted where it must be."""
    return word if _BARE.fullmatch(word) else toml_value(word)


def _relative(path: str, directory: Path) -> str:
    relative = Path(os.path.relpath(path, directory.resolve())).as_posix()
    return relative if "/" in relative else f"./{relative}"


def _table(name: str, values: Mapping[str, Any]) -> Iterator[str]:
    yield f"[{name}]"
    for word, value in values.items():
        if value is not None:
            yield f"{toml_key(word)} = {toml_value(value)}"
    yield ""


def text_of_recipe(recipe: Recipe, directory: Path) -> str:
    """The whole recipe with its defaults, paths relative to `directory`; it reads back as the same recipe there."""
    lines = ["# The resolved recipe of this release: every key with its value, defaults included.", ""]
    for name, keys in SECTIONS.items():
        values = dict(recipe[name])
        for word, key in keys.items():
            if values[word] is not None and (key.path or (word == "model" and recipe.model_is_directory)):
                values[word] = _relative(values[word], directory)
        lines += _table(name, values)
    for name, values in recipe["targets"].items():
        lines += _table(f"targets.{name}", values)
    return "\n".join(lines)


STARTER = """\
# A release from checkpoint to proof: corp-deploy release {file} -o release
# Paths are relative to this file. An unknown key is an error. A recipe may build on another one:
# extends = "base.toml"

[release]
name = {name}

[model]
{model}

[calibration]                     # unlabelled images like those the model will meet
images = {images}
# samples = 1024                  # this many of them, drawn by seed; default: all
# seed = 0
# hold_out = 128                  # leave so many out and judge every site on them too, so that over-fitting shows
# attention_system = "kept"       # preset corp: its per-image system for kept dimensions alone, in a second pass
batch_size = 32
# device = "cuda"

[held_out]                        # other images: agreement and errors are measured on them
images = {held_out}
{labels}

[reduce]                          # shares removed, or a budget for the whole model
mlp = 0.5
attn = 0.5
# macs = 0.6                      # instead of mlp and attn: keep 60 % of the MACs, widths differ by site
preset = "best"                   # best, corp, corp-v1, grail, grail-fold, fold, vbp, none
heads = "padded"                  # padded, square, ragged, auto
align_mlp = 64
align_head = 16
ridge = 1e-4
# allow_partial = true            # go on where sites that were asked for can't be reduced

[export]
precisions = ["fp32", "fp16"]     # mixed needs keep_fp32 = ["blocks.7.attn"]

[targets.onnxruntime-cpu]         # the first target is the one the gate asks about
# [targets.onnxruntime-cuda]
# [targets.tensorrt]
# batch = "1:8:64"                # smallest, tuned and largest batch of the engine
# [targets.tensorrt-rtx]
# sms = ["86", "89"]

[parity]                          # what the reduced model may differ by
batches = [1, 7, 32]
min_agreement = 0.98              # least top-1 agreement with the dense model
max_error = 0.05                  # largest relative error of the logits

[bench]
batches = [1, 8, 32]
time_limit_s = 20.0               # per batch size
half_width = 0.01                 # stop when the speed-up is known this well

[gate]                            # what must not be; with a baseline also "p50@b1 > baseline * 1.03"
fail_if = ["speedup@b32 < 1.0", "top1_agreement < 0.98"]

[package]                         # a model repository for an inference server, in repository/
name = {served}
# labels = "labels.txt"           # class names, one a line
"""


def _words_on_directory(folder: Path) -> str:
    """What a model directory, or a snapshot of one of timm's repositories, holds."""
    config = config_of_directory(folder)
    if not is_ours(config):
        return model_of_snapshot(folder, config)[0]
    with whole(str(folder / CONFIG)):
        config = read_json(folder / CONFIG, kind="corp-deploy/model")
        shape = "x".join(map(str, config["input"]["shape"]))
        return f"{config['timm']['name']}, images {shape}, {len(config['sites'])} sites"


def _model_lines(model: str, directory: Path) -> str:
    """The model's two or three lines, from config.json of a directory or from timm's list of names."""
    folder = Path(model.removeprefix("local-dir:"))
    if folder.is_dir():
        place = toml_value(_relative(str(folder.resolve()), directory))
        return f"model = {place}    # {_words_on_directory(folder)}"
    from corp_deploy.families.timm_names import is_timm_name, look_alikes, require_local_name

    require_local_name(model)
    if not is_timm_name(model):
        raise BadInput(f"--init {model}: neither a model directory nor a timm name; {look_alikes(model)}")
    return "\n".join(
        (
            f"model = {toml_value(model)}",
            'weights = "weights.safetensors"   # trained weights: .safetensors, .pth, .pth.tar, .bin, .ckpt',
            "# kwargs = { num_classes = 1000 } # arguments for timm.create_model",
            "# ema = false                     # raw weights, where there is a moving average too",
            "# mean = [0.5]                    # if trained otherwise; also std, crop_pct, interpolation, crop_mode",
        )
    )


def starter(model: str, path: Path, *, images: Path | None, held_out: Path | None, labels: Path | None) -> str:
    """A commented recipe for a model directory or timm name, to be written to `path`.

    Raises BadInput for a model that is neither.
    """

    def placed(given: Path | None, otherwise: str) -> str:
        return toml_value(otherwise if given is None else _relative(str(given.resolve()), path.parent))

    answers = '# labels = "labels.npy"' if labels is None else f"labels = {placed(labels, '')}"
    return STARTER.format(
        file=path.name,
        name=toml_value(path.stem),
        served=toml_value(re.sub(r"[^A-Za-z0-9_.-]", "-", path.stem).lstrip("_.-") or "model"),
        model=_model_lines(model, path.parent),
        images=placed(images, "images/calibration"),
        held_out=placed(held_out, "images/held-out"),
        labels=f"{answers:<34}# class indices, for accuracy" if labels is None else answers,
    )
