"""Graphs of decoders with a key/value cache: built of plain directories, held against transformers, timed, told."""

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray

from corp_deploy.families import decoder_builder
from corp_deploy.store.decoder_graph import graph_of_directory
from perf.record.decoders import KvCache, load_decoder_bench
from perf.runners.decoder import DecoderRunner
from tests import decoders
from tests.command import invoked, refuses
from tests.refusals import rejects

pytest.importorskip("transformers", reason="transformers is not installed, so that there are no models of it")
pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed, so that nothing builds graphs")
pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")

NARROW: dict[str, Any] = {"intermediate_size": 80, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
"""Half of the channels, and one group of two."""
KINDS, NARROWED = ("llama", "llama3", "mistral", "qwen2", "qwen3"), ("llama-narrow", "qwen3-narrow")
QUICK = ("--time-limit", 5, "--half-width", 0.9, "--min-rounds", 6, "--block-ms", 1, "--threads", 1)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense decoder of each kind, and one with fewer channels and groups; graphs of all."""
    directory = tmp_path_factory.mktemp("graphs")
    for name in (*KINDS, *NARROWED):
        windowed = {"sliding_window": 8} if name.startswith("mistral") else {}
        changes = windowed | (NARROW if name in NARROWED else {})
        decoders.write_decoder(directory / name, name.removesuffix("-narrow"), **changes)
        invoked("export-decoder", directory / name, "-o", directory / "onnx" / name, "-q")
    decoders.write_decoder(directory / "opt", "opt")
    return directory


def by_hand(directory: Path, ids: NDArray[np.int64], sizes: tuple[int, int, int], fed: int) -> NDArray[np.float32]:
    """Logits by the graph as its file says it is called: `fed` tokens a call, present handed on as past."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(directory / "model.onnx"), providers=["CPUExecutionProvider"])
    layers, groups, head = sizes
    parts = [f"{layer}.{part}" for layer in range(layers) for part in ("key", "value")]
    past: dict[str, Any] = {part: np.zeros((len(ids), groups, 0, head), np.float32) for part in parts}
    logits = []
    for start in range(0, ids.shape[1], fed):
        mask = np.ones((len(ids), start + fed), np.int64)
        feeds = {"input_ids": ids[:, start : start + fed], "attention_mask": mask}
        feeds |= {f"past_key_values.{part}": past[part] for part in parts}
        first, *rest = session.run(["logits", *(f"present.{part}" for part in parts)], feeds)
        past = dict(zip(parts, rest, strict=True))
        logits.append(first)
    return np.concatenate(logits, axis=1)


@pytest.mark.parametrize("name", [*KINDS, *NARROWED])
def test_graph_equals_transformers(home: Path, name: str) -> None:
    """At once, token by token and in fours with the cache; longer than the window of the one that has one."""
    import transformers

    opened: Any = transformers.AutoModelForCausalLM
    model = opened.from_pretrained(home / name, dtype=torch.float32).eval()
    ids = decoders.ids(2, 24).numpy()
    with torch.inference_mode():
        expected = model(torch.from_numpy(ids)).logits.numpy()
    sizes = (2, 1 if name in NARROWED else 2, 16)
    graph = graph_of_directory(home / "onnx" / name)
    for fed, rows in ((24, 2), (4, 1), (1, 2)):  # a CPU takes several tokens behind a cache of one sequence alone
        got = by_hand(graph.path.parent, ids[:rows], sizes, fed)
        assert np.abs(got - expected[:rows]).max() < 1e-4, (fed, np.abs(got - expected[:rows]).max())
    assert (graph.cache.layers, graph.cache.groups, graph.cache.head) == sizes
    with DecoderRunner(graph.path, graph.cache, 24, threads=1) as runner:
        shared, at_once = runner.steps({"input_ids": ids})["logits"], runner({"input_ids": ids})["logits"]
    assert np.abs(shared - expected).max() < 1e-4
    assert np.abs(at_once - expected).max() < 1e-4


def test_step_is_timed_with_a_filled_cache(home: Path) -> None:
    """What a timed call gives are the logits of the last token, however often it is called."""
    graph = graph_of_directory(home / "onnx" / "llama")
    ids = decoders.ids(3, 20).numpy()
    with DecoderRunner(graph.path, graph.cache, 20, cached=19, threads=1) as runner:
        bound = runner.bind({"input_ids": ids})
        answers = [bound.outputs(bound.call())["logits"] for _ in range(3)]
    with DecoderRunner(graph.path, graph.cache, 20, threads=1) as runner:
        every = runner({"input_ids": ids})["logits"]
    for answer in answers:
        assert answer.shape == (3, 1, decoders.LETTERS)
        assert np.abs(answer - every[:, -1:]).max() < 1e-5


def test_export_reports_the_cache_size(home: Path, tmp_path: Path) -> None:
    """Half of the groups is half of the cache: 2 x layers x groups x head x 4 bytes a token."""
    words = ("--baseline", home / "llama", "--length", 100, "--batch", 3, "--json", "-q")
    told = json.loads(invoked("export-decoder", home / "llama-narrow", "-o", tmp_path / "g", *words).stdout)
    dense, reduced = told["caches"]["dense"], told["caches"]["reduced"]
    assert (dense["token_bytes"], reduced["token_bytes"]) == (2 * 2 * 2 * 16 * 4, 2 * 2 * 1 * 16 * 4)
    assert reduced["size_bytes"] == 256 * 100 * 3
    weights = (tmp_path / "g" / "model.onnx.data").stat().st_size
    assert told["size_bytes"] == weights + (tmp_path / "g" / "model.onnx").stat().st_size
    proto = onnx.load(tmp_path / "g" / "model.onnx", load_external_data=False)
    assert "+" not in proto.producer_version, "no commit of a repository that the package is installed below"
    assert (tmp_path / "g" / "tokenizer.json").is_file()
    assert not list((tmp_path / "g").glob(".*"))
    assert invoked("export-decoder", home / "llama-narrow", "-o", tmp_path / "again", "-q").stdout == ""
    for file in (tmp_path / "g").iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), file.name


