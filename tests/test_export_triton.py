"""Written Triton repositories: configs, versions and switching between them, build scripts and refusals."""

import itertools
import json
from pathlib import Path

import pytest

from export.engine.options import BatchProfile
from export.engine.record import record_path
from export.triton.config import Agreement, Expected, Latency, Serving
from export.triton.lint import lint_repository
from export.triton.pbtxt import Message
from export.triton.repository import AddedVersion, write_repository
from export.triton.server_releases import onnx_warnings, plan_warnings, server_release, server_tags
from export.triton.variants import Package
from export.triton.versions import config_path, switch_version, versions_of
from ground.errors import BadInput
from tests.doubles import some
from tests.export_served import CLASSES, SHAPE, config_of, run_script, write_onnx, write_plan
from tests.refusals import rejects

LABELS = tuple(f"class {index}" for index in range(CLASSES))
SERVING = Serving(preferred_batches=(4,), queue_delay_us=700, graph_batches=(1, 4))
FIGURES = Expected(
    measured_on="a GPU",
    latencies=(Latency(batch=4, p50_ms=1.5, low_ms=1.4, high_ms=1.7),),
    top1_agreement=Agreement(share=0.99, images=1000, low=0.98, high=0.995),
)
PROFILES = (BatchProfile(smallest=1, tuned=2, largest=4), BatchProfile(smallest=1, tuned=16, largest=64))


def full(folder: Path, **changes: object) -> Package:
    """Make a package of a plan, an ONNX graph and one for the CPU, with labels and expected figures."""
    graph = write_onnx(folder / "model.onnx")
    values: dict[str, object] = {
        "name": "vit", "plans": (write_plan(folder / "model.plan", graph),), "onnx": graph, "cpu_onnx": graph,
        "labels": LABELS, "serving": SERVING, "expected": {"plan": FIGURES},
    }  # fmt: skip
    return Package(**{**values, **changes})  # type: ignore[arg-type]


def numbers(message: Message, name: str) -> list[int]:
    return [*message.numbers(name)]


def test_plan_config_follows_its_record_and_measurements(tmp_path: Path) -> None:
    write_repository(full(tmp_path), tmp_path / "repo")
    config = config_of(tmp_path / "repo/vit")
    assert (config.text("name"), config.text("platform")) == ("vit", "tensorrt_plan")
    assert config.number("max_batch_size") == 16
    images, logits = config.messages("input")[0], config.messages("output")[0]
    assert (images.text("name"), images.text("data_type"), numbers(images, "dims")) == ("images", "TYPE_FP32", [*SHAPE])
    assert (logits.text("name"), numbers(logits, "dims")) == ("logits", [CLASSES])
    assert (tmp_path / "repo/vit" / logits.text("label_filename")).read_text().splitlines() == list(LABELS)
    batching = config.inner("dynamic_batching")
    assert numbers(batching, "preferred_batch_size") == [4]
    assert batching.number("max_queue_delay_microseconds") == 700
    assert [sample.number("batch_size") for sample in config.messages("model_warmup")] == [1, 4, 16]
    specs = config.inner("optimization").inner("cuda").messages("graph_spec")
    assert [spec.number("batch_size") for spec in specs] == [1, 4]
    assert config.messages("instance_group")[0].text("kind") == "KIND_GPU"
    assert config.inner("version_policy").message("latest") is not None
    assert (tmp_path / "repo/vit/1/model.plan").read_bytes() == (tmp_path / "model.plan").read_bytes()


def test_each_variant_is_a_model_with_its_own_backend(tmp_path: Path) -> None:
    written = write_repository(full(tmp_path), tmp_path / "repo")
    assert written == AddedVersion(models=("vit", "vit_onnx", "vit_cpu"), warnings=())
    backends = {name: config_of(tmp_path / "repo" / name).text("backend") for name in written.models}
    assert backends == {"vit": "tensorrt", "vit_onnx": "onnxruntime", "vit_cpu": "python"}
    assert config_of(tmp_path / "repo/vit_cpu").messages("instance_group")[0].text("kind") == "KIND_CPU"
    assert config_of(tmp_path / "repo/vit_onnx").message("optimization") is None
    assert "class TritonPythonModel" in (tmp_path / "repo/vit_cpu/1/model.py").read_text()
    assert sorted(path.name for path in (tmp_path / "repo").iterdir()) == ["expected.json", *sorted(written.models)]
    assert lint_repository(tmp_path / "repo") == ()


