"""Dense instances with random weights, and inputs for them."""

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.coverage.instances import Instance
from calib.inputs import Inputs, InputSet, as_tuple, run_model
from corp_deploy.families.family import image_spec, sites_of
from corp_deploy.spec.architecture import Architecture
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture
from corp_deploy.store.dense_model import load_dense
from corp_deploy.store.input_sets import images_for_model, texts_for_model
from corp_deploy.traced.models.pairs import TracedPairs
from ground.errors import Missing

WORDS, MARKS = 120, 4
TEXT: dict[str, Any] = {"pooling": "mean", "normalize": False, "length": 24}


def takes_text(instance: Instance) -> bool:
    """Return whether the model is an encoder of texts."""
    return "vocab_size" in instance.kwargs


def spread_(model: nn.Module, seed: int) -> None:
    """Draw weights that keep every layer's outputs near one, and none near its initial value.

    A layer scale of 1e-6, for example, would hide the loss of its narrower layer. As in trained models, a quarter of
    each matrix's directions has most of its energy.
    """
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # The name of a token itself, not of a layer that mixes tokens.
            is_token = "token" in name.rpartition(".")[2]
            if parameter.ndim < 2 or is_token or any(part in name for part in ("embed", "bias")):
                parameter.add_(0.3 * drawn(*parameter.shape))
                continue
            rows, columns = len(parameter), parameter[0].numel()
            rank = max(1, min(rows, columns) // 4)
            strong = drawn(rows, rank) @ drawn(rank, columns) / rank**0.5
            weights = (0.95 * strong + 0.3 * drawn(rows, columns)) / columns**0.5
            parameter.copy_(weights.view_as(parameter))


def strengthen_planes_(model: nn.Module, seed: int) -> None:
    """Give a quarter of each rotary head's planes most of the logits' energy, as in language models (arXiv 2502.01563).

    No plane can replace another, so with equal planes every method would lose half of the energy.
    """
    generator = torch.Generator().manual_seed(seed)
    for site in sites_of(model).every:
        if not isinstance(site, TracedPairs) or site.repair.mixing != "planes":
            continue
        heads, planes = len(site.groups_HP), site.dims // 2
        strong = torch.rand(heads, planes, generator=generator).argsort(dim=1) < -(-planes // 4)
        factor_HD = torch.where(strong, 1.5, 0.5).repeat(1, 2)
        for side in site.repair.sides:
            for parameter in map(site.program.tensor, (side.weight, side.bias)):
                if isinstance(parameter, nn.Parameter):  # not a constant computed from parameters
                    with torch.no_grad():
                        parameter[side.rows_HTD] *= factor_HD.view(len(factor_HD), 1, -1, *[1] * (parameter.ndim - 1))


def _own_heads(name: str, kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the number of heads of each stage, in its first block with attention, in the full-size model."""
    own = {key: value for key, value in kwargs.items() if key in ("depth", "depths", "window_size")}
    with torch.device("meta"):
        model = timm.create_model(name, **own)
    stages = (model.get_submodule("blocks"),) if hasattr(model, "blocks") else model.get_submodule("layers").children()
    return tuple(
        next(int(str(each.num_heads)) for each in stage.modules() if hasattr(each, "num_heads")) for stage in stages
    )


def architecture_of(instance: Instance, **changes: Any) -> Architecture:
    """Return the architecture of an instance of timm, with some arguments changed."""
    widths: dict[str, Any] = {}
    if instance.head_dim is not None:
        heads = _own_heads(instance.name, instance.kwargs)
        widths = {"embed_dim": heads[0] * instance.head_dim}
    return Architecture(name=instance.name, kwargs={**instance.kwargs, **widths, **changes})


def _timm(instance: Instance, seed: int, **changes: Any) -> Checkpoint:
    architecture = architecture_of(instance, **changes)
    torch.manual_seed(0)
    model = dense_from_architecture(architecture)
    spread_(model, seed)
    return Checkpoint(model=model.requires_grad_(False), architecture=architecture, lineage={})


def _transformers(instance: Instance, directory: Path, seed: int, **changes: Any) -> Checkpoint:
    """Write a model as a directory of transformers, and load it as a user would."""
    import transformers as library

    logging: Any = library.utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(0)
    settings = {**instance.kwargs, **changes}
    kind = getattr(library, instance.name)
    model = kind(kind.config_class(**settings)).eval()
    spread_(model, seed)
    model.save_pretrained(directory)
    if not takes_text(instance):
        return load_dense(f"hf:{directory}", weights=None, kwargs={})
    words = Tokenizer(WordLevel({f"w{word}": word for word in range(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(directory / "tokenizer.json"))
    return load_dense(f"hf:{directory}", weights=None, kwargs=TEXT)


def dense(instance: Instance, directory: Path, *, seed: int = 0, **changes: Any) -> Checkpoint:
    """Return the instance with random weights and some arguments changed.

    Raises:
        BadInput: No family reads the model.
        Missing: The instance's library is not installed.
    """
    if find_spec(instance.source) is None:
        raise Missing(f"{instance.source} is not installed")
    if instance.source == "transformers":
        checkpoint = _transformers(instance, directory, seed, **changes)
    else:
        checkpoint = _timm(instance, seed, **changes)
    strengthen_planes_(checkpoint.model, seed)
    return checkpoint


def inputs(instance: Instance, model: nn.Module, count: int, seed: int, directory: Path) -> InputSet:
    """Return smooth random images with some noise, or texts of random words and lengths."""
    at, generator = directory / f"inputs-{seed}", torch.Generator().manual_seed(seed)
    if takes_text(instance):
        lengths = torch.randint(4, int(TEXT["length"]), (count,), generator=generator).tolist()
        drawn = [torch.randint(MARKS, WORDS, (length,), generator=generator).tolist() for length in lengths]
        at.with_suffix(".txt").write_text("\n".join(" ".join(f"w{word}" for word in words) for words in drawn))
        return texts_for_model(model, at.with_suffix(".txt"))
    channels, height, width = image_spec(model).shape
    coarse = torch.randn(count, channels, 8, 8, generator=generator)
    fine = torch.randn(count, channels, height, width, generator=generator)
    images = F.interpolate(coarse, size=(height, width), mode="bilinear") + 0.1 * fine
    np.save(at.with_suffix(".npy"), images.numpy())
    return images_for_model(model, at.with_suffix(".npy"))


def outputs(model: nn.Module, batches: Iterator[Inputs]) -> Tensor:
    """Return all outputs of each input, in float64 [B,...]."""
    with torch.inference_mode():
        return torch.cat([beside(as_tuple(run_model(model, batch))) for batch in batches]).double()


def beside(outputs: Sequence[Tensor]) -> Tensor:
    """Join several outputs to one [B,...]."""
    return torch.cat([each.flatten(1) for each in outputs], 1)
