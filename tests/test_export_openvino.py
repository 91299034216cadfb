"""Models for a server's OpenVINO backend: their configs, and lint findings on invalid ones."""

from pathlib import Path

import pytest

from export.triton.config import Serving
from export.triton.lint import lint_repository
from export.triton.pbtxt import Message
from export.triton.repository import CHOOSES_BF16, write_repository
from export.triton.variants import Package
from tests.export_served import CLASSES, config_of, replaced, write_onnx


def packaged(tmp_path: Path, *, batch: int | str = "batch", **told: object) -> tuple[Path, tuple[str, ...]]:
    graph = write_onnx(tmp_path / "model.onnx", **({} if batch == "batch" else {"batch": batch}))  # type: ignore[arg-type]
    serving = Serving(cpu_backend="openvino", preferred_batches=(4,), **told)  # type: ignore[arg-type]
    labels = tuple(f"class {index}" for index in range(CLASSES))
    added = write_repository(Package(name="vit", cpu_onnx=graph, labels=labels, serving=serving), tmp_path / "repo")
    return tmp_path / "repo", added.warnings


def parameters(config: Message) -> dict[str, str]:
    return {each.text("key"): each.inner("value").text("string_value") for each in config.messages("parameters")}


def test_openvino_backend_reads_the_config(tmp_path: Path) -> None:
    repository, warnings = packaged(tmp_path, cpu_threads=3, instances=2)
    config = config_of(repository / "vit_cpu")
    assert (config.text("backend"), config.text("platform")) == ("openvino", "")
    assert config.text("default_model_filename") == "model.onnx"
    assert sorted(path.name for path in (repository / "vit_cpu/1").iterdir()) == ["labels.txt", "model.onnx"]
    assert parameters(config) == {"NUM_STREAMS": "2", "PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": "3"}
    (group,) = config.messages("instance_group")
    assert (group.text("kind"), group.number("count")) == ("KIND_CPU", 2)
    # The backend would fix the batch at max_batch_size and fill every request up to it.
    assert (config.number("max_batch_size", -1), config.message("dynamic_batching")) == (0, None)
    assert config.messages("input")[0].numbers("dims") == (-1, 3, 4, 4)
    (warm_up,) = config.messages("model_warmup")
    assert warm_up.inner("inputs").inner("value").numbers("dims") == (1, 3, 4, 4)
    assert warnings == (f"vit_cpu: {CHOOSES_BF16}",)
    assert lint_repository(repository) == ()


def test_config_requests_bf16_by_its_key(tmp_path: Path) -> None:
    repository, warnings = packaged(tmp_path, cpu_bf16=True)
    assert parameters(config_of(repository / "vit_cpu"))["HINT_BF16"] == "YES"
    assert warnings == ()
    assert lint_repository(repository) == ()


def test_fixed_batch_is_served_without_batching(tmp_path: Path) -> None:
    repository, warnings = packaged(tmp_path, batch=2)
    assert config_of(repository / "vit_cpu").messages("input")[0].numbers("dims") == (2, 3, 4, 4)
    assert "takes batches of 2 only" in warnings[0]
    assert lint_repository(repository) == ()


@pytest.mark.parametrize(
    ("old", "new", "severity", "said"),
    [
        ("NUM_STREAMS", "INFERENCE_PRECISION_HINT", "warning", "is ignored by the OpenVINO backend"),
        ('"2"', '"few"', "error", "parameter NUM_STREAMS is 'few'"),
        ("LATENCY", "FAST", "error", "parameter PERFORMANCE_HINT is 'FAST'"),
        ("KIND_CPU", "KIND_GPU", "error", "the OpenVINO backend runs on the CPU, got KIND_GPU"),
        ("KIND_CPU", "KIND_AUTO", "warning", "a server with a GPU starts the model there"),
        ('default_model_filename: "model.onnx"\n', "", "error", "model.xml is missing"),
        ("[-1, 3, 4, 4]", "[-1, 3, 4, 5]", "error", "has dims [-1, 3, 4, 4]"),
    ],
)
def test_lint_reports_what_the_backend_refuses_or_ignores(
    tmp_path: Path, old: str, new: str, severity: str, said: str
) -> None:
    repository, _ = packaged(tmp_path, instances=2)
    replaced(repository / "vit_cpu/config.pbtxt", old, new)
    assert any(each.severity == severity and said in each.what for each in lint_repository(repository))


@pytest.mark.parametrize(
    ("padding", "severity", "said"),
    [
        ("", "error", "requests of fewer than 8 fail"),
        ("yes", "warning", "every request is padded to a batch of 8"),
        ("NO", "error", "requests of fewer than 8 fail"),
    ],
)
def test_lint_reports_that_the_backend_fixes_the_batch(tmp_path: Path, padding: str, severity: str, said: str) -> None:
    repository, _ = packaged(tmp_path)
    path = repository / "vit_cpu/config.pbtxt"
    text = path.read_text().replace("max_batch_size: 0", "max_batch_size: 8").replace("[-1, ", "[").replace("[1, ", "[")
    text = text.replace("dims: [-1, 5]", "dims: [5]")
    if padding:
        text += f'parameters {{\n  key: "ENABLE_BATCH_PADDING"\n  value {{ string_value: "{padding}" }}\n}}\n'
    path.write_text(text)
    found = [each for each in lint_repository(repository) if said in each.what]
    assert [each.severity for each in found] == [severity]


def test_openvino_ir_needs_its_weights_beside_it(tmp_path: Path) -> None:
    repository, _ = packaged(tmp_path)
    replaced(repository / "vit_cpu/config.pbtxt", "model.onnx", "model.xml")
    (repository / "vit_cpu/1/model.xml").write_text("<net/>")
    (fault,) = lint_repository(repository)
    assert "model.bin with the weights of model.xml is missing" in fault.what
    (repository / "vit_cpu/1/model.bin").write_bytes(b"")
    assert lint_repository(repository) == ()
