"""A decoder's graph against transformers on the same directory: prefill, and one token after the other with the cache.

Shapes: B sequences, N tokens of each, V words.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from corp_deploy.families.decoder_reference import open_reference
from corp_deploy.store.decoder_directory import decoder_arguments
from corp_deploy.store.decoder_graph import DecoderGraph, facts_of_graph
from ground.errors import BadInput
from ground.files import write_json
from perf.parity.measures import measures
from perf.record.runs import Flat
from perf.runners.decoder import IDS, LOGITS, DecoderRunner
from perf.runners.onnx_session import Provider

KIND, VERSION = "decoder-parity", 1
MOST_ERROR = 1e-4
"""Of a graph in FP32, which computes what transformers does in another order."""
Status = Literal["PASS", "FAIL", "MEASURED"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One way of running both; `bound` of the relative error, None where nothing bounds it."""

    name: str
    measures: Mapping[str, Any]
    bound: float | None

    @property
    def status(self) -> Status:
        if self.bound is None:
            return "MEASURED"
        finite = self.measures["nonfinite_images"] == 0
        return "PASS" if finite and self.measures["relative_error"] <= self.bound else "FAIL"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderParity:
    """What was found on `sequences` of `length` tokens."""

    model: str
    graph: Mapping[str, Any]
    runtime: Flat
    sequences: int
    length: int
    links: tuple[Link, ...]

    @property
    def passed(self) -> bool:
        return all(link.status != "FAIL" for link in self.links)

    def as_json(self) -> dict[str, Any]:
        links = [{**asdict(link), "status": link.status} for link in self.links]
        return {"kind": KIND, "version": VERSION, **asdict(self), "links": links}


def drawn_ids(vocabulary: int, *, sequences: int, length: int, seed: int) -> NDArray[np.int64]:
    """Any tokens, [B,N]."""
    return np.random.default_rng(seed).integers(0, vocabulary, (sequences, length), dtype=np.int64)


def verify_decoder(
    directory: Path,
    graph: DecoderGraph,
    ids_BN: NDArray[np.int64],
    *,
    provider: Provider = "cpu",
    max_error: float | None = None,
) -> DecoderParity:
    """Run both on these tokens.

    Args:
        directory: the plain directory that the graph was built of.
        max_error: of the logits, relative; None bounds a graph in FP32 by MOST_ERROR and no other.

    Raises:
        BadInput: a directory that is no decoder, another model's graph, or more tokens than it can place.
        Missing: transformers, ONNX Runtime or the provider is absent.
    """
    _, arguments = decoder_arguments(directory, {})
    of_model = arguments.decoder
    _require_alike(directory, graph, of_model.vocabulary, (of_model.layers, of_model.groups, of_model.head))
    length = ids_BN.shape[1]
    if length > min(graph.longest, of_model.longest):
        raise BadInput(f"{length} tokens, and {directory} places {of_model.longest} at most; give a smaller --length")
    reference = open_reference(directory)
    runner = DecoderRunner(graph.path, graph.cache, length, provider=provider)
    with runner:
        exact = runner.describe()["precision"] == "fp32"
        bound = MOST_ERROR if max_error is None and exact else max_error
        feeds = {IDS: ids_BN}
        links = (
            _link("prefill", reference.prefill(ids_BN), runner(feeds)[LOGITS], bound),
            _link("token by token", reference.steps(ids_BN), runner.steps(feeds)[LOGITS], bound),
        )
        runtime = runner.describe()
    return DecoderParity(
        model=str(directory),
        graph=facts_of_graph(graph),
        runtime=runtime,
        sequences=len(ids_BN),
        length=length,
        links=links,
    )


def save_decoder_parity(parity: DecoderParity, path: Path) -> None:
    """Write the record as JSON, whole or not at all."""
    write_json(path, parity.as_json())


def _link(name: str, expected: NDArray[np.float32], actual: NDArray[np.float32], bound: float | None) -> Link:
    found = asdict(measures(expected, actual, role="token logits"))
    return Link(name=name, measures={key: _number(value) for key, value in found.items()}, bound=bound)


def _number(value: Any) -> Any:
    """A figure that is not finite is null in a record."""
    return None if isinstance(value, float) and not np.isfinite(value) else value


def _require_alike(directory: Path, graph: DecoderGraph, vocabulary: int, of_model: tuple[int, int, int]) -> None:
    of_graph = graph.cache.layers, graph.cache.groups, graph.cache.head
    if (graph.vocabulary, of_graph) != (vocabulary, of_model):
        raise BadInput(
            f"{graph.path}: of {graph.vocabulary} words and layers, groups and head {list(of_graph)}, and {directory} "
            f"has {vocabulary} and {list(of_model)}; give the directory that the graph was built of"
        )
