"""Models with several inputs or with outputs other than logits, as ONNX graphs, engines and in a Triton repository."""

import json
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import ModelProto, TensorProto, helper
from torch import Tensor, nn

from export.engine.build import build_engine, build_ort_artifact, write_engine
from export.engine.options import BatchProfile, BuildOptions
from export.engine.record import record_of_plan
from export.graph.check import check_onnx
from export.graph.ports import GraphPort, noted_inputs, noted_outputs, roles_of_graph
from export.graph.to_onnx import onnx_from_model
from export.graph.weights import notes_of
from export.triton.config import Serving
from export.triton.lint import lint_repository
from export.triton.pbtxt import Message
from export.triton.repository import write_repository
from export.triton.variants import Package
from ground.ports import LOGITS, OutputPort, Port, image_port
from tests.export_served import config_of, replaced
from tests.export_text import (
    CHANNELS,
    EMBEDDING,
    INPUTS,
    TOKENS,
    TextEncoder,
    in_torch,
    sentences,
    write_text_onnx,
)
from tests.graphs import needs_rtx, session_of
from tests.refusals import rejects

NAMES = ["input_ids", "attention_mask"]
OTHER_BATCH = "got 'batch', 'masks' and 'batch'"


@pytest.fixture(scope="module")
def text() -> ModelProto:
    return onnx_from_model(TextEncoder(), INPUTS, [EMBEDDING], precision="fp32", metadata={})


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("text")
    return {name: write_text_onnx(folder / f"{name}.onnx", name) for name in ("fp32", "fp16")}


@pytest.mark.slow("graph")
@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-5), ("fp16", 5e-3)])
def test_graph_equals_torch_at_every_batch(graphs: dict[str, Path], precision: str, bound: float) -> None:
    session = session_of(graphs[precision])
    assert [(each.name, each.type, each.shape) for each in session.get_inputs()] == [
        (name, "tensor(int64)", ["batch", TOKENS]) for name in NAMES
    ]
    for batch in (1, 3, 8):
        feed = sentences(batch, seed=batch)
        (embedding,), (exact,) = session.run(None, feed), in_torch(TextEncoder(), feed)
        assert (embedding.dtype, embedding.shape) == (np.float32, (batch, CHANNELS))
        assert np.linalg.norm(embedding - exact) < bound * np.linalg.norm(exact)


def test_metadata_describes_ports_except_for_plain_images(text: ModelProto) -> None:
    assert (noted_inputs(text), noted_outputs(text)) == ([*INPUTS], [EMBEDDING])
    assert roles_of_graph(text) == {"embedding": "embedding"}
    assert json.loads(notes_of(text)["export.outputs"]) == [{"name": "embedding", "role": "embedding"}]
    images = onnx_from_model(Pooled(), [image_port((3, 4, 4))], [LOGITS], precision="fp32", metadata={})
    assert not {"export.inputs", "export.outputs"} & notes_of(images).keys()
    assert (noted_inputs(images), noted_outputs(images)) == (None, [LOGITS])


