"""Decoders of transformers: loading, reduction, saving and graphs, compared with transformers and least squares."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from calib.store import load_moments
from corp_deploy import load
from corp_deploy.families import traced_model
from corp_deploy.families.counting import macs, parameters
from corp_deploy.families.decoder import TextDecoder, traced_decoder
from corp_deploy.families.decoder_config import architecture_from_transformers
from corp_deploy.families.family import sequence_spec, sites_of
from corp_deploy.families.tokenizer import Tokenization
from corp_deploy.families.traced_model import hooked_model
from corp_deploy.invocation.method_choice import ALIGN, MethodChoice
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce, uniform_widths
from corp_deploy.store.dense_model import load_dense
from corp_deploy.store.input_sets import texts_for_model
from corp_deploy.traced.models.pairs import TracedPairs
from tests import decoders, hf_towers, tiny
from tests.command import invoked
from tests.doubles import some
from tests.refusals import rejects

pytest.importorskip("transformers", reason="transformers is not installed, so that there are no models of it")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a decoder of every kind, in a directory of the kind's name, and a text."""
    directory = tmp_path_factory.mktemp("decoders")
    for kind in decoders.KINDS:
        decoders.write_decoder(directory / kind, kind)
    (directory / "text.txt").write_text(decoders.text())
    return directory


def dense_of(directory: Path, **kwargs: Any) -> nn.Module:
    return load_dense(f"hf:{directory}", weights=None, kwargs=kwargs).model


def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.inference_mode():
        answer = model(ids)
    logits: Tensor = getattr(answer, "logits", answer)
    return logits


def assert_same_logits(found: nn.Module, expected: nn.Module, ids: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(logits_of(found, ids), logits_of(expected, ids), rtol=tolerance, atol=tolerance)


def by_transformers(directory: Path) -> nn.Module:
    model: nn.Module = hf_towers.load_by_transformers(directory, "AutoModelForCausalLM")
    return model


def calibrated(home: Path, kind: str, *options: Any) -> Path:
    moments = home / f"{kind}.moments.safetensors"
    if not moments.exists():
        where = ("--text", home / "text.txt", "--samples", 32, "-o", moments)
        invoked("calibrate", "--model", f"hf:{home / kind}", *where, *options)
    return moments


def reduced(home: Path, kind: str, name: str, *options: Any, code: int = 0) -> Result:
    own = ("--model", f"hf:{home / kind}", "--moments", calibrated(home, kind), "--align", "mlp=8,head=8")
    return invoked("reduce", *own, *options, "-o", home / name, code=code)


@pytest.mark.parametrize("kind", decoders.KINDS)
def test_decoder_logits_equal_those_of_transformers(home: Path, kind: str) -> None:
    assert_same_logits(dense_of(home / kind), by_transformers(home / kind), decoders.ids(3, 40))


@pytest.mark.slow("models")
@pytest.mark.parametrize("kind", decoders.KINDS)
def test_reduced_decoder_loads_in_transformers(home: Path, kind: str) -> None:
    heads = () if kind in ("opt", "gpt2") else ("--whole-heads", 0.5)
    reduced(home, kind, f"{kind}-hf", "--mlp", 0.5, *heads, "--save-as", "hf")
    saved, ours = home / f"{kind}-hf" / "hf", load(home / f"{kind}-hf")
    for again in (by_transformers(saved), dense_of(saved)):
        assert_same_logits(again, ours, decoders.ids(2))
    config = json.loads((saved / "config.json").read_text())
    entry = {"opt": "ffn_dim", "gpt2": "n_inner"}.get(kind, "intermediate_size")
    assert config[entry] == 80
    assert "per_layer_config" not in config
    if heads:
        assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (2, 1, 16)
        names = load_file(saved / "model.safetensors")
        added = [name for name in names if name.endswith("bias") and not name.endswith(("q_proj.bias", "k_proj.bias"))]
        assert all(name.endswith("v_proj.bias") for name in added)
        assert kind == "qwen2" or not added


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("llama", ("--attn", 0.5), "would be computed from that width"),
        ("opt", ("--attn", 0.5), "opt reads no width"),
        ("opt", ("--mlp", 0.5, "--whole-heads", 0.5), "computes their width from that number"),
        ("llama", ("--params", 0.8), "a budget gives every layer"),
    ],
)
def test_widths_no_configuration_can_express_are_refused_before_any_work(
    home: Path, kind: str, options: tuple[Any, ...], message: str
) -> None:
    result = reduced(home, kind, "refused", *options, "--save-as", "hf", code=2)
    assert message in " ".join(result.stderr.split())
    assert not (home / "refused").exists()


