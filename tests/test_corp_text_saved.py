"""Reduced text encoders as directories of transformers, which its own classes and sentence files read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from calib.inputs import run_model
from corp_deploy import load
from corp_deploy.families.family import text_spec
from corp_deploy.store.dense_model import load_dense
from corp_deploy.store.transformers_saved import transformers_form
from ground.errors import BadInput
from tests import encoders
from tests.command import invoked, refuses

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


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "electra"])
def test_a_reduced_encoder_loads_in_transformers_and_here(tmp_path: Path, kind: str) -> None:
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


def test_the_head_of_a_task_goes_along_where_it_is_read(tmp_path: Path) -> None:
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
    refuses("the class has cls.", "reduce", *again, "--save-as", "hf", "-o", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--mlp", 0.5, "--attn", 0.5), "blocks.0.attn.qk is 16 wide of 32, and bert reads no such width"),
        (("--macs", 0.8), "a budget gives every layer widths of its own"),
    ],
)
def test_what_no_configuration_says_is_refused_before_any_work(
    tmp_path: Path, options: tuple[Any, ...], words: str
) -> None:
    encoders.write_encoder(tmp_path / "hf")
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
            ("beside", {}, "lineage"),
            ("prefix", None, "lineage"),
            ("files", {"a": 1}, "lineage"),
        ),
        *(("files", {path: {}}, "expected one in the encoder's directory") for path in ELSEWHERE),
    ],
)
def test_a_damaged_lineage_is_one_message(tmp_path: Path, key: str, value: object, said: str) -> None:
    encoders.write_encoder(tmp_path / "hf")
    dense = load_dense(f"hf:{tmp_path / 'hf'}", weights=None, kwargs={})
    dense.lineage["source"]["transformers"][key] = value
    with pytest.raises(BadInput, match=said):
        transformers_form(dense)
