"""Models of several named tensors: runners feed and read them by name, and links compare outputs by their roles."""

from contextlib import nullcontext
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ground.errors import BadInput
from ground.feeds import (
    Feeds,
    checked_feeds,
    feeds_from_array,
    feeds_of_ports,
    fill_batch,
    random_feeds,
    select_rows,
    single_array,
)
from ground.ports import LOGITS, OutputPort, Port, Role
from perf.parity import tolerance
from perf.parity.link import Link, LinkKind
from perf.parity.measures import figures_by_input, measure_outputs
from perf.parity.parity import ImageSet, Parity, parity_from_value
from perf.runners.cuda import Staging
from perf.runners.module import ModuleRunner
from perf.runners.onnx import OnnxRunner
from tests.graphs import graph_of
from tests.links import link_between
from tests.refusals import rejects

Array = NDArray[np.floating]
WORDS, LENGTH, WIDTH, TEXTS = 40, 7, 16, 24
IDS = Port(name="ids", shape=(LENGTH,), dtype="int64")
MASK = Port(name="mask", shape=(LENGTH,), dtype="int64")
EMBEDDING = OutputPort(name="embedding", role="embedding")
RNG = np.random.default_rng(0)
TABLE = RNG.standard_normal((WORDS, WIDTH)).astype(np.float32)
WEIGHT = RNG.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 4
LENGTHS = RNG.integers(1, LENGTH + 1, TEXTS)
FEEDS: Feeds = {
    "ids": RNG.integers(0, WORDS, (TEXTS, LENGTH)),
    "mask": (np.arange(LENGTH) < LENGTHS[:, None]).astype(np.int64),
}