def test_decoder_with_fewer_groups_is_reduced_again(home: Path, tmp_path: Path) -> None:
    reduced(home, "llama", "fewer", "--whole-heads", 0.5)
    moments = tmp_path / "moments.safetensors"
    invoked("calibrate", "--model", home / "fewer", "--text", home / "text.txt", "--samples", 24, "-o", moments)
    own = ("--model", home / "fewer", "--moments", moments, "--mlp", 0.5, "--align", "mlp=8", "--save-as", "hf")
    invoked("reduce", *own, "-o", tmp_path / "again")
    assert_same_logits(by_transformers(tmp_path / "again" / "hf"), load(tmp_path / "again"), decoders.ids(2))


def write_planted(folder: Path, model: nn.Module) -> None:
    """Write a changed Llama as the decoder `planted`, and a text."""
    decoders.write_decoder(folder / "planted", "llama", model)
    (folder / "text.txt").write_text(decoders.text())


def test_redundant_channels_and_groups_are_recovered(home: Path, tmp_path: Path) -> None:
    """Half of the MLP channels and the second group of heads repeat the others."""
    model: Any = decoders.decoder("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            mlp, attention, half = layer.mlp, layer.self_attn, decoders.HIDDEN // 2
            for projection in (mlp.gate_proj, mlp.up_proj):
                projection.weight[half:] = projection.weight[:half]
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
                rows = len(projection.weight) // 2
                projection.weight[rows:] = projection.weight[:rows]
    write_planted(tmp_path, model)
    reduced(tmp_path, "planted", "less", "--mlp", 0.5, "--whole-heads", 0.5, "--ridge", "1e-9", "--save-as", "hf")
    ids = decoders.ids(2)
    found, expected = (logits_of(each, ids) for each in (by_transformers(tmp_path / "less" / "hf"), model))
    assert tiny.relative(found, expected) < 2e-3


def test_layer_without_bias_is_fitted_with_uncentred_moments(home: Path) -> None:
    """The last layer of a reduced MLP is the ridge solution on hidden activations that are not centred."""
    repair = ("--preset", "grail", "--ridge", "1e-6")
    reduced(home, "llama", "gram", "--mlp", 0.5, *repair)
    affine = ("--preset", "grail", "--repair", "mlp=affine", "--ridge", "1e-6")
    reduced(home, "llama", "uncentred", "--mlp", 0.5, *affine)
    gram, ours = load(home / "gram"), load(home / "uncentred")
    assert not [name for name, _ in ours.named_parameters() if name.endswith("bias")]
    for index in range(2):
        one, other = (model.get_parameter(f"blocks.{index}.mlp.down.weight") for model in (gram, ours))
        torch.testing.assert_close(other, one, rtol=2e-2, atol=2e-3)
    dense = dense_of(home / "llama")
    sequences = texts_for_model(dense, home / "text.txt", samples=32)
    ids = torch.cat([batch["input_ids"] for batch in sequences.batches(16)])
    hidden = tiny.module_io(dense, "blocks.0.mlp.down", ids)[0].flatten(0, 1).double()
    gate, kept = (model.get_parameter("blocks.0.mlp.gate.weight") for model in (dense, ours))
    own = [int((gate == row).all(1).nonzero()) for row in kept]
    down, last = (model.get_parameter("blocks.0.mlp.down.weight").double() for model in (dense, ours))
    expected = torch.linalg.lstsq(hidden[:, own], hidden @ down.T).solution.T
    error, best = ((hidden[:, own] @ weight.T - hidden @ down.T).square().sum() for weight in (last, expected))
    assert float(best) <= float(error) <= 1.001 * float(best)


@pytest.mark.slow("models")
@pytest.mark.parametrize(
    ("option", "how"),
    [("--closed-loop", "asymmetric"), ("--closed-loop", "symmetric"), ("--sparse", "2:4"), ("--select", "heads=fold")],
)
def test_layers_without_bias_stay_without_bias(home: Path, option: str, how: str) -> None:
    options = ("--mlp", 0.5, "--whole-heads", 0.5, option, how, "--text", home / "text.txt", "--samples", 32)
    reduced(home, "qwen2", f"biasless-{how}", *options, "--save-as", "hf")
    names = [name for name, _ in load(home / f"biasless-{how}").named_parameters() if name.endswith("bias")]
    assert names == [f"blocks.{index}.attn.qkv.bias" for index in range(2)]


def test_redundant_shared_values_are_recovered(tmp_path: Path) -> None:
    """Half of the dimensions of each group's values repeat the others."""
    model: Any = decoders.decoder("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            rows = layer.self_attn.v_proj.weight.view(2, 2, 8, -1)
            rows[:, 1] = rows[:, 0]
    write_planted(tmp_path, model)
    dense, moments = dense_of(tmp_path / "planted"), load_moments(calibrated(tmp_path, "planted"))
    method = method_from_preset("best", ridge_rel=1e-9)
    less = reduce(dense, moments, method, widths={f"blocks.{index}.attn.v": 16 for index in range(2)}).model
    assert less.get_parameter("blocks.0.attn.qkv.weight").shape[0] == 4 * 16 + 2 * (16 + 8)
    assert_same_logits(less, dense, decoders.ids(2), tolerance=1e-3)


def test_query_and_key_norms_refuse_narrower_queries_and_keys(home: Path) -> None:
    messages = " ".join(reduced(home, "qwen3", "refused", "--mlp", 0.5, "--attn", 0.5, code=2).stderr.split())
    assert "blocks.0.attn.v: queries and keys stay: rms_norm in blocks.0.attn.q_norm (RmsNorm) mixes it" in messages
    result = reduced(home, "qwen3", "partly", "--mlp", 0.5, "--attn", 0.5, "--allow-partial")
    assert "blocks.1.attn.v kept as it is: queries and keys stay" in " ".join(result.stderr.split())


def test_sequences_begin_with_the_tokenizers_special_tokens(home: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, processors

    decoders.write_decoder(tmp_path / "llama", "llama")
    tokenizer = Tokenizer.from_file(str(tmp_path / "llama" / "tokenizer.json"))
    tokenizer.add_special_tokens(["\1"])
    tokenizer.post_processor = processors.TemplateProcessing(single="\1 $A", special_tokens=[("\1", 1)])
    tokenizer.save(str(tmp_path / "llama" / "tokenizer.json"))
    model = dense_of(tmp_path / "llama", length=20)
    sequences = texts_for_model(model, home / "text.txt")
    rows = next(sequences.batches(2000))
    assert not isinstance(rows, Tensor)
    ids = rows["input_ids"]
    letters = [ord(letter) for letter in decoders.text()]
    assert ids.shape == (len(letters) // 19, 20)
    assert bool((ids[:, 0] == 1).all())
    assert ids[:, 1:].flatten().tolist() == letters[: 19 * len(ids)]


def test_token_ids_replace_text(home: Path, tmp_path: Path) -> None:
    """Token ids as rows or as one stream give the same inputs as their text."""
    model = dense_of(home / "opt")
    letters = np.array([ord(letter) for letter in decoders.text()], dtype=np.uint16)
    count = len(letters) // decoders.LENGTH
    np.save(tmp_path / "stream.npy", letters)
    np.save(tmp_path / "rows.npy", letters[: count * decoders.LENGTH].reshape(count, -1).astype(np.int64))
    from_text = texts_for_model(model, home / "text.txt")
    for name in ("stream", "rows"):
        from_ids = texts_for_model(model, tmp_path / f"{name}.npy")
        assert from_ids.digest == from_text.digest
        assert torch.equal(from_ids.ids, from_text.ids)
    np.save(tmp_path / "foreign.npy", np.array([[0, decoders.LETTERS] * 32]))
    rejects("ids from 0 to 128, expected 0 to 127", texts_for_model, model, tmp_path / "foreign.npy")
    np.save(tmp_path / "short.npy", letters[:10])
    rejects("10 tokens, expected at least one sequence of 64", texts_for_model, model, tmp_path / "short.npy")


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("opt", {"do_layer_norm_before": False}, "norms come after the branches"),
        ("opt", {"word_embed_proj_dim": 32}, "embeddings have another width"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scaled otherwise"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "positions scaled by 'yarn'"),
        ("llama", {"num_key_value_heads": 3}, "no multiple of 3 groups"),
        ("llama", {"auto_map": {"AutoModel": "x.py"}}, "never run"),
        ("llama", {"hidden_act": "mish"}, "activation"),
        ("llama", {"per_layer_config": {"0": {}}}, "widths of their own"),
        ("llama", {"model_type": "gemma"}, "expected one of opt, gpt2"),
    ],
)
def test_unsupported_decoders_are_refused_with_the_reason(
    home: Path, kind: str, changes: dict[str, Any], message: str
) -> None:
    config = json.loads((home / kind / "config.json").read_text()) | changes
    rejects(message, architecture_from_transformers, config, where="config.json")


def test_attention_is_limited_to_the_sliding_window(home: Path, tmp_path: Path) -> None:
    decoders.write_decoder(tmp_path / "mistral", "mistral", sliding_window=24)
    model = dense_of(tmp_path / "mistral")
    assert some(sequence_spec(model)).shape == (24,)
    assert_same_logits(model, by_transformers(tmp_path / "mistral"), decoders.ids(2, 24))
    rejects("sees 24 at most", dense_of, tmp_path / "mistral", length=25)


def test_foreign_tensors_are_refused(home: Path, tmp_path: Path) -> None:
    decoders.write_decoder(tmp_path, "llama")
    state = load_file(home / "llama" / "model.safetensors")
    save_file(state | {"model.layers.0.mlp.router.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    rejects(r"mlp\.router\.weight.* has no place in a llama decoder", dense_of, tmp_path)


def test_positions_are_exact_in_sixteen_bits(home: Path) -> None:
    half = dense_of(home / "llama").half()
    assert half.get_buffer("blocks.0.attn.rotary.freqs_HP").dtype == torch.float32


def test_decoder_costs_equal_the_count(home: Path) -> None:
    """Half of the groups are removed, then half of the remaining queries and keys too."""
    model, tokens, dim = dense_of(home / "llama"), decoders.LENGTH, decoders.WIDTH
    assert traced_model.depth(model) == 2

    def attention_costs(heads: int, qk: int, v: int) -> tuple[int, int]:
        rows = heads * (qk + v) + heads // 2 * (qk + v)
        return tokens * dim * rows + heads * tokens * tokens * (qk + v), dim * rows

    whole = attention_costs(4, 16, 16)
    for widths, attention in (((2, 16, 16), ()), ((2, 8, 16), ("--attn", 0.5))):
        reduced(home, "llama", "counted", "--whole-heads", 0.5, *attention)
        less = load(home / "counted")
        removed = [2 * (all_ - left) for all_, left in zip(whole, attention_costs(*widths), strict=True)]
        assert [macs(model) - macs(less), parameters(model) - parameters(less)] == removed
        for site in (each for each in sites_of(less).every if each.name == "blocks.0.mlp"):
            assert site.parameters_now == 3 * dim * decoders.HIDDEN


def attention_logits(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the first attention's unscaled logits [B,H,N,N] in float64, 0 where the causal mask hides a token."""
    site = next(each for each in sites_of(model).every if isinstance(each, TracedPairs))
    (taps,), caught = site.listening(), dict[str, Tensor]()
    handles = [
        taps.queries.listen("q", lambda x: caught.update(q=x)),
        taps.keys.listen("k", lambda x: caught.update(k=x)),
    ]
    logits_of(hooked_model(model), ids)
    for handle in handles:
        handle.remove()
    return (caught["q"].double() @ caught["k"].double().mT).tril()


@pytest.mark.slow("models")
@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_reported_logit_loss_equals_an_independent_computation(home: Path, kind: str) -> None:
    """The loss is that of the visible logits over all sequences that CORP's per-image system is fitted to."""
    moments = home / f"{kind}.system.safetensors"
    where = ("--text", home / "text.txt", "--samples", 24, "--attention-system", "-o", moments)
    invoked("calibrate", "--model", f"hf:{home / kind}", *where)
    own = ("--model", f"hf:{home / kind}", "--moments", moments, "--align", "mlp=8,head=8")
    result = invoked("reduce", *own, "--attn", 0.5, "--preset", "corp", "-o", home / f"{kind}-qk", "--json")
    reports = {(each["site"], each["part"]): each for each in json.loads(result.stdout)["sites"]}
    report = reports["blocks.0.attn.qk", "qk"]
    dense, less = dense_of(home / kind), load(home / f"{kind}-qk")
    sequences = texts_for_model(dense, home / "text.txt", samples=24)
    ids = torch.cat([batch["input_ids"] for batch in sequences.batches(8)])
    whole, left = attention_logits(dense, ids), attention_logits(less, ids)
    assert report["energy"] == pytest.approx(float(whole.square().sum()), rel=1e-4)
    assert report["error"] == pytest.approx(float((whole - left).square().sum()), rel=1e-3)
    assert report["error"] < report["error_uncompensated"]


@pytest.mark.parametrize(("align", "width"), [({}, 256), ({"mlp": 64}, 320), ({"mlp": 8}, 304)])
def test_widths_default_to_multiples_of_128(align: dict[str, int], width: int) -> None:
    config = {**decoders.KINDS["llama"][1], "model_type": "llama", "intermediate_size": 512}
    with torch.device("meta"):
        decoder = TextDecoder(architecture_from_transformers(config, where="here"))
    model = traced_decoder(decoder, Tokenization(length=16, sha256="0" * 64))
    choice = MethodChoice(mlp=0.4, align=align or ALIGN)
    assert uniform_widths(model, choice.method) == {f"blocks.{index}.mlp": width for index in range(2)}


@pytest.mark.slow("graph")
@pytest.mark.parametrize("kind", ["opt", "gpt2"])
def test_prompt_graph_equals_the_reduced_decoder(home: Path, kind: str) -> None:
    reduced(home, kind, f"{kind}-graph", "--mlp", 0.5, "--attn", 0.5)
    graph = home / f"{kind}.onnx"
    invoked("export", "--model", home / f"{kind}-graph", "-o", graph)
    ids = decoders.ids(3)
    (got,) = ort.InferenceSession(graph, providers=["CPUExecutionProvider"]).run(None, {"input_ids": ids.numpy()})
    expected = logits_of(load(home / f"{kind}-graph"), ids)
    torch.testing.assert_close(torch.from_numpy(np.asarray(got)), expected, rtol=1e-4, atol=1e-4)
