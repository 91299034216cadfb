"""A decoder of transformers on disk, read block by block, so that only one block's weights are in memory.

Tensors are mapped from safetensors files and become float32 where a block is built.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from corp_deploy.families import decoder
from corp_deploy.families.decoder import DecoderArchitecture, DecoderArguments, DecoderBlock, Embeddings, TextDecoder
from corp_deploy.families.decoder_names import block_from_transformers, names_by_block, outside_from_transformers
from corp_deploy.families.traced_model import load_extra_files_
from ground.errors import BadInput

from .checkpoint import Checkpoint, load_weights
from .hub_snapshot import weights_of_transformers
from .input_sets import digest_of_tensors
from .transformers_directory import decoder_arguments, lineage_of_decoder
from .weight_file import files_of_tensors

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class DecoderLayers:
    """A directory's decoder of the model type `kind`; `files` has the file of each of its tensors by name."""

    directory: Path
    kind: str
    arguments: DecoderArguments
    weights: Path
    files: Mapping[str, Path]

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The model without its weights, with its sites and its tokenizer."""
        with torch.device("meta"):
            model = decoder.traced_decoder(TextDecoder(self.arguments.decoder), self.arguments.text)
        load_extra_files_(model, self.directory)
        return Checkpoint(
            model=model,
            architecture=decoder.architecture_of_decoder(self.kind, self.arguments),
            lineage=lineage_of_decoder(self.directory, self.arguments, self.weights),
        )

    @cached_property
    def _names(self) -> tuple[dict[str, str], dict[int, dict[str, str]]]:
        return names_by_block(self.files, self.kind, where=str(self.weights))

    def embeddings(self) -> Embeddings:
        """Return the embeddings with their weights, which compute the first residual stream."""
        prefix, outside = "embeddings.", self._outside()
        of_words = {name.removeprefix(prefix): each for name, each in outside.items() if name.startswith(prefix)}
        return self._filled(Embeddings, of_words)

    def block(self, index: int) -> DecoderBlock:
        """Return a block with its float32 weights. Raises BadInput for a missing or unknown tensor."""
        where = f"{self.weights}: block {index}"
        read = self._read(self._names[1].get(index, {}))
        state = block_from_transformers(read, self.kind, where=where, decoder=self.arguments.decoder)
        return self._filled(DecoderBlock, state)

    def digest(self) -> str:
        """Return the `model_digest` of the whole model."""
        return digest_of_tensors(self._in_order())

    def _in_order(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor as float32, in the order of our names; one block's tensors are in memory at a time."""
        numbers = sorted(range(self.arguments.decoder.layers), key=str)
        for index in numbers:
            state = self.block(index).state_dict()
            yield from ((f"blocks.{index}.{name}", state[name]) for name in sorted(state))
        outside = self._outside()
        yield from ((name, outside[name].float()) for name in sorted(outside))

    def _outside(self) -> dict[str, Tensor]:
        state = self._read(self._names[0])
        tied = self.arguments.decoder.tied
        return outside_from_transformers(state, self.kind, where=str(self.weights), tied=tied)

    def _read(self, names: Mapping[str, str]) -> dict[str, Tensor]:
        """Return tensors under the keys of `names`, whose values are their names in the files."""
        tensors = {}
        for own, name in names.items():
            try:
                with safe_open(self.files[name], framework="pt") as file:
                    tensors[own] = file.get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise BadInput(f"{self.files[name]}: {name[:100]} can't be read ({error!s:.200})") from None
        return tensors

    def _filled(self, kind: Callable[[DecoderArchitecture], M], state: dict[str, Tensor]) -> M:
        with torch.device("meta"):
            module = kind(self.arguments.decoder)
        load_weights(module, state, where=self.weights)
        return module.eval()


def open_layers(directory: Path, kwargs: Mapping[str, Any]) -> DecoderLayers:
    """Open a directory's decoder. Raises BadInput for another model, and for missing, pickled or truncated weights."""
    kind, arguments = decoder_arguments(directory, kwargs)
    weights = weights_of_transformers(directory)
    layers = DecoderLayers(
        directory=directory, kind=kind, arguments=arguments, weights=weights, files=files_of_tensors(weights)
    )
    blocks = layers._names[1]
    if extra := sorted(blocks.keys() ^ set(range(arguments.decoder.layers))):
        raise BadInput(f"{weights}: block {extra[0]} of {arguments.decoder.layers} is missing, or one too many")
    return layers