@pytest.mark.parametrize(("precision", "most", "value_bytes"), [("int8", 0.1, 4), ("fp16", 0.01, 2)])
def test_other_precisions_are_exported_and_measured(
    home: Path, tmp_path: Path, precision: str, most: float, value_bytes: int
) -> None:
    invoked("export-decoder", home / "llama", "-o", tmp_path / "g", "--precision", precision, "-q")
    assert graph_of_directory(tmp_path / "g").cache.value_bytes == value_bytes
    sides = (home / "llama", tmp_path / "g", "-o", tmp_path / "p.json")
    words = ("verify", "--random", 2, *sides, "--length", 8, "-q", "--json")
    links = json.loads(invoked(*words).stdout)["links"]
    assert [link["status"] for link in links] == ["MEASURED"] * 2
    assert all(1e-5 < link["measures"]["relative_error"] < most for link in links), links
    assert json.loads(invoked(*words, "--max-error", 1e-6, code=1).stdout)["links"][0]["status"] == "FAIL"


def test_precisions_without_a_cpu_kernel_are_refused(home: Path, tmp_path: Path) -> None:
    """Norms of queries and keys are inside of FP16's attention."""
    invoked("export-decoder", home / "qwen3", "-o", tmp_path / "g", "--precision", "fp16", "-q")
    told = invoked("verify", "--random", 2, home / "qwen3", tmp_path / "g", "-o", tmp_path / "p.json", code=2).stderr
    assert "a graph in fp16 is for provider cuda" in told


def test_verify_finds_wrong_weights_and_positions(home: Path, tmp_path: Path) -> None:
    """A graph of the same widths and other weights; positions that turn at another pace are found too."""
    graph, sequences = home / "onnx" / "llama", ("verify", "--random", 2)
    words = (graph, "-o", tmp_path / "p.json", "--length", 16, "--json", "-q")
    good = json.loads(invoked(*sequences, home / "llama", *words).stdout)
    assert good == json.loads((tmp_path / "p.json").read_text())
    links = [(link["name"], link["status"]) for link in good["links"]]
    assert links == [("prefill", "PASS"), ("token by token", "PASS")]
    assert all(link["measures"]["relative_error"] < 1e-5 for link in good["links"])
    decoders.write_decoder(tmp_path / "other", "llama", rope_theta=100.0)
    found = json.loads(invoked(*sequences, tmp_path / "other", *words, code=1).stdout)
    assert [link["status"] for link in found["links"]] == ["FAIL"] * 2
    told = invoked(*sequences, home / "llama-narrow", *words, code=2).stderr
    assert "give the directory that the graph was exported from" in told
    refuses("65 tokens", *sequences, home / "llama", *words[:3], "--length", 65)


def test_bench_times_dense_and_reduced(home: Path, tmp_path: Path) -> None:
    """Every length and batch has both, in turns, from graphs and from plain directories alike."""
    words = (home / "onnx" / "llama", home / "llama-narrow", "--length", 4, "--batch", 2, "--cached", 16)
    told = json.loads(invoked("bench", *words, *QUICK, "-o", tmp_path / "b.json", "--json", "-q").stdout)
    record = load_decoder_bench(tmp_path / "b.json")
    assert record.caches["dense"].token_bytes == 2 * record.caches["reduced"].token_bytes == 512
    assert [each.length for each in record.prefill] == [4] == [each["length"] for each in told["prefill"]]
    for bench, cached in ((record.prefill[0].bench, 0), (record.decode, 16)):
        assert [subject.describe["cached"] for subject in bench.subjects] == [cached] * 2
        names = [block.subject for block in bench.rows[0].blocks[:8]]
        assert names == ["dense", "reduced", "reduced", "dense", "reduced", "dense", "dense", "reduced"]
    for row, shown in zip(record.decode.rows, told["decode"], strict=True):
        assert row.batch == shown["batch"]
        p50, rate = shown["p50_ms"]["dense"][0], shown["tokens_per_s"]["dense"][0]
        assert rate == pytest.approx(1000 * row.batch / p50, rel=0.9), "tokens of every sequence of a step"