def test_plans_for_several_gpus_are_chosen_by_compute_capability(tmp_path: Path) -> None:
    graph = write_onnx(tmp_path / "model.onnx")
    plans = tuple(write_plan(tmp_path / f"{sm}.plan", graph, target=sm) for sm in ("86", "120"))
    write_repository(full(tmp_path, plans=plans), tmp_path / "repo")
    entries = config_of(tmp_path / "repo/vit").messages("cc_model_filenames")
    found = {entry.text("key"): entry.text("value") for entry in entries}
    assert found == {"8.6": "model.sm86.plan", "12.0": "model.sm120.plan"}
    for plan, name in zip(plans, found.values(), strict=True):
        assert (tmp_path / "repo/vit/1" / name).read_bytes() == plan.read_bytes()
    assert lint_repository(tmp_path / "repo") == ()
    script, config = tmp_path / "repo/vit_onnx/1/build_plan.sh", (tmp_path / "repo/vit/config.pbtxt").read_bytes()
    assert run_script(script, tmp_path, "inside")
    assert (tmp_path / "repo/vit/1/model.sm120.plan").read_text() == "built\n", "the plan of this GPU"
    assert (tmp_path / "repo/vit/1/model.sm86.plan").read_bytes() == plans[0].read_bytes()
    assert not record_path(tmp_path / "repo/vit/1/model.sm120.plan").exists()
    assert (tmp_path / "repo/vit/config.pbtxt").read_bytes() == config


def test_fixed_batch_is_served_without_batching_and_reported(tmp_path: Path) -> None:
    graph = write_onnx(tmp_path / "fixed.onnx", batch=2)
    plan = write_plan(tmp_path / "fixed.plan", graph, profiles=(), batch=2)
    package = full(tmp_path, plans=(plan,), onnx=graph, cpu_onnx=graph, serving=Serving(preferred_batches=(4,)))
    written = write_repository(package, tmp_path / "repo")
    assert [text.split(", so")[0] for text in written.warnings] == [
        f"{name}: takes batches of 2 only" for name in ("vit", "vit_onnx", "vit_cpu")
    ]
    for name in written.models:
        config = config_of(tmp_path / "repo" / name)
        assert config.number("max_batch_size", -1) == 0
        assert numbers(config.messages("input")[0], "dims") == [2, *SHAPE]
        assert config.message("dynamic_batching") is None
        assert [sample.number("batch_size") for sample in config.messages("model_warmup")] == [1]
    assert lint_repository(tmp_path / "repo") == ()


def test_expected_json_contains_figures_and_client_commands(tmp_path: Path) -> None:
    write_repository(full(tmp_path), tmp_path / "repo")
    models = json.loads((tmp_path / "repo/expected.json").read_text())["models"]
    entry = models["vit"]["1"]
    assert entry["latencies"] == [{"batch": 4, "measure": "compute", "p50_ms": 1.5, "interval_ms": [1.4, 1.7]}]
    assert entry["top1_agreement"] == {"share": 0.99, "interval": [0.98, 0.995], "images": 1000}
    assert "-m vit -x 1" in entry["client"][0]
    assert "-b 4 --shape images:3,4,4" in entry["client"][0]
    assert models["vit_cpu"]["1"]["latencies"] is None


def test_versions_coexist_and_older_ones_stay_complete(tmp_path: Path) -> None:
    repository = tmp_path / "repo"
    write_repository(full(tmp_path), repository)
    bigger = write_plan(tmp_path / "bigger.plan", tmp_path / "model.onnx", profiles=("1:8:32",))
    write_repository(full(tmp_path, version=2, plans=(bigger,)), repository)
    assert versions_of(repository / "vit") == (1, 2)
    assert config_of(repository / "vit").number("max_batch_size") == 32

    changed = switch_version(repository, "vit", 1)
    assert (changed.models, changed.unchanged) == (("vit", "vit_onnx", "vit_cpu"), ())
    config = config_of(repository / "vit")
    assert config.number("max_batch_size") == 16, "the config of version 1 came back with it"
    assert numbers(config.inner("version_policy").inner("specific"), "versions") == [1]
    assert lint_repository(repository) == ()

    assert switch_version(repository, "vit", 2).version == 2
    rejects("has no version 7, only 1, 2", switch_version, repository, "vit", 7)
    rejects("there is no model 'cat'", switch_version, repository, "cat", 1)


def test_version_in_only_some_variants_is_handled(tmp_path: Path) -> None:
    repository = tmp_path / "repo"
    write_repository(full(tmp_path, plans=(), onnx=None), repository)
    assert write_repository(full(tmp_path, version=2), repository).models == ("vit", "vit_onnx", "vit_cpu")
    changed = switch_version(repository, "vit", 1)
    assert (changed.models, changed.unchanged) == (("vit_cpu",), ("vit", "vit_onnx"))
    assert config_path(repository / "vit_cpu", 2).exists()


def test_older_version_added_later_is_not_served(tmp_path: Path) -> None:
    write_repository(full(tmp_path, version=5, plans=(), onnx=None), tmp_path / "repo")
    written = write_repository(full(tmp_path, version=3, plans=(), onnx=None), tmp_path / "repo")
    assert written.warnings == ("vit_cpu: the server takes version 5, the newest, and not 3",)


