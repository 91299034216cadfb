"""Decoders calibrated block by block: moments, memory, interruptions and refusals."""

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from calib.collect import Collector
from calib.store import join_moments, load_moments, save_moments
from corp_deploy.families.decoder import DecoderBlock
from corp_deploy.reduction import sequential
from corp_deploy.store.decoder_layers import DecoderLayers, open_layers
from corp_deploy.store.dense_model import load_dense
from corp_deploy.store.input_sets import model_digest
from tests import decoders
from tests.command import invoked, refuses
from tests.refusals import rejects
from tests.sums import assert_equal
from tests.test_calib_store import mlp, moments

pytest.importorskip("transformers", reason="transformers is not installed, so that there are no models of it")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sequential")
    model: Any = decoders.write_decoder(directory / "llama", "llama", num_hidden_layers=3)
    model.save_pretrained(directory / "sharded", max_shard_size="100KB")
    decoders.write_tokenizer(directory / "sharded")
    decoders.write_decoder(directory / "opt", "opt")
    (directory / "text.txt").write_text(decoders.text())
    return directory


def run_calibrate(home: Path, kind: str, name: str, *options: Any, code: int = 0) -> Result:
    own = ("--model", f"hf:{home / kind}", "--text", home / "text.txt", "--samples", 20, "--batch-size", 7)
    return invoked("calibrate", *own, *options, "-o", home / f"{name}.safetensors", code=code)


@pytest.mark.parametrize("kind", ["sharded", "opt"])
def test_sequential_moments_equal_a_full_pass(home: Path, kind: str) -> None:
    options = ("--attention-system", "--hold-out", 5)
    run_calibrate(home, kind, f"{kind}-whole", *options)
    run_calibrate(home, kind, f"{kind}-blocks", *options, "--sequential")
    for part in ("", ".held-out"):
        whole, blocks = (load_moments(home / f"{kind}-{how}{part}.safetensors") for how in ("whole", "blocks"))
        assert_equal(blocks, whole, limit=0.0)
    assert not list(home.glob("*.partial.safetensors"))


def test_digest_equals_that_of_the_whole_model(home: Path) -> None:
    for kind in ("sharded", "opt"):
        whole = load_dense(f"hf:{home / kind}", weights=None, kwargs={}).model
        assert open_layers(home / kind, {}).digest() == model_digest(whole)


def test_at_most_one_block_is_in_memory(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built, most = list[Any](), list[int]()
    own = DecoderLayers.block

    def counted(layers: DecoderLayers, index: int) -> DecoderBlock:
        block = own(layers, index)
        built.append(weakref.ref(block))
        most.append(sum(each() is not None for each in built))
        return block

    monkeypatch.setattr(DecoderLayers, "block", counted)
    run_calibrate(home, "llama", "counted", "--sequential")
    assert len(built) == 3 + 1 + 3, "3 for the digest, 1 for the estimate of memory, and 3 for the pass"
    assert max(most) == 1


@pytest.mark.slow("models")
def test_interrupted_run_resumes_at_the_next_block(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_calibrate(home, "llama", "straight", "--sequential")
    collected = list[int]()

    class Counted(Collector):
        def __init__(self, *given: Any, **how: Any) -> None:
            collected.append(1)
            if len(collected) == 2:
                raise KeyboardInterrupt
            super().__init__(*given, **how)

    monkeypatch.setattr(sequential, "Collector", Counted)
    run_calibrate(home, "llama", "goes-on", "--sequential", code=130)
    assert len(list(home.glob("goes-on.*.block*.partial.safetensors"))) == 1
    assert not (home / "goes-on.safetensors").exists()
    collected += [0, 0]
    run_calibrate(home, "llama", "goes-on", "--sequential")
    assert len(collected) == 2 + 2 + 2, "only blocks 1 and 2 are left"
    assert_equal(load_moments(home / "goes-on.safetensors"), load_moments(home / "straight.safetensors"), limit=0.0)
    assert not list(home.glob("*.partial.safetensors"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--groups", "image"), "--groups image has no effect on --sequential"),
        (("--checkpoint-every", 4), "each block that is finished is kept"),
        (("--snapshots", "4"), "has no effect on --sequential"),
    ],
)
def test_options_that_need_a_full_pass_are_refused(home: Path, options: tuple[Any, ...], message: str) -> None:
    result = run_calibrate(home, "llama", "refused", *options, "--sequential", code=2)
    assert message in " ".join(result.stderr.split())


def test_other_models_are_refused(home: Path) -> None:
    images = ("--text", home / "text.txt", "-o", home / "x.safetensors")
    refuses("give --model hf:DIR", "calibrate", "--model", home / "llama", *images, "--sequential")


def test_parts_of_different_runs_are_not_merged(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.safetensors" for name in "abc"]
    for path, lineage in zip(paths, ("1", "1", "2"), strict=True):
        save_moments(replace(moments(model=lineage), sites={path.stem: mlp()}), path)
    rejects("not of the same images and model", join_moments, paths, tmp_path / "odd.safetensors")
    rejects("a is in another part", join_moments, [paths[0], paths[0]], tmp_path / "odd.safetensors")
    paths[1].write_bytes(paths[1].read_bytes()[:-8])
    rejects("truncated", join_moments, paths[:2], tmp_path / "odd.safetensors")
    assert not (tmp_path / "odd.safetensors").exists()


def test_missing_block_is_reported_before_any_work(home: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    decoders.write_decoder(tmp_path / "cut", "llama")
    file = tmp_path / "cut" / "model.safetensors"
    save_file({name: each for name, each in load_file(file).items() if ".layers.1." not in name}, file)
    rejects("block 1 of 2 is missing", open_layers, tmp_path / "cut", {})