@pytest.mark.parametrize(
    ("command", "changes", "said"),
    [
        ("export-decoder {home}/opt -o {out}", {}, "model_type is 'opt'"),
        ("export-decoder {home}/llama -o {home}/llama", {}, "would replace what it is made from"),
        ("export-decoder {home} -o {out}", {}, "no such file"),
        ("export-decoder {changed} -o {out}", {"architectures": ["LlamaForTokenClassification"]}, "architectures is"),
        ("export-decoder {changed} -o {out}", {"model_type": None, "family": "decoder"}, "corp-deploy's own format"),
        ("export-decoder {changed} -o {out}", {"auto_map": {"AutoConfig": "x.Y"}}, "code of its own"),
        ("export-decoder {changed} -o {out}", {"intermediate_size": 96}, "mlp"),
        ("verify {home}/llama {graph} -o {out}", {}, "give a number of sequences: --random 2"),
        ("verify {home}/llama {graph} --random 2 --batch 4 -o {out}", {}, "--batch 4 has no effect on a dec"),
        ("verify hf:{home}/llama {graph} --images x -o {out}", {}, "--images x has no effect on a decoder's"),
        ("bench {graph} {graph} --names a,b -o {out}", {}, "--names a,b has no effect on graphs"),
        ("bench {home}/llama {home}/llama --device cpu -o {out}", {}, "a GPU with --provider cuda"),
        ("bench {graph} {home}/opt -o {out}", {}, "model_type is 'opt'"),
        ("bench {graph} {home}/onnx/qwen3 --cached 64 -o {out}", {}, "expected at most 64"),
        ("bench {graph} {graph} --provider cuda --cached 8 --length 8 -o {out}", {}, "fp16"),
    ],
)
def test_invalid_calls_are_refused(
    home: Path, tmp_path: Path, command: str, changes: Mapping[str, Any], said: str
) -> None:
    changed, out = tmp_path / "changed", tmp_path / "out"
    shutil.copytree(home / "llama", changed)
    config = json.loads((changed / "config.json").read_text()) | changes
    text = json.dumps({entry: value for entry, value in config.items() if value is not None})
    (changed / "config.json").write_text(text)
    words = command.format(home=home, graph=home / "onnx" / "llama", changed=changed, out=out).split(" ")
    told = invoked(*words, code=2).stderr
    assert said in told, told
    assert not out.exists()


def test_unsupported_graphs_are_reported(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left of a graph that failed, and what stood there stays."""
    out = tmp_path / "out"
    invoked("export-decoder", home / "llama", "-o", out, "-q")
    before = {file.name: file.read_bytes() for file in out.iterdir()}

    def broken(directory: Path, output: Path, precision: str, scratch: Path) -> None:
        output.mkdir()
        (output / "model.onnx").write_bytes(b"half")
        raise KeyError("rope")

    monkeypatch.setattr(decoder_builder, "_run_builder", broken)
    refuses("KeyError", "export-decoder", home / "qwen2", "-o", out)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    invoked("export-decoder", home / "qwen2", "-o", tmp_path / "new" / "out", code=2)
    assert not (tmp_path / "new").exists()


def test_missing_package_is_named(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime_genai", None)
    told = invoked("export-decoder", home / "llama", "-o", tmp_path / "out", code=4).stderr
    assert "install the extra `genai`" in told


def test_settings_that_contradict_the_graph_are_refused(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "onnx" / "llama", tmp_path, dirs_exist_ok=True)
    settings = json.loads((tmp_path / "genai_config.json").read_text())
    for entry, value, said in (
        ("num_key_value_heads", 4, "groups"),
        ("num_hidden_layers", 3, "3 layers"),
        ("filename", "../x", "leads out"),
    ):
        changed = {**settings["model"]["decoder"], entry: value}
        text = json.dumps({"model": {**settings["model"], "decoder": changed}})
        (tmp_path / "genai_config.json").write_text(text)
        rejects(said, opened, tmp_path)


def opened(directory: Path) -> DecoderRunner:
    graph = graph_of_directory(directory)
    return DecoderRunner(graph.path, graph.cache, 4).__enter__()


def test_cache_size_equals_a_computation_by_hand() -> None:
    """Llama-2-7B in half precision: 32 layers, 32 groups of 128, 512 KiB a token."""
    cache = KvCache(layers=32, groups=32, head=128, value_bytes=2)
    assert cache.token_bytes == 524_288
    assert cache.size_bytes(length=2048, batch=8) == 8 * 2**30
