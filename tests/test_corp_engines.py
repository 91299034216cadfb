"""`verify` between engines of one graph: directly, by golden outputs, and its refusals, on stand-ins for engines."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import Result
from PIL import Image

from corp_deploy.proof import candidates
from corp_deploy.proof.compare_engines import read_golden
from corp_deploy.store.checkpoint import save
from corp_deploy.store.input_sets import images_for_model
from corp_deploy.store.onnx_file import export_checkpoint
from export.engine.record import record_of_plan, record_path, sha256_of
from export.graph.ports import ports_of_graph
from ground.built_engines import record_built_engine
from ground.errors import BadInput
from ground.feeds import Feeds, Outputs
from ground.files import sha256_of_file, write_json
from perf.parity.parity import load_parity
from perf.runners.onnx import OnnxRunner
from tests import tiny
from tests.command import invoked, refuses
from tests.export_served import engine_record

ERRORS = {"10.16.1": 0.0, "11.4.0": 0.25}


def plan(path: Path, graph: Path, *, version: str = "10.16.1", **changes: object) -> Path:
    """Write a stand-in for a plan of this graph: its bytes are the version, its record has the rest."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(version)
    record_built_engine(sha256_of(path.read_bytes()))
    proto = onnx.load(graph)
    inputs, outputs = ports_of_graph(proto)
    record = engine_record(
        path.read_bytes(), graph.read_bytes(), library_version=version, command="build", precision="fp32",
        half_weight_share=0.0, targets=("89",), gpu="A Card", profiles=("1:4:8",), inputs=inputs, outputs=outputs,
        notes={each.key: each.value for each in proto.metadata_props if not each.key.startswith("export.")},
    )  # fmt: skip
    write_json(record_path(path), replace(record, **changes).to_json())  # type: ignore[arg-type]
    return path


class StandIn:
    """An engine that runs its graph in ONNX Runtime and adds the version's entry in ERRORS to the first logit."""

    def __init__(self, path: Path, graph: Path) -> None:
        self._runner, self._version = OnnxRunner(graph), path.read_text()

    def __enter__(self) -> "StandIn":
        if self._version not in ERRORS:
            raise BadInput("tensorrt 11.4.0 cannot load this plan: it was built by another version")
        self._runner.__enter__()
        self.inputs, self.outputs = self._runner.inputs, self._runner.outputs
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.__exit__(None, None, None)

    def __call__(self, feeds: Feeds) -> Outputs:
        logits = self._runner(feeds)["logits"].copy()
        logits[:, 0] += ERRORS[self._version]
        return {"logits": logits}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("home")
    save(tiny.checkpoint(), root / "dense")
    export_checkpoint(tiny.checkpoint(), root / "m.onnx", precision="fp32")
    other = onnx.load(root / "m.onnx")
    other.doc_string = "another"
    onnx.save(other, root / "other.onnx")
    plan(root / "old" / "m.plan", root / "m.onnx")
    plan(root / "new" / "m.plan", root / "m.onnx", version="11.4.0")
    plan(root / "same" / "m.plan", root / "m.onnx")
    plan(root / "other" / "m.plan", root / "other.onnx", precision="fp16")
    np.save(root / "images.npy", tiny.images(10))
    return root