class Encoder(nn.Module):
    """A text encoder: the mean of tanh(embedding @ weight) over the tokens that the mask keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.from_numpy(TABLE.copy()))
        self.weight = nn.Parameter(torch.from_numpy(WEIGHT.copy()))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        kept = mask.unsqueeze(-1).to(self.table.dtype)
        tokens = torch.tanh(self.table[ids] @ self.weight)
        return (tokens * kept).sum(dim=1) / kept.sum(dim=1)


class Both(Encoder):
    """An encoder that also gives logits for every token."""

    def forward(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(ids, mask), self.table[ids] @ self.weight


def encoder_graph(path: Path, *, ignores_mask: bool = False, role: str = "embedding") -> Path:
    """Write the encoder as a graph, which ignores the mask if asked, as a faulty export might."""
    seen = "Max(floats, one)" if ignores_mask else "Identity(floats)"
    model = graph_of(
        f"""(int64[batch,{LENGTH}] ids, int64[batch,{LENGTH}] mask) => (float[batch,{WIDTH}] embedding) {{
            rows = Gather(table, ids)
            mixed = MatMul(rows, weight)
            tokens = Tanh(mixed)
            floats = Cast<to=1>(mask)
            seen = {seen}
            kept = Unsqueeze(seen, last)
            own = Mul(tokens, kept)
            total = ReduceSum<keepdims=0>(own, along)
            many = ReduceSum<keepdims=0>(kept, along)
            embedding = Div(total, many)
        }}""",
        table=TABLE, weight=WEIGHT, one=np.ones(1, np.float32), last=np.asarray([-1]), along=np.asarray([1]),
    )  # fmt: skip
    model.metadata_props.add(key="export.outputs", value=f'[{{"name": "embedding", "role": "{role}"}}]')
    onnx.save(model, str(path))
    return path


def encoder() -> ModuleRunner:
    return ModuleRunner(Encoder(), inputs=(IDS, MASK), outputs=(EMBEDDING,), label="encoder")


@pytest.fixture(scope="module")
def reference() -> Array:
    with encoder() as runner:
        return single_array(runner(FEEDS))


def test_module_is_called_in_port_order(reference: Array) -> None:
    tokens = np.tanh(TABLE[FEEDS["ids"]].astype(np.float64) @ WEIGHT) * FEEDS["mask"][:, :, None]
    np.testing.assert_allclose(reference, tokens.sum(axis=1) / LENGTHS[:, None], rtol=1e-4, atol=1e-6)
    ticks = count(0, 1_000_000)
    with encoder() as runner:
        answers = runner({"mask": FEEDS["mask"], "ids": FEEDS["ids"]})
        np.testing.assert_array_equal(answers["embedding"], reference)
        assert runner.bind(FEEDS).laps(2, lambda: next(ticks)).compute_ms == (1.0, 1.0)


def test_module_outputs_are_named_and_counted(reference: Array) -> None:
    ports = (EMBEDDING, OutputPort(name="scores", role="token logits"))
    with ModuleRunner(Both(), inputs=(IDS, MASK), outputs=ports) as runner:
        answers = runner(FEEDS)
    shapes = {name: rows.shape for name, rows in answers.items()}
    assert shapes == {"embedding": (TEXTS, WIDTH), "scores": (TEXTS, LENGTH, WIDTH)}
    np.testing.assert_array_equal(answers["embedding"], reference)
    with (
        ModuleRunner(Both(), inputs=(IDS, MASK), outputs=(EMBEDDING,), label="both") as runner,
        pytest.raises(BadInput, match=r"both: gives 2 values, expected 1 tensors .* embedding"),
    ):
        runner(FEEDS)


def test_integer_inputs_are_not_cast() -> None:
    with ModuleRunner(Encoder(), precision="bf16", inputs=(IDS, MASK), outputs=(EMBEDDING,)) as runner:
        assert single_array(runner(FEEDS)).dtype == np.float32


def test_graph_reports_its_ports_and_equals_the_module(tmp_path: Path, reference: Array) -> None:
    with OnnxRunner(encoder_graph(tmp_path / "m.onnx")) as runner:
        assert (runner.inputs, runner.outputs) == ((IDS, MASK), (EMBEDDING,))
        np.testing.assert_allclose(single_array(runner(FEEDS)), reference, rtol=1e-4, atol=1e-6)
        assert runner.bind(select_rows(FEEDS, slice(3))).laps(1, lambda: 0).calls == 1
    with pytest.raises(BadInput, match=r"m.onnx: its note export.outputs can't be read"):
        OnnxRunner(encoder_graph(tmp_path / "m.onnx", role="vibes")).__enter__()


def test_all_mismatches_are_named_in_one_message() -> None:
    wrong = {"ids": FEEDS["ids"].astype(np.float32)[:, :5], "words": FEEDS["mask"]}
    with pytest.raises(BadInput) as caught:
        checked_feeds(wrong, (IDS, MASK), where="encoder")
    assert str(caught.value) == (
        "encoder: takes mask [B, 7] as int64, which is missing; takes no words, only ids, mask; "
        "takes ids as int64, got float32; takes ids [B, 7], got [24, 5]"
    )
    with pytest.raises(BadInput, match="got 24 of ids, 3 of mask; expected as many of each"):
        checked_feeds({**FEEDS, "mask": FEEDS["mask"][:3]}, (IDS, MASK), where="encoder")
    rejects(r"got no ids, \[0, 7\]", checked_feeds, select_rows(FEEDS, slice(0)), (IDS, MASK), where="encoder")
    rejects(r"takes ids \[2, 7\], got \[24, 7\]", checked_feeds, FEEDS, (IDS, MASK), where="encoder", batch=2)
    free = Port(name="ids", shape=(-1,), dtype="int64")
    assert list(checked_feeds(FEEDS, (MASK, free), where="encoder")) == ["mask", "ids"]


def test_array_feeds_only_models_with_one_input() -> None:
    array = FEEDS["ids"]
    assert list(feeds_from_array(array, (IDS,))) == ["ids"]
    assert list(feeds_of_ports({"tokens": array}, (IDS,))) == ["ids"]
    assert list(feeds_of_ports(FEEDS, (MASK, IDS))) == ["ids", "mask"]
    rejects("one array for 2 inputs; expected one for each of ids, mask", feeds_from_array, array, (IDS, MASK))
    rejects("expected one array, got 2: ids, mask", single_array, FEEDS)


def test_batch_larger_than_the_feeds_wraps_around() -> None:
    batch = fill_batch(FEEDS, TEXTS + 2)
    np.testing.assert_array_equal(batch["mask"][TEXTS:], FEEDS["mask"][:2])
    rejects("at least 1", fill_batch, FEEDS, 0)


def test_noise_is_normal_for_floats_and_one_for_integers() -> None:
    images = Port(name="images", shape=(3, 4, 4))
    noise = random_feeds((images, MASK), 5, seed=0)
    assert (noise["images"].dtype.name, noise["images"].shape) == ("float32", (5, 3, 4, 4))
    assert 0.8 < noise["images"].std() < 1.2
    assert (noise["mask"] == 1).all()
    rejects(r"images \[B, \?, 4, 4\]: a free size", random_feeds, (Port(name="images", shape=(-1, 4, 4)),), 5, seed=0)


def linked(
    reference: Array, candidate: Array, bound: tolerance.Tolerance, kind: LinkKind = "reduced", **more: Any
) -> Link:
    return link_between(reference, candidate, kind=kind, tolerance=bound, **{"port": EMBEDDING} | more)


def exact_link(reference: Array, candidate: Array) -> Link:
    return linked(reference, candidate, tolerance.exact_tolerance(products=2, largest_logit=0.0), kind="exact")


def test_ignored_mask_changes_the_neighbours(tmp_path: Path, reference: Array) -> None:
    with OnnxRunner(encoder_graph(tmp_path / "m.onnx", ignores_mask=True)) as runner:
        faulty = single_array(runner(FEEDS))
    assert exact_link(reference, faulty).status == "FAIL"
    found = linked(reference, faulty, tolerance.user_tolerance(min_agreement=0.9))
    assert found.status == "FAIL"
    assert "inputs have another nearest neighbour" in found.reason


def test_equal_inputs_count_as_one_neighbour() -> None:
    """Rounding decides which of two equal inputs is nearer, so either counts as right."""
    reference = np.eye(4)[[0, 1, 2, 2]] + 0.3
    candidate = reference.copy()
    candidate[2] *= 1 - 1e-9
    candidate[3, 0] += 1e-9
    assert measure_outputs(reference, candidate, role="embedding").agreement == 1.0


def test_fewer_than_three_inputs_have_no_nearest_neighbour() -> None:
    rows = RNG.standard_normal((2, 4))
    found = measure_outputs(rows, rows, role="embedding")
    assert (found.agreement, found.agreement_bounds) == (None, None)
    assert found.agreement_line == "nearest neighbours need 3 inputs, got 2"
    wanted = tolerance.user_tolerance(min_agreement=0.9)
    rejects("embedding is an embedding, whose nearest neighbours need 3 inputs, got 2", linked, rows, rows, wanted)


def test_token_logits_are_compared_token_by_token() -> None:
    reference = RNG.standard_normal((5, 4, 3))
    candidate = reference.copy()
    candidate[1, 2] = -candidate[1, 2]
    found = measure_outputs(reference, candidate, role="token logits")
    flipped = int(reference[1, 2].argmax() != candidate[1, 2].argmax())
    assert (flipped, found.agreement, found.disagreement_line) == (1, 19 / 20, "1 of 20 tokens flipped")
    assert found.relative_error == pytest.approx(2 * np.linalg.norm(reference[1, 2]) / np.linalg.norm(reference))
    assert found.cosine_min == pytest.approx(-1.0)
    candidate[0, 0, 0] = np.inf
    assert measure_outputs(reference, candidate, role="token logits").nonfinite_images == 1


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((4, 2, 3, 3), "agreement of nearest tokens 100 % (51.01 % to 100 % at 95 % confidence), limit 50 %"),
        ((4, 9, 2), "agreement of nearest tokens 100 % (51.01 % to 100 % at 95 % confidence), limit 50 %"),
        ((4, 18), "cosine 1.000000: there is no agreement to hold to the limit, 50 %"),
    ],
)
def test_feature_map_agreement_uses_neighbours_of_tokens(shape: tuple[int, ...], words: str) -> None:
    reference = RNG.standard_normal(shape)
    candidate = reference * 1.02
    found = measure_outputs(reference, candidate, role="feature map")
    assert found.relative_error == pytest.approx(0.02)
    assert found.cosine_mean == pytest.approx(1.0)
    features = OutputPort(name="features", role="feature map")
    judged = linked(reference, candidate, tolerance.user_tolerance(min_agreement=0.5), port=features)
    assert words in judged.reason
    assert judged.status == ("PASS" if len(shape) > 2 else "INCONCLUSIVE")  # as gate judges an absent figure


@pytest.mark.parametrize(
    ("role", "shape", "words"),
    [
        ("embedding", (4, 2, 3), "embedding: got .* of both, expected .*give models whose output is pooled"),
        ("token logits", (4, 3), r"token logits: got .* expected the same \[inputs, tokens, classes\]"),
        ("feature map", (), r"feature map: got .* expected the same \[inputs, ...\]"),
    ],
)
def test_shape_that_contradicts_the_role_is_refused(role: Role, shape: tuple[int, ...], words: str) -> None:
    rows = np.ones(shape)
    rejects(words, measure_outputs, rows, rows, role=role)


def parity_of_two_outputs(*, faulty: bool) -> Parity:
    """Make a record of correct logits and an embedding that is wrong if `faulty`."""
    logits, vectors = RNG.standard_normal((6, 4)), RNG.standard_normal((6, 8))
    off = {LOGITS: logits, EMBEDDING: vectors * 1.5 if faulty else vectors}
    pairs = ((LOGITS, logits), (EMBEDDING, vectors))
    bound = tolerance.user_tolerance(max_error=0.1)
    links = [linked(rows, off[port], bound, port=port, several=True) for port, rows in pairs]
    return Parity(images=ImageSet(count=6, digest="", kind="inputs"), links=tuple(links))


def test_every_output_has_a_link_named_after_it() -> None:
    assert parity_of_two_outputs(faulty=False).verdict == "PASS"
    record = parity_of_two_outputs(faulty=True)
    statuses = {each.name: each.status for each in record.links}
    assert statuses == {"reduced logits": "PASS", "reduced embedding": "FAIL"}
    assert record.verdict == "FAIL"
    assert record.reason.startswith("on 6 inputs: reduced embedding: relative error 0.5")


def test_record_stores_role_and_output_only_beyond_logits() -> None:
    raw = parity_of_two_outputs(faulty=False).to_json()
    logits, vectors = raw["links"]
    assert (logits["output"], "role" in logits) == ("logits", False)
    assert (vectors["output"], vectors["role"]) == ("embedding", "embedding")
    assert "top1_agreement" in logits["batches"][0]
    assert vectors["batches"][0]["agreement"] == 1.0
    assert "top1_agreement" not in vectors["measures"]
    assert parity_from_value(raw, where="parity.json").to_json() == raw
    raw["links"][1]["role"] = "smell"
    with pytest.raises(BadInput, match=r"links\[1\].role: got 'smell', expected embedding or feature map or logits"):
        parity_from_value(raw, where="parity.json")


def test_single_output_of_another_role_keeps_the_link_name() -> None:
    rows = RNG.standard_normal((6, 4))
    single = exact_link(rows, rows)
    raw = Parity(images=ImageSet(count=6, digest=""), links=(single,)).to_json()["links"][0]
    assert (raw["name"], raw["role"], "output" in raw) == ("exact", "embedding", False)


def test_role_reports_only_its_own_figures() -> None:
    rows = RNG.standard_normal((5, 4))
    names = {"relative_error", "max_abs", "cosine"}
    by_role: dict[Role, set[str]] = {"embedding": names | {"agrees"}, "feature map": names}
    for role, expected in by_role.items():
        assert set(figures_by_input(rows, {"b": rows * 2}, role=role)) == {f"b.{name}" for name in expected}
    tokens = RNG.standard_normal((5, 2, 4))
    assert figures_by_input(tokens, {"b": tokens}, role="token logits")["b.token_agreement"].tolist() == [1.0] * 5


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a stream, with torch patched to keep GPU tensors in host memory."""
    real_to, real_empty = torch.Tensor.to, torch.empty

    def to(tensor: Tensor, *where: Any, **how: Any) -> Tensor:
        moved: Tensor = tensor.clone() if where[0] == "cuda" else real_to(tensor, *where, **how)
        return moved

    def empty(shape: tuple[int, ...], *, dtype: torch.dtype, **_: Any) -> Tensor:
        return real_empty(shape, dtype=dtype).fill_(torch.nan)

    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    return SimpleNamespace(synchronize=lambda: None)


