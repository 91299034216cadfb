"""Recipe files: errors by key, defaults, extends, resolved text and starter recipes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from corp_deploy.invocation.input_choice import InputOptions
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.release.baseline import Baseline
from corp_deploy.release.recipe import SECTIONS, Recipe
from corp_deploy.release.recipe_file import MOST_BYTES, load_recipe
from corp_deploy.release.recipe_toml import rendered, starter, text_of_recipe
from corp_deploy.release.stages import stages_of
from corp_deploy.store.checkpoint import save
from tests import small_convnets
from tests.refusals import rejects

ROOT = Path(__file__).parents[1]
LEAST = """
[model]
model = "deit_small_patch16_224"
weights = "weights.safetensors"
[calibration]
images = "train"
[held_out]
images = "val"
[reduce]
mlp = 0.5
"""


def written(folder: Path, text: str, name: str = "recipe.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_minimal_recipe_has_defaults_and_relative_paths(tmp_path: Path) -> None:
    recipe = load_recipe(written(tmp_path, LEAST))
    assert recipe.name == "recipe"
    assert recipe.calibration.images == tmp_path.resolve() / "train"
    assert recipe.model.name == "deit_small_patch16_224"
    assert recipe.model.directory is None
    assert [target.name for target in recipe.targets] == ["onnxruntime-cpu"]
    assert (recipe.targets[0].precision, recipe.bench.batches) == ("fp32", (1, 8, 32))
    assert recipe.reduce.method.mlp_sparsity == 0.5


ADDED = [
    ("[reduse]\nmlp = 0.5", "unknown key 'reduse'; did you mean 'reduce'?"),
    ("[bench]\ntime_limit = 3", "[bench]: unknown key 'time_limit'; did you mean 'time_limit_s'?"),
    ("[targets.tensort]", "[targets]: unknown key 'tensort'; did you mean 'tensorrt'?"),
    ("[targets.tensorrt]\nsm = []", "[targets.tensorrt]: unknown key 'sm'; did you mean 'sms'?"),
    ("[bench]\ntime_limit_s = '3'", "bench.time_limit_s is '3', expected a number in (0, 1000000]"),
    ("[export]\nprecisions = ['int4']", "export.precisions is ['int4'], expected a list of different values, such as"),
    ("[export]\nkeep_fp32 = ['blocks.1.attn']", "export.keep_fp32 = 'blocks.1.attn' has no effect on precision fp32"),
    (
        "[export]\nprecisions = ['fp32', 'mixed']",
        "precision mixed needs export.keep_fp32 = PATTERN, such as blocks.7.attn, or --auto",
    ),
    ("[gate]\nfail_if = ['speedup@b8']", "gate.fail_if: rule 'speedup@b8': it has no comparison"),
    ("[gate]\nfail_if = ['speedup@b64 < 1']", "asks for batch 64, bench.batches has [1, 8, 32]"),
    ("[gate]\nfail_if = 'speedup@b8 < 1'", "gate.fail_if is 'speedup@b8 < 1', expected a list"),
    ("[gate]\nfail_if = ['top1_agrement < 0.9']", "gate.fail_if: rule 'top1_agrement < 0.9': no figure is called"),
    ("[gate]\nfail_if = ['top1_agreement < nan']", "parity is between two models; 'nan' alone has none"),
    ("[gate]\nfail_if = ['teacher.params > 1']", "a release has no subject 'teacher', it has dense and reduced"),
    ("[gate]\nfail_if = ['params > nan']", "a release has no subject 'nan', it has dense and reduced"),
    (
        "[gate]\nfail_if = ['metric.map < dense - 0.01']\n[parity]\nmetric = ['python s.py {outputs}']",
        """parity.metric has ['own']; write metric = ["map=COMMAND {outputs}"] under [parity]""",
    ),
    ("[gate]\nfail_if = ['fused_attention < dense']", "a figure of engines only, and onnxruntime-cpu runs the graph"),
    ("[targets.openvino]\nfail_if = ['device_memory@b8 > 1']", "targets.openvino.fail_if: 'device_memory@b8 > 1' asks"),
    ("[targets.onnxruntime-cpu]\nsms = ['86']", "batch and sms shape engines"),
    ("[targets.onnxruntime-cpu]\nsparse = true", "batch and sms shape engines, as sparse does"),
    ("[targets.tensorrt]\nsparse = true", "sparse asks for sparse kernels, but reduce.sparse for no sparse weights"),
    ("[targets.tensorrt-rtx]\nsparse = true", "TensorRT-RTX builds the same plan with and without it"),
    ("[targets.tensorrt]\nsms = ['86']", "use the backend tensorrt-rtx"),
    ("[targets.openvino]\nprecision = 'bf16'", "but export.precisions has ['fp32', 'fp16']"),
    (
        "[targets.openvino]\nprecision = 'int8'\n[export]\nprecisions = ['fp32', 'int8']\nrest = 'fp32'",
        "OpenVINO computes a whole graph in one precision here, got 'int8'",
    ),
    ("[targets.tensorrt-rtx]\nsms = ['13']", "'13' is no target of TensorRT-RTX"),
    ("[targets.tensorrt]\nbatch = '1:4:8'", "targets.tensorrt.batch is 1:4:8, but bench.batches asks for 32"),
    ("[targets.tensorrt]\nbatch = 'many'", "'many' is not MIN:OPT:MAX"),
    ("[targets.tensorrt]\nfail_if = ['p50@b1 > baseline']", "put this rule under [gate]"),
    ("[package]\nname = 'a b'", "package.name is 'a b', expected letters, digits"),
    ("[package]\nname = 'a'\n[export]\nprecisions = ['fp16']", "needs fp32 among export.precisions"),
    ("[licences]\nmodel = 'Apache2'", "licences.model is 'Apache2', expected an SPDX expression, such as 'Apache-2.0'"),
    ("[licences]\nheld_out = 'MIT OR'", "licences.held_out is 'MIT OR', expected an SPDX expression"),
    ("select_mlp = 'fold'", "reduce.select_mlp is 'fold', expected one of obs, combined"),
    ("select_head = 'magnitude'", "[reduce]: dimensions of heads can't be ranked by magnitude"),
    ("targets = 3", "[reduce]: unknown key 'targets'"),
]
"""Lines added to the minimal recipe, and the message."""
REDUCED = [
    ("ridge = 1e-3", "nothing asked for: give reduce.mlp, reduce.attn or reduce.conv a share to remove"),
    ("macs = 0.6\nparams = 0.5", "reduce.macs and reduce.params are several budgets; give one"),
    ("mlp = 0.5\npreset = 'corpse'", "reduce.preset is 'corpse', expected one of best, corp"),
    ("mlp = 0.5\nheads = 'ragged'", "reduce.heads = 'ragged' has no effect on a reduction"),
    ("mlp = 0.5\nallow_partial = 1", "reduce.allow_partial is 1, expected true or false"),
    ("mlp = 0.5\nclosed_loop = 1", "reduce.closed_loop is 1, expected true, false or one of asymmetric, symmetric"),
    ("mlp = 0.5\nclosed_loop = true\nreads = 'class'", "reduce.reads is 'class', expected one of all, pooled"),
]
"""Replacements of its `mlp = 0.5`, and the message."""
SYSTEMS = [
    ("kept", "mlp = 0.5", "'kept', but this reduction needs no such system; leave it out, or give preset corp"),
    ("whole", "mlp = 0.5\nattn = 0.5", "'whole', but this reduction needs no such system"),
    ("kept", "attn = 0\npreset = 'corp'", "attn = 0 keeps every dimension; expected 'whole', or attn above 0"),
    ("kept", "attn = 0.5\npreset = 'corp'\nselect_head = 'magnitude'", "expected 'whole', or select_head 'energy'"),
    ("all", "attn = 0.5\npreset = 'corp'", "calibration.attention_system is 'all', expected one of whole, kept"),
]
"""Values of calibration.attention_system, replacements of `mlp = 0.5`, and the message."""
OWN = LEAST.replace('[held_out]\nimages = "val"', "").replace('images = "train"', 'images = "train"\nhold_out = 32')
PROVED = [
    ("hold_out = 32", "", "held_out.images is missing; write it under [held_out], or hold_out = 128 under"),
    ("mlp = 0.5", "within = 'error 0.1'", "so they can't prove it too; give held_out.images"),
    ("mlp = 0.5", "mlp = 0.5\n[export]\nprecisions = ['fp32', 'int8']\nrest = 'fp32'", "give held_out.images"),
    ("mlp = 0.5", "mlp = 0.5\n[held_out]\nsamples = 9", "draw from held_out.images, and there are none"),
    ("mlp = 0.5", "mlp = 0.5\n[licences]\nheld_out = 'MIT'", "have licences.calibration; leave licences.held_out out"),
]
"""Replacements in the recipe whose calibration images prove the result, and the message."""
ARGUMENTS = [
    (f"kwargs.{'a.' * 60}b = 1", "nested too deep"),
    ("kwargs = { since = 1979-05-27 }", "}, expected no dates and times"),
]
"""Lines of [model], and the message."""
REFUSED = [
    *((LEAST + added, said) for added, said in ADDED),
    *((LEAST.replace("mlp = 0.5", reduce), said) for reduce, said in REDUCED),
    *(
        (LEAST.replace('"train"', f'"train"\nattention_system = "{taken}"').replace("mlp = 0.5", reduce), said)
        for taken, reduce, said in SYSTEMS
    ),
    *((OWN.replace(old, new), said) for old, new, said in PROVED),
    *((LEAST.replace("[calibration]", f"{line}\n[calibration]"), said) for line, said in ARGUMENTS),
]


@pytest.mark.parametrize(("text", "message"), REFUSED, ids=range(len(REFUSED)))
def test_errors_name_their_recipe_key(tmp_path: Path, text: str, message: str) -> None:
    rejects(rf"recipe\.toml: (.|\n)*{re.escape(message)}", load_recipe, written(tmp_path, text))


def test_missing_and_malformed_recipes_are_named(tmp_path: Path) -> None:
    rejects("no such recipe; write one with", load_recipe, tmp_path / "none.toml")
    rejects(r"broken\.toml: not TOML: ", load_recipe, written(tmp_path, "[model", "broken.toml"))


def test_images_held_out_of_calibration_can_prove_the_result(tmp_path: Path) -> None:
    """Every printed command leaves these images out until the proof."""
    text = OWN.replace("hold_out = 32", 'hold_out = 32\nsamples = 99\nseed = 5\ngroup_labels = "groups.npy"')
    recipe = load_recipe(written(tmp_path, text.replace("mlp = 0.5", "macs = 0.5")))
    here = tmp_path.resolve()
    groups = str(here / "groups.npy")
    assert recipe.proof_images == InputOptions(images=here / "train", samples=99, seed=5, hold_out=32, groups=groups)
    drawn = "--images ../train --samples 99 --seed 5 --hold-out 32 --groups ../groups.npy "
    by_name = {stage.name: stage for stage in stages_of(recipe, tmp_path / "out", Baseline())}
    assert drawn in by_name["parity"].command
    reduced = by_name["reduce"].command
    assert "--hold-out 32 --groups ../groups.npy " in reduced
    assert "--held-out .stages/moments.held-out.safetensors" in reduced
    for name in ("moments", "reduce", "samples", "parity"):
        assert by_name[name].outside["calibration.group_labels"] == here / "groups.npy"
        assert by_name[name].settings["calibration.hold_out"] == 32
        assert "held_out.images" not in by_name[name].outside
    assert load_recipe(written(tmp_path, text_of_recipe(recipe, tmp_path), "again.toml")) == recipe
    apart = load_recipe(written(tmp_path, text + '[held_out]\nimages = "val"\n'))
    assert apart.proof_images == InputOptions(images=here / "val", samples=None, seed=0)
    stages = {stage.name: stage for stage in stages_of(apart, tmp_path, Baseline())}
    assert not [name for name in ("parity", "reduce") if "--hold-out" in stages[name].command]


def test_recipe_extends_another_key_by_key(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    written(tmp_path / "base", LEAST + "[bench]\nblock_ms = 5\n[targets.tensorrt]\nbatch = '1:8:64'", "base.toml")
    own = 'extends = "base/base.toml"\n[bench]\nbatches = [1]\n[calibration]\nimages = "own"\n[targets.tensorrt]\n'
    recipe = load_recipe(written(tmp_path, own + "fail_if = ['fused_attention < dense']"))
    assert (recipe.bench.block_ms, recipe.bench.batches) == (5, (1,))
    assert recipe.calibration.images == tmp_path.resolve() / "own"
    assert recipe.held_out.images == tmp_path.resolve() / "base" / "val", "relative to where it is written"
    assert str(recipe.targets[0].profile) == "1:8:64"
    assert recipe.targets[0].rules[0].metric == "fused_attention"


def test_rules_may_use_figures_the_release_measures(tmp_path: Path) -> None:
    own = "[parity]\nmetric = ['map=python s.py {outputs}']\n[gate]\nfail_if = ['metric.map < dense', "
    figures = "'linear_cka < 0.9', 'dense.p50@b8 > baseline', 'fitted_images > 0', 'peak_memory_bytes@b1 > dense']"
    recipe = load_recipe(written(tmp_path, LEAST + own + figures))
    assert [rule.metric for rule in recipe.rules] == ["map", "linear_cka", "p50", "fitted_images", "peak_memory_bytes"]


def test_threads_need_a_target_that_uses_them(tmp_path: Path) -> None:
    text = LEAST + "[bench]\nthreads = 2\n[targets.tensorrt]\n"
    rejects(r"bench\.threads = 2 has no effect on TensorRT", load_recipe, written(tmp_path, text))
    assert load_recipe(written(tmp_path, text + "[targets.onnxruntime-cpu]")).bench.threads == 2


def test_errors_in_a_base_name_the_base_and_cycles_are_refused(tmp_path: Path) -> None:
    written(tmp_path, "[modell]\n", "base.toml")
    rejects(r"base\.toml: unknown key 'modell'", load_recipe, written(tmp_path, 'extends = "base.toml"'))
    written(tmp_path, 'extends = "recipe.toml"', "base.toml")
    rejects(r"recipe\.toml -> base\.toml -> recipe\.toml", load_recipe, tmp_path / "recipe.toml")
    rejects("extends is 3, expected the path of another recipe", load_recipe, written(tmp_path, "extends = 3"))


def test_resolved_recipe_round_trips_from_another_folder(tmp_path: Path) -> None:
    added = """