@pytest.fixture(autouse=True)
def _stand_ins(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def engine(path: Path, backend: str, sha256: str) -> Iterator[StandIn]:
        assert backend == "tensorrt"
        assert sha256 == sha256_of(path.read_bytes())
        with StandIn(path, home / "m.onnx") as runner:
            yield runner

    monkeypatch.setattr(candidates, "EngineRunner", engine)


def output_of(result: Result) -> str:
    return " ".join(result.output.split())


def relative_error(error: float, home: Path) -> float:
    """Return the relative error of logits that are off by `error` in one class."""
    with OnnxRunner(home / "m.onnx") as runner:
        logits = runner({"images": tiny.images(10)})["logits"]
    return float(np.sqrt(10 * error**2) / np.linalg.norm(logits))


def test_engines_are_compared_by_golden_outputs(home: Path, tmp_path: Path) -> None:
    images = ("--images", home / "images.npy")
    written = invoked("verify", home / "old/m.plan", *images, "--write-golden", tmp_path / "golden")
    assert "tensorrt 10.16.1 for SM 89" in output_of(written)
    compare = ("verify", tmp_path / "golden", home / "new/m.plan", "-o", tmp_path / "p.json")
    invoked(*compare, "--max-error", 1.0)
    parity = load_parity(tmp_path / "p.json")
    (link,) = parity.links
    assert link.measures.relative_error == pytest.approx(relative_error(0.25, home), rel=0.02)
    assert [source.version for source in parity.sources] == ["10.16.1", "11.4.0"]
    assert {source.graph_sha256 for source in parity.sources} == {sha256_of_file(home / "m.onnx")}
    assert [source.sha256 for source in parity.sources] == [
        record_of_plan(home / name / "m.plan").plan_sha256 for name in ("old", "new")
    ]
    assert (parity.images.count, [row.batch for row in link.batches]) == (10, [1, 7])
    assert len(np.load(tmp_path / "p.npz").files) > 3
    invoked(*compare, "--max-error", 1e-4, code=1)
    invoked(*compare, code=3)


def test_engines_are_compared_directly_if_both_load(home: Path, tmp_path: Path) -> None:
    words = ("verify", home / "old/m.plan", home / "same/m.plan", "--random", 9, "-o", tmp_path / "p.json")
    same = invoked(*words, "--max-error", 1e-6, "--batch", "3,8", "--json")
    record = json.loads(same.stdout)
    assert record["links"][0]["measures"]["relative_error"] == 0.0
    assert (record["images"]["kind"], [row["batch"] for row in record["links"][0]["batches"]]) == ("random", [3, 8])


def test_engine_is_compared_with_its_own_graph(home: Path, tmp_path: Path) -> None:
    words = ("verify", home / "m.onnx", home / "new/m.plan", "--images", home / "images.npy")
    invoked(*words, "-o", tmp_path / "p.json", "--max-error", 1.0)
    assert [source.backend for source in load_parity(tmp_path / "p.json").sources] == ["onnxruntime", "tensorrt"]


def test_folders_are_preprocessed_as_the_graph_declares(home: Path, tmp_path: Path) -> None:
    """The model's own transform and the preprocessing that its plan notes give the same pixels."""
    (tmp_path / "photos").mkdir()
    generator = np.random.default_rng(0)
    for index in range(3):
        pixels = generator.integers(0, 256, (40, 50, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{index}.png")
    invoked("verify", home / "old/m.plan", "--images", tmp_path / "photos", "--write-golden", tmp_path / "golden")
    (expected,) = images_for_model(tiny.checkpoint().model, tmp_path / "photos").batches(8)
    np.testing.assert_array_equal(read_golden(tmp_path / "golden").feeds["images"], expected.numpy())
    plan(tmp_path / "mute" / "m.plan", home / "m.onnx", notes={})
    words = ("--images", tmp_path / "photos", "--write-golden", tmp_path / "g")
    refuses("notes no preprocessing", "verify", tmp_path / "mute/m.plan", *words)


def test_engines_of_other_graphs_are_not_comparable(home: Path, tmp_path: Path) -> None:
    words = ("verify", home / "old/m.plan", home / "other/m.plan", "--random", 4, "-o", tmp_path / "p.json")
    refuses("--other-graph if two graphs are meant", *words, code=5)
    assert not (tmp_path / "p.json").exists()
    invoked(*words, "--other-graph", "--max-error", 1.0)
    assert len({source.graph_sha256 for source in load_parity(tmp_path / "p.json").sources}) == 2


def test_unloadable_engine_prints_the_command_for_its_machine(home: Path, tmp_path: Path) -> None:
    words = ("--random", 4, "-o", "p.json")
    two = invoked("verify", home / "old/m.plan", home / "new/m.plan", *words, code=4)
    for part in (
        "one process loads one version only",
        f"corp-deploy verify {home}/old/m.plan --random 4 --seed 0 --write-golden golden",
        f"corp-deploy verify golden {home}/new/m.plan -o p.json",
    ):
        assert part in output_of(two), two.output
    plan(tmp_path / "strange" / "m.plan", home / "m.onnx", version="8.6.0")
    strange = ("verify", tmp_path / "strange/m.plan", "--random", 4, "--write-golden", tmp_path / "golden")
    refuses("built by tensorrt 8.6.0 for SM 89, and it can't be run here", *strange, code=4)
    assert not (tmp_path / "golden").exists()
    movable = plan(tmp_path / "movable" / "m.plan", home / "m.onnx", options={"version_compatible": True})
    invoked("verify", movable, home / "new/m.plan", "--random", 4, "-o", tmp_path / "p.json", code=3)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("old/m.plan", "same/m.plan", "-o", "p.json"), "give --images, --text or --arrays"),
        (("old/m.plan", "--random", "4"), "Missing argument 'CANDIDATES...'"),
        (("old/m.plan", "same/m.plan", "--random", "4"), "Missing option '--output'"),
        (("old/m.plan", "dense", "--random", "4", "-o", "p.json"), "expected a .plan or an .onnx file"),
        (
            ("old/m.plan", "same/m.plan", "--random", "4", "-o", "p.json", "--batch", "9"),
            "takes batches of 1 to 8 only",
        ),
        (("old/m.plan", "same/m.plan", "--random", "4", "--write-golden", "g"), "compares nothing; leave candidates"),
        (("old/m.plan", "same/m.plan", "--random", "4", "-o", "p.json", "--half-factor", "3"), "has no effect on an"),
        (("dense", "dense", "--random", "4", "-o", "p.json", "--write-golden", "g"), "has no effect on a model"),
        (("dense", "dense", "-o", "p.json"), "give --images, --text or --arrays"),
        (("dense", "--random", "4", "-o", "p.json"), "Missing argument 'CANDIDATES...'"),
        (("dense", "dense", "--random", "4"), "Missing option '--output'"),
        (("old/m.plan", "same/m.plan", "--images", "nothing.npy", "-o", "p.json"), "nothing.npy"),
    ],
)
def test_meaningless_calls_are_refused(
    home: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], reason: str
) -> None:
    monkeypatch.chdir(home)
    refuses(reason, "verify", *words)
    assert not (home / "p.json").exists()


def test_golden_directories_are_checked_by_digest(home: Path, tmp_path: Path) -> None:
    golden = tmp_path / "golden"
    invoked("verify", home / "old/m.plan", "--random", 4, "--write-golden", golden)
    words = ("verify", golden, home / "same/m.plan", "-o", tmp_path / "p.json")
    refuses("has inputs of its own", *words, "--random", 4)
    content = (golden / "outputs.npz").read_bytes()
    (golden / "outputs.npz").write_bytes(content[:-1] + b"x")
    refuses("its bytes are not those that golden.json describes", *words)
    (golden / "outputs.npz").unlink()
    refuses("missing, a file that golden.json describes", *words)


def test_modified_plan_is_refused(home: Path, tmp_path: Path) -> None:
    changed = plan(tmp_path / "m.plan", home / "m.onnx")
    changed.write_text("11.4.0")
    words = ("verify", changed, home / "same/m.plan", "--random", 4, "-o", tmp_path / "p.json")
    refuses("its bytes are not those that m.plan.json describes", *words)