def test_integers_are_staged_unchanged_and_outputs_return_by_name(pretended_gpu: Any) -> None:
    staging = Staging.hold(pretended_gpu, FEEDS, {"sum": (TEXTS,), "both": (TEXTS, 2)})
    assert {name: tensor.dtype for name, tensor in staging.device_in.items()} == dict.fromkeys(FEEDS, torch.int64)
    addresses = {name: tensor.data_ptr() for name, tensor in {**staging.device_in, **staging.device_out}.items()}

    def launch() -> None:
        total = (staging.device_in["ids"] * staging.device_in["mask"]).sum(dim=1).float()
        staging.device_out["sum"].copy_(total)
        staging.device_out["both"].copy_(torch.stack([total, -total], dim=1))

    answers = staging.run(launch)
    total = (FEEDS["ids"] * FEEDS["mask"]).sum(axis=1)
    np.testing.assert_array_equal(answers["sum"], total)
    np.testing.assert_array_equal(answers["both"], np.stack([total, -total], axis=1))
    assert addresses == {
        name: tensor.data_ptr() for name, tensor in {**staging.device_in, **staging.device_out}.items()
    }


def test_gpu_module_uses_every_staged_tensor(
    pretended_gpu: Any, monkeypatch: pytest.MonkeyPatch, reference: Array
) -> None:
    held: list[Staging] = []
    hold = Staging.hold

    def keeping(*what: Any) -> Staging:
        held.append(hold(*what))
        return held[-1]

    monkeypatch.setattr("perf.runners.module.Staging", SimpleNamespace(hold=keeping))
    ports = (EMBEDDING, OutputPort(name="scores", role="token logits"))
    runner = ModuleRunner(Both(), device="cuda", inputs=(IDS, MASK), outputs=ports)
    runner._ready, runner._stream = Both(), pretended_gpu
    bound: Any = runner.bind(FEEDS)
    for stage in (bound.copy_in, bound.launch, bound.copy_out):
        stage()
    (staging,) = held
    np.testing.assert_array_equal(staging.host_out["embedding"].numpy(), reference)
    assert bool(torch.isfinite(staging.host_out["scores"]).all())
