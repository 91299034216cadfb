"""A plain directory of transformers run by transformers alone, in float32: what a graph of it must say.

Shapes: B sequences, T tokens of each, V words.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ground.errors import BadInput, Missing

from .decoder_builder import undone

Ids = NDArray[np.int64]
Logits = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Reference:
    """A causal model of transformers on the CPU."""

    model: Any

    @property
    def vocabulary(self) -> int:
        return int(self.model.config.vocab_size)

    def prefill(self, ids_BT: Ids) -> Logits:
        """Logits [B,T,V] of all tokens at once, nothing cached."""
        with torch.inference_mode():
            answer = self.model(torch.from_numpy(ids_BT), use_cache=False)
        return np.asarray(answer.logits, dtype=np.float32)

    def steps(self, ids_BT: Ids) -> Logits:
        """The same, one token after the other with the cache."""
        return np.concatenate(list(self._steps(ids_BT)), axis=1)

    def _steps(self, ids_BT: Ids) -> Iterator[Logits]:
        past = None
        for place in range(ids_BT.shape[1]):
            with torch.inference_mode():
                ids = torch.from_numpy(ids_BT[:, place : place + 1])
                answer = self.model(ids, past_key_values=past, use_cache=True)
            past = answer.past_key_values
            yield np.asarray(answer.logits, dtype=np.float32)


def open_reference(directory: Path) -> Reference:
    """Read a directory that has been judged. Raises BadInput where tensors are missing of it or left over, and Missing
    without transformers.
    """
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise Missing(
            "transformers, the reference for the graph, is not installed; install the extra `genai`"
        ) from error
    opened: Any = AutoModelForCausalLM
    with undone():
        model, loading = opened.from_pretrained(
            directory,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    if wrong := next((f"{kind}: {sorted(names)[:3]}" for kind, names in loading.items() if names), ""):
        raise BadInput(f"{directory}: transformers loads it with {wrong}; save the model again")
    return Reference(model=model.eval())