[release]
name = "a \\"quoted\\" näme"
[gate]
fail_if = ["speedup@b8 < 1.2", 'p50@b1 > baseline * 1.03']
[targets.tensorrt-rtx]
sms = ["86", "89"]
batch = "1:8:64"
"""
    text = LEAST.replace("[calibration]", 'kwargs = { num_classes = 7, "odd key" = [1, 2] }\n[calibration]')
    recipe = load_recipe(written(tmp_path, text + added))
    folder = tmp_path / "deep" / "out"
    folder.mkdir(parents=True)
    assert load_recipe(written(folder, text_of_recipe(recipe, folder)), trust_paths=True) == recipe
    assert str(tmp_path) not in text_of_recipe(recipe, folder), "no absolute path is kept"


def test_model_directory_is_a_path(tmp_path: Path) -> None:
    (tmp_path / "trained").mkdir()
    recipe = load_recipe(written(tmp_path, LEAST.replace("deit_small_patch16_224", "trained")))
    assert recipe.model.directory == tmp_path.resolve() / "trained"
    assert load_recipe(written(tmp_path, text_of_recipe(recipe, tmp_path), "again.toml")).model == recipe.model


def test_huge_file_is_not_read_as_a_recipe(tmp_path: Path) -> None:
    path = written(tmp_path, LEAST + "#" * MOST_BYTES)
    rejects(rf"bytes, a recipe has {MOST_BYTES} at most", load_recipe, path)


def test_script_arguments_are_quoted_and_cannot_end_comments() -> None:
    stages = [{"name": "one", "why": "a\nrm -rf x", "words": ("corp-deploy", "release", "my recipe; rm -rf x")}]
    text = rendered("remaining.sh", release="nice\r\nrm -rf x", stages=stages)
    assert "# What is left of the release of nice\\x0d\\nrm -rf x and needs a machine" in text
    assert "# one: a\\nrm -rf x\ncorp-deploy release 'my recipe; rm -rf x'\necho " in text
    assert not [line for line in text.splitlines() if line.startswith("rm")]


def starter_text(model: str | Path, path: Path, **given: Path) -> str:
    return starter(str(model), path, **{"images": None, "held_out": None, "labels": None, **given})


def write_starter(model: str | Path, path: Path, **given: Path) -> Recipe:
    """Write the starter recipe of a model and load it."""
    path.write_text(starter_text(model, path, **given))
    return load_recipe(path, trust_paths=True)


def test_starter_recipe_of_a_directory_is_complete(tmp_path: Path) -> None:
    model = (ROOT / "examples" / "digits" / "model").resolve()
    path = tmp_path / "digits.toml"
    recipe = write_starter(model, path, images=tmp_path / "cal.npz")
    assert Path(recipe.model.name) == model
    assert recipe.calibration.images == tmp_path.resolve() / "cal.npz"
    assert recipe.proves_on_calibration, "no other images were given"
    text = path.read_text()
    assert [name for name in SECTIONS if f"[{name}]" not in text and name != "samples"] == []
    limits = recipe.parity
    assert (limits.min_agreement, limits.max_error) == (0.98, 0.05), "no link of a first release goes unjudged"
    rejects(r"with its own weights, .*drop --weights", starter_text, model, path, weights=tmp_path / "w.pth")
    labelled = write_starter(model, path, labels=tmp_path / "labels.npy")
    assert labelled.held_out.labels == tmp_path.resolve() / "labels.npy"
    assert labelled.held_out.images == tmp_path.resolve() / "images" / "held-out"


def test_starter_recipe_of_a_timm_name(tmp_path: Path) -> None:
    path = tmp_path / "deit.toml"
    write_starter("deit_tiny_patch16_224", path)
    assert load_recipe(path).model.weights == tmp_path.resolve() / "weights.safetensors"
    weights, images = tmp_path / "my weights.pth", tmp_path / "all"
    write_starter("deit_tiny_patch16_224", path, weights=weights, images=images, labels=tmp_path / "l.npy")
    filled = load_recipe(path)
    assert filled.model.weights == weights.resolve()
    assert filled.held_out.labels == (tmp_path / "l.npy").resolve()
    drawn = InputOptions(images=images.resolve(), samples=None, seed=0, hold_out=filled.calibration.hold_out)
    assert (filled.proof_images, filled.calibration.hold_out) == (drawn, 128), "some of the images prove the result"
    message = "neither a model directory nor a timm name; names that look alike: deit_tiny"
    rejects(message, starter_text, "deit_tiny_patch61", path)


def test_starter_recipe_of_a_convolutional_network(tmp_path: Path) -> None:
    """It has no keys for heads and MLPs, for a directory in the project and for a saved one."""
    convnet = (ROOT / "examples" / "digits" / "resnet").resolve()
    save(small_convnets.checkpoint("resnet18"), tmp_path / "saved")
    path = tmp_path / "convnet.toml"
    for model in (convnet, tmp_path / "saved"):
        assert write_starter(model, path, images=tmp_path / "cal.npz").reduce == ReduceOptions(macs=0.7)
        words = path.read_text()
        assert "# conv = 0.5" in words
        assert "align_conv = 32" in words
        assert [word for word in ("# mlp =", "heads =", "align_mlp", "blocks.7") if word in words] == []
    assert "conv =" not in starter_text("deit_tiny_patch16_224", path)


def test_reading_and_planning_a_recipe_import_neither_torch_nor_onnx() -> None:
    code = (
        "import sys; import corp_deploy.release.run, corp_deploy.commands.release; "
        "print([name for name in ('torch', 'timm', 'onnx', 'onnxruntime') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
