"""What torch.save wrote, read without running any of it: never by the pickle that runs code, and never tried again."""

import argparse
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from ground.errors import BadInput

LONGEST_NAME = 150
# timm's trainer keeps its arguments beside the weights: a Namespace holds values and runs nothing.
_HARMLESS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [argparse.Namespace]


def first_names(names: list[str]) -> str:
    """A few names for a message, and how many more there are."""
    cut = [name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}..." for name in names[:3]]
    return ", ".join(cut) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _refuse_packed(path: Path) -> None:
    """Raise BadInput for an archive whose members are packed, which torch never does: little would become much."""
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    packed = [member.filename for member in members if member.compress_type != zipfile.ZIP_STORED]
    if packed or sum(member.file_size for member in members) > path.stat().st_size:
        raise BadInput(
            f"{path}: its members are packed or lie over one another, {first_names(packed or ['all'])}; expected a "
            "file as torch.save writes it"
        )


def _refused(path: Path, error: Exception) -> BadInput:
    try:
        with torch.serialization.safe_globals(_HARMLESS):
            foreign = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
    except Exception:  # a damaged file, whose first error says more
        foreign = []
    if foreign:
        return BadInput(
            f"{path}: holds pickled code, which is never run ({first_names(sorted(foreign))}); save its weights alone: "
            "torch.save(model.state_dict(), 'weights.pth'), or as safetensors"
        )
    reason = type(error).__name__ if isinstance(error, UnpicklingError) else str(error).partition("\n")[0][:150]
    return BadInput(
        f"{path}: can't be read as a PyTorch checkpoint of plain tensors ({reason}); "
        "(a) the file is damaged, or (b) it holds pickled code, which is never run: save its weights as safetensors"
    )


def content_of_torch_file(path: Path) -> Any:
    """Tensors, texts and numbers in mappings and lists. Raises BadInput for pickled code and for a damaged file."""
    try:
        _refuse_packed(path)
        with torch.serialization.safe_globals(_HARMLESS), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's own, about how odd tensors are kept; those are refused later
            return torch.load(path, map_location="cpu", weights_only=True)
    except BadInput:
        raise
    except Exception as error:
        raise _refused(path, error) from None