def test_build_script_builds_a_missing_plan(tmp_path: Path) -> None:
    repository = tmp_path / "repo"
    write_repository(full(tmp_path, plans=(), server="25.12"), repository)
    assert not (repository / "vit").exists(), "a model without a plan would keep the server from starting"
    script = repository / "vit_onnx/1/build_plan.sh"
    assert "tritonserver:25.12-py3" in script.read_text()
    arguments = some(run_script(script, tmp_path, "inside"))
    assert (repository / "vit/1/model.plan").read_text() == "built\n"
    shapes = {f"--{kind}Shapes=images:{size}x3x4x4" for kind, size in {"min": 1, "opt": 4, "max": 8}.items()}
    assert {"--stronglyTyped", "--profile=0", *shapes} <= {*arguments}
    config = config_of(repository / "vit")
    assert (config.text("platform"), config.number("max_batch_size")) == ("tensorrt_plan", 8)
    severities = {finding.severity for finding in lint_repository(repository)}
    assert severities == {"warning"}, "a plan without a record can't be compared"
    assert switch_version(repository, "vit", 1).models == ("vit", "vit_onnx", "vit_cpu")


def test_build_script_uses_the_profiles_of_a_package_without_a_plan(tmp_path: Path) -> None:
    repository = tmp_path / "repo"
    serving = Serving(graph_batches=(64,))
    write_repository(full(tmp_path, plans=(), profiles=PROFILES, serving=serving), repository)
    arguments = some(run_script(repository / "vit_onnx/1/build_plan.sh", tmp_path, "inside"))
    shapes = [argument for argument in arguments if argument.startswith(("--profile", "--optShapes", "--maxShapes"))]
    assert shapes == [
        *("--profile=0", "--optShapes=images:2x3x4x4", "--maxShapes=images:4x3x4x4"),
        *("--profile=1", "--optShapes=images:16x3x4x4", "--maxShapes=images:64x3x4x4"),
    ]
    assert config_of(repository / "vit").number("max_batch_size") == 64
    fixed = write_onnx(tmp_path / "fixed.onnx", batch=2)
    package = full(tmp_path, version=2, plans=(), onnx=fixed, profiles=PROFILES)
    said = "fixed.onnx: its batch is fixed at 2, asked for profiles 1:2:4, 1:16:64"
    rejects(said, write_repository, package, repository)


def test_build_script_keeps_the_plan_if_the_build_fails_or_the_graph_changed(tmp_path: Path) -> None:
    repository = tmp_path / "repo"
    write_repository(full(tmp_path), repository)
    script, plan = repository / "vit_onnx/1/build_plan.sh", repository / "vit/1/model.plan"
    before = plan.read_bytes()
    assert run_script(script, tmp_path, "inside", exit_code=1) is None
    write_onnx(repository / "vit_onnx/1/model.onnx", seed=1)
    assert run_script(script, tmp_path, "inside") is None
    assert plan.read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"name": "a/b"}, "model name 'a/b'"),
        ({"labels": ("a", "b")}, "2 labels for 5 outputs"),
        ({"labels": ("a", "a", "b", "c", "d")}, "unique"),
        ({"serving": Serving(preferred_batches=(32,))}, "preferred batch 32 is beyond the largest batch 16"),
        ({"serving": Serving(graph_batches=(17,))}, "CUDA graph of batch 17"),
        ({"serving": Serving(graph_batches=(9,), max_batch=8), "plans": ()}, "vit: CUDA graph of batch 9 is beyond"),
        ({"profiles": PROFILES}, "vit: profiles are for the script .* the plan has its own"),
        ({"profiles": PROFILES, "plans": (), "onnx": None}, "vit: profiles are for the script .* give that file"),
        ({"server": "19.01"}, "'19.01' is not in the table"),
    ],
)
def test_contradictory_inputs_are_refused_and_nothing_is_written(
    tmp_path: Path, changes: dict[str, object], told: str
) -> None:
    rejects(told, lambda: write_repository(full(tmp_path, **changes), tmp_path / "repo"))
    assert not (tmp_path / "repo").exists()