class Pooled(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images.mean((2, 3))


class Scaled(nn.Module):
    """A model that takes floats, whole numbers and bools."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 3))

    def forward(self, x: Tensor, counts: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        maps = x[:, None] * counts[..., None].to(x.dtype)
        return (maps.sum(1) @ self.weight), maps.masked_fill(~keep[:, None], 0.0)


@pytest.mark.slow("graph")
def test_fp16_keeps_input_types_and_output_order() -> None:
    inputs = [
        Port(name="x", shape=(4,)),
        Port(name="counts", shape=(2,), dtype="int32"),
        Port(name="keep", shape=(4,), dtype="bool"),
    ]
    outputs = [LOGITS, OutputPort(name="maps", role="feature map")]
    proto = onnx_from_model(Scaled(), inputs, outputs, precision="fp16", metadata={})
    types = [value.type.tensor_type.elem_type for value in (*proto.graph.input, *proto.graph.output)]
    assert types == [TensorProto.FLOAT, TensorProto.INT32, TensorProto.BOOL, TensorProto.FLOAT, TensorProto.FLOAT]
    rng = np.random.default_rng(0)
    x, counts = rng.standard_normal((3, 4)).astype(np.float32), rng.integers(0, 5, (3, 2)).astype(np.int32)
    keep = rng.integers(0, 2, (3, 4)).astype(bool)
    session = session_of(proto)
    logits, maps = session.run(["logits", "maps"], {"x": x, "counts": counts, "keep": keep})
    exact = x[:, None] * counts[..., None]
    np.testing.assert_allclose(logits, exact.sum((1, 2))[:, None].repeat(3, 1), rtol=0, atol=2e-2)
    np.testing.assert_allclose(maps, exact * keep[:, None], rtol=2e-3, atol=1e-3)
    assert roles_of_graph(proto) == {"maps": "feature map"}


def rename_input(proto: ModelProto) -> None:
    proto.graph.input[0].name = "ids"
    for node in proto.graph.node:
        node.input[:] = ["ids" if name == "input_ids" else name for name in node.input]


def swap_inputs(proto: ModelProto) -> None:
    for value, other in zip(proto.graph.input, deepcopy(proto).graph.input[::-1], strict=True):
        value.CopyFrom(other)


def narrow_mask(proto: ModelProto) -> None:
    proto.graph.input[1].type.tensor_type.elem_type = TensorProto.INT32
    proto.graph.node.insert(0, helper.make_node("Cast", ["attention_mask"], ["wide"], to=TensorProto.INT64))
    for node in proto.graph.node[1:]:
        node.input[:] = ["wide" if name == "attention_mask" else name for name in node.input]


def other_batch(proto: ModelProto) -> None:
    proto.graph.input[1].type.tensor_type.shape.dim[0].dim_param = "masks"
    del proto.graph.value_info[:]


def fewer_tokens(proto: ModelProto) -> None:
    for value in proto.graph.input:
        value.type.tensor_type.shape.dim[1].dim_value = TOKENS - 1
    del proto.graph.value_info[:]


def open_tokens(proto: ModelProto) -> None:
    proto.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "tokens"
    del proto.graph.value_info[:]


def note_other_role(proto: ModelProto, role: str = "token logits") -> None:
    notes = {"export.outputs": f'[{{"name":"embedding","role":"{role}"}}]'}
    onnx.helper.set_model_props(proto, notes | {"export.inputs": notes_of(proto)["export.inputs"]})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (rename_input, ["expected the inputs 'input_ids', 'attention_mask', found ids, attention_mask"]),
        (swap_inputs, ["expected the inputs 'input_ids', 'attention_mask', found attention_mask, input_ids"]),
        (narrow_mask, ["attention_mask must be int64, got int32"]),
        (other_batch, [f"{', '.join(NAMES)} and embedding must share one batch dimension, {OTHER_BATCH}"]),
        (fewer_tokens, [f"{name} must have the sizes [6] behind the batch, got [5]" for name in NAMES]),
        (open_tokens, ["input_ids must have rank 2 with a fixed size behind the batch, got ['batch', 'tokens']"]),
        (note_other_role, ["embedding must have rank 3 with a fixed size behind the batch, got ['batch', 8]"]),
        (
            lambda proto: onnx.helper.set_model_props(proto, {"export.precision": "fp32"}),
            [
                "expected one input named 'images', found input_ids, attention_mask",
                "expected one output named 'logits', found embedding",
            ],
        ),
    ],
)
def test_each_fault_of_a_port_is_named(text: ModelProto, change: Callable[[ModelProto], None], says: list[str]) -> None:
    broken = deepcopy(text)
    change(broken)
    assert check_onnx(broken, backend="tensorrt-rtx") == says


def test_unreadable_metadata_is_named(text: ModelProto) -> None:
    broken = deepcopy(text)
    note_other_role(broken, "poem")
    (reason,) = check_onnx(broken)
    assert reason.startswith("the note export.outputs can't be read")


slow = partial(pytest.param, marks=pytest.mark.slow("graph"))


class Unpooled(nn.Module):
    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return torch.stack([ids, mask], 1).float()


@pytest.mark.parametrize(
    ("model", "inputs", "outputs", "says"),
    [
        (TextEncoder(), [], [EMBEDDING], "at least one input and one output, got 0 and 1"),
        (TextEncoder(), INPUTS, [], "at least one input and one output, got 2 and 0"),
        (TextEncoder(), [*INPUTS, INPUTS[0]], [EMBEDDING], "needs a name of its own"),
        (TextEncoder(), [INPUTS[0]], [OutputPort(name="input_ids", role="embedding")], "needs a name of its own"),
        (TextEncoder(), [Port(name="x", shape=(2,), dtype="int16")], [EMBEDDING], "x: got the type 'int16'"),
        (TextEncoder(), [Port(name="x", shape=(), dtype="int64")], [EMBEDDING], "x: the shape behind the batch"),
        (TextEncoder(), [INPUTS[0]], [EMBEDDING], r"the model refuses input_ids of shape \[2, 6\]: .*mask"),
        slow(TextEncoder(), INPUTS, [LOGITS, EMBEDDING], "the outputs 'logits', 'embedding', found logits"),
        slow(TextEncoder(words=True), INPUTS, [EMBEDDING], "one output named 'embedding', found embedding, "),
        (TextEncoder(), INPUTS, [OutputPort(name="words", role="token logits")], "words must have rank 3"),
        (Unpooled(), INPUTS, [EMBEDDING], "embedding must have rank 2 .*export a model whose output is pooled"),
    ],
)
def test_invalid_ports_are_refused_with_the_reason(
    model: nn.Module, inputs: list[Port], outputs: list[OutputPort], says: str
) -> None:
    rejects(says, onnx_from_model, model, inputs, outputs, precision="fp32", metadata={})


def test_optimised_graph_keeps_ports_and_metadata(graphs: dict[str, Path], tmp_path: Path) -> None:
    write_engine(build_ort_artifact(graphs["fp32"]), tmp_path / "model.onnx")
    record = record_of_plan(tmp_path / "model.onnx")
    assert [port.name for port in record.inputs] == NAMES
    assert record.roles == {"embedding": "embedding"}
    assert noted_outputs(onnx.load(tmp_path / "model.onnx")) == [EMBEDDING]


@needs_rtx
def test_plan_has_every_input_in_its_profile(graphs: dict[str, Path], tmp_path: Path) -> None:
    options = BuildOptions(backend="tensorrt-rtx", profiles=(BatchProfile.from_text("1:4:16"),), sms=("86",))
    engine = build_engine(graphs["fp16"], options)
    write_engine(engine, tmp_path / "text.plan")
    record = record_of_plan(tmp_path / "text.plan")
    assert record == engine.record
    assert record.inputs == tuple(GraphPort(name=name, dtype="int64", shape=("batch", TOKENS)) for name in NAMES)
    assert record.outputs == (GraphPort(name="embedding", dtype="float32", shape=("batch", CHANNELS)),)
    assert (record.roles, record.profiles, record.precision) == ({"embedding": "embedding"}, ("1:4:16",), "fp16")


def test_repository_config_names_every_input_with_its_type(graphs: dict[str, Path], tmp_path: Path) -> None:
    serving = Serving(preferred_batches=(4,), max_batch=16)
    package = Package(name="text", onnx=graphs["fp16"], cpu_onnx=graphs["fp32"], serving=serving)
    write_repository(package, tmp_path / "repo")
    assert lint_repository(tmp_path / "repo") == ()
    config = config_of(tmp_path / "repo/text_cpu")
    borders = [(each.text("name"), each.text("data_type"), *sizes(each)) for each in config.messages("input")]
    assert borders == [(name, "TYPE_INT64", TOKENS) for name in NAMES]
    (output,) = config.messages("output")
    assert (output.text("name"), output.text("data_type"), *sizes(output)) == ("embedding", "TYPE_FP32", CHANNELS)
    for sample in config.messages("model_warmup"):
        assert [each.text("key") for each in sample.messages("inputs")] == NAMES
    entry = json.loads((tmp_path / "repo/expected.json").read_text())["models"]["text_cpu"]["1"]
    assert entry["outputs"] == {"embedding": "embedding"}
    assert "--shape input_ids:6 --shape attention_mask:6 --input-data zero" in entry["client"][0]
    script = (tmp_path / "repo/text_onnx/1/build_plan.sh").read_text()
    assert "--optShapes=input_ids:4x6,attention_mask:4x6 --maxShapes=input_ids:16x6,attention_mask:16x6" in script


def sizes(message: Message) -> list[object]:
    return [field.value for field in message.all("dims")]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('name: "attention_mask"', 'name: "mask"', "has no input 'mask', only 'input_ids', 'attention_mask'"),
        ("data_type: TYPE_INT64", "data_type: TYPE_INT32", "input input_ids is TYPE_INT64 in model.onnx"),
        ("dims: [6]", "dims: [7]", "input input_ids has dims [6] in model.onnx, got [7]"),
        ('key: "attention_mask"', 'key: "mask"', "does not fill 'attention_mask'"),
    ],
)
def test_config_that_contradicts_an_input_is_found(
    graphs: dict[str, Path], tmp_path: Path, old: str, new: str, says: str
) -> None:
    write_repository(Package(name="text", cpu_onnx=graphs["fp32"]), tmp_path / "repo")
    replaced(tmp_path / "repo/text_cpu/config.pbtxt", old, new)
    assert any(says in each.what for each in lint_repository(tmp_path / "repo")), lint_repository(tmp_path / "repo")


def test_incompatible_models_in_one_repository_are_refused(graphs: dict[str, Path], tmp_path: Path) -> None:
    labels = tuple(map(str, range(CHANNELS)))
    labelled = Package(name="text", cpu_onnx=graphs["fp32"], labels=labels)
    said = r"labels name classes, and its outputs are embedding \(embedding\)"
    rejects(said, write_repository, labelled, tmp_path / "repo")
    proto = onnx.load(graphs["fp32"])
    other_batch(proto)
    onnx.save(proto, tmp_path / "batches.onnx")
    other = Package(name="text", cpu_onnx=tmp_path / "batches.onnx")
    rejects(r"different batches .*input_ids .*; export them with one", write_repository, other, tmp_path / "repo")
