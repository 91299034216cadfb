"""Reduced models as directories of transformers, which loads them without this package."""

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from safetensors.torch import save_file
from torch import nn

from corp_deploy.families import decoder_saved, hf_classes, hf_encoders, hf_saved, traced_model
from corp_deploy.families.decoder import NAME as DECODER
from corp_deploy.families.decoder_saved import Saved
from corp_deploy.families.family import sites_of
from corp_deploy.families.hf_saved import INSTEAD, WHERE
from corp_deploy.families.sentence_files import FILES, require_decoder_files, require_sentence_files
from corp_deploy.spec.widths import Widths
from corp_deploy.traced.models.narrowed_model import at_widths
from ground.errors import BadInput
from ground.files import write_json
from ground.records import record_from_value
from ground.transaction import install_files

from .checkpoint import WEIGHTS, Checkpoint
from .hub_snapshot import CONFIG, ORIGIN
from .transformers_directory import PREPROCESSOR

AGAIN = "write the model again"
BESIDE = (PREPROCESSOR, *FILES)  # the files that are removed where an older model had them and the new one does not
FOLDER = "hf"  # the name of the transformers directory in a model directory


class _Origin(msgspec.Struct, frozen=True, kw_only=True):
    """The kept content of the transformers directory that a model was read from: its config and files."""

    files: dict[str, Any] = {}  # the content of the files beside its weights, by path
    config: dict[str, Any] = {}  # the configuration of a decoder
    whole: str | None = None  # the class that holds an encoder and a head of training


def _origin_of(checkpoint: Checkpoint) -> _Origin:
    """Return a model's origin. Raises BadInput for a model of another origin, or with a damaged lineage."""
    origin = dict(checkpoint.lineage.get("source", {})).get(ORIGIN)
    if not isinstance(origin, Mapping):
        raise BadInput(
            f"{WHERE}: this model has no class of transformers; expected one read by --model hf:DIR, or a directory of "
            "corp-deploy made of one"
        )
    read = record_from_value(dict(origin), _Origin, where=f"{CONFIG}: lineage: source", remedy=AGAIN)
    if checkpoint.architecture.family == DECODER:
        require_decoder_files(read.files)
    else:
        require_sentence_files({path: each for path, each in read.files.items() if path != PREPROCESSOR})
    if read.whole is not None and not read.whole.isidentifier():
        raise BadInput(f"{CONFIG}: lineage: source: {read.whole!r:.100} is no class; {AGAIN}")
    return read


def refuse_unsayable(dense: Checkpoint, widths: Widths) -> None:
    """Raise BadInput for a model of no class of transformers, and for a site's width that a configuration can't set."""
    origin, model = _origin_of(dense), dense.model
    if dense.architecture.family == DECODER:
        sayable = decoder_saved.sayable_widths(origin.config, sites_of(model), widths)
        decoder_saved.refuse_unsayable_widths(origin.config, sayable)
        return
    narrower = {
        site.name: widths[site.name] for site in sites_of(model).every if widths.get(site.name, site.width) < site.width
    }
    arguments = hf_encoders.parse_arguments(dense.architecture.kwargs, where=CONFIG)
    hf_saved.find_config_changes(at_widths(model, narrower) if narrower else model, arguments, dense.unread)


def transformers_form(checkpoint: Checkpoint) -> tuple[Saved | nn.Module, Mapping[str, str]]:
    """Return the model in transformers' format, and the text of the files beside it by path.

    Raises BadInput, naming the site, for a width that a configuration can't set.
    """
    origin = _origin_of(checkpoint)
    files = {path: json.dumps(content, indent=2) for path, content in origin.files.items()}
    files = {**files, **traced_model.extra_files(checkpoint.model)}
    if traced_model.merging_of(checkpoint.model) is not None:
        raise BadInput(f"{WHERE}: no class of transformers merges tokens; {INSTEAD}")
    if checkpoint.architecture.family == DECODER:
        return decoder_saved.convert_decoder(checkpoint.model, origin.config), files
    arguments = hf_encoders.parse_arguments(checkpoint.architecture.kwargs, where=CONFIG)
    return hf_saved.convert_encoder(checkpoint.model, arguments, checkpoint.unread, origin.whole), files


@contextmanager
def directory_for(directory: Path) -> Iterator[None]:
    """Create a directory, and remove what was created of its path where the body fails."""
    created = [each for each in (directory, *directory.parents) if not each.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for each in created:
            with suppress(OSError):
                each.rmdir()
        raise


def write_transformers(form: Saved | nn.Module, files: Mapping[str, str], directory: Path) -> None:
    """Write model.safetensors, config.json and the files beside them, all or none, in place of an older model's."""
    with directory_for(directory), tempfile.TemporaryDirectory(dir=directory, prefix=".writing-") as name:
        scratch = Path(name)
        if isinstance(form, Saved):
            save_file(form.state, scratch / WEIGHTS, metadata={"format": "pt"})
            write_json(scratch / CONFIG, form.config)
        else:
            hf_classes.save_pretrained(form, scratch)
        for path, text in files.items():
            (scratch / path).parent.mkdir(exist_ok=True)
            (scratch / path).write_text(text, encoding="utf-8")
        moves = {str(each.relative_to(scratch)): each for each in sorted(scratch.rglob("*")) if each.is_file()}
        stale = [each for each in BESIDE if each not in moves and (directory / each).is_file()]
        install_files(directory, moves, removed=stale)