def test_mismatched_plans_are_refused(tmp_path: Path) -> None:
    graph = write_onnx(tmp_path / "model.onnx")

    def refused(said: str, *plans: Path) -> None:
        rejects(said, write_repository, full(tmp_path, plans=plans), tmp_path / "repo")

    refused("built for tensorrt-rtx", write_plan(tmp_path / "a.plan", graph, backend="tensorrt-rtx"))
    twins = [write_plan(tmp_path / f"{name}.plan", graph) for name in ("b", "c")]
    refused("another plan is for SM 86", *twins)
    refused("profiles differ", twins[0], write_plan(tmp_path / "d.plan", graph, target="89", profiles=("1:4:8",)))
    refused("needs one SM", twins[0], write_plan(tmp_path / "e.plan", graph, target="unknown"))
    twins[0].write_bytes(b"another plan")
    refused("its bytes are not those", twins[0])
    record_path(twins[1]).unlink()
    refused("both needed", twins[1])
    (tmp_path / "cut.onnx").write_bytes(graph.read_bytes()[:40])
    rejects("cut short", write_repository, full(tmp_path, onnx=tmp_path / "cut.onnx"), tmp_path / "repo")
    assert not (tmp_path / "repo").exists()


def test_version_is_never_overwritten(tmp_path: Path) -> None:
    write_repository(full(tmp_path), tmp_path / "repo")
    rejects(r"version 1 is already there .* --model-version 2", write_repository, full(tmp_path), tmp_path / "repo")
    (tmp_path / "file").write_text("")
    rejects("a file is in the way", write_repository, full(tmp_path), tmp_path / "file")


def tree(folder: Path) -> dict[str, bytes | None]:
    found = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in found}


@pytest.mark.parametrize("place", ["vit_cpu/configs/2.pbtxt", "vit_onnx/config.pbtxt", "vit_cpu/2", "expected.json"])
def test_blocked_version_leaves_the_repository_unchanged(tmp_path: Path, place: str) -> None:
    repository = tmp_path / "repo"
    write_repository(full(tmp_path), repository)
    (repository / place).unlink(missing_ok=True)
    if place == "vit_cpu/2":
        (repository / place).write_text("in the way")
    else:
        (repository / place).mkdir()
    before = tree(tmp_path)
    with pytest.raises((BadInput, OSError)):
        write_repository(full(tmp_path, version=2), repository)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("at", range(6))
@pytest.mark.parametrize("version", [1, 2])
def test_interrupted_package_leaves_the_repository_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, version: int
) -> None:
    if version == 2:
        write_repository(full(tmp_path), tmp_path / "repo")
    package = full(tmp_path, version=version)
    before, syncs = tree(tmp_path), itertools.count()

    def interrupted(_: int) -> None:
        if next(syncs) == at:
            raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_repository(package, tmp_path / "repo")
    assert tree(tmp_path) == before


def test_switching_the_version_changes_every_variant_or_none(tmp_path: Path) -> None:
    repository = tmp_path / "repo"
    for version in (1, 2):
        write_repository(full(tmp_path, version=version), repository)
    (repository / "vit_cpu/config.pbtxt").unlink()
    (repository / "vit_cpu/config.pbtxt").mkdir()
    before = tree(tmp_path)
    rejects("a directory, expected a regular file", switch_version, repository, "vit", 1)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("name", ["../r/vit", "", "a/b", ".vit", "vit" * 10_000])
def test_model_name_cannot_be_a_path(tmp_path: Path, name: str) -> None:
    write_repository(full(tmp_path), tmp_path / "r")
    rejects("model name", switch_version, tmp_path / "r", name, 1)


def test_server_release_with_other_versions_gives_a_warning(tmp_path: Path) -> None:
    graph = write_onnx(tmp_path / "new.onnx", opset=23, ir=11)
    package = full(tmp_path, onnx=graph, server="25.10-trtllm-python-py3")
    told = write_repository(package, tmp_path / "repo").warnings
    for words in (
        ("built with TensorRT 10.14.1.48 and", "has 10.11.0.33: it will not load"),
        ("was built from another ONNX",),
        ("vit_cpu", "pip install"),
    ):
        assert any(all(word in text for word in words) for text in told), words
    assert not any("opset" in text for text in told), "ONNX Runtime 1.23 reads opset 23"


def test_server_releases_give_their_warnings() -> None:
    release = server_release("25.12-trtllm-python-py3")
    assert (release.tensorrt, release.onnxruntime, release.server) == ("10.13.3.9", "1.23.2", "2.64.0")
    assert plan_warnings(release, "10.13.3.9") == []
    assert "will not load" in plan_warnings(release, "11.4.0.106")[0]
    assert "version-compatible=true" in plan_warnings(release, "10.14.1.48", version_compatible=True)[0]
    assert "will not load" in plan_warnings(release, "9.3.0", version_compatible=True)[0]
    assert "does not know the TensorRT" in plan_warnings(server_release("26.07"), "11.4.0.106")[0]
    old = server_release("25.01")
    assert onnx_warnings(old, opset=20, ir=10) == []
    assert len(onnx_warnings(old, opset=23, ir=11)) == 2
    for tag in server_tags():
        assert server_release(tag).image.endswith(f":{tag}-py3")
    rejects(r"known are 26\.07", server_release, "26.07-sdk")
