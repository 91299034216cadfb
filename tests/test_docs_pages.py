"""Every page of docs/ does what it says: its commands and its Python run as written, one after the other."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torchvision  # type: ignore[import-untyped]
from PIL import Image
from safetensors.torch import save_file

import corp_deploy
from corp_deploy.cli import main
from corp_deploy.spec.architecture import Architecture
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture, save
from examples.digits.images import load_part
from tests.decoders import text, write_decoder
from tests.encoders import texts, write_encoder
from tests.hf_towers import write_tower
from tests.pages import DOCS, ROOT, blocks, follow, lacking, pages
from tests.stored import encoded, table, write_dataset, write_tar

ELSEWHERE = {
    "start.md",  # from the wheel, in a fresh environment: test_wheel.py
    "how-to/ray.md",  # with variables for Ray: test_cluster.py
}
FOLLOWED = [
    page
    for page in pages()
    if page.relative_to(DOCS).as_posix() not in ELSEWHERE
    and any(block.kind in ("console", "python") for block in blocks(page))
]

DAILY = (
    "how-to/ci-gate.md", "how-to/dataloader.md", "how-to/decoders.md", "how-to/how-small.md",
    "how-to/latency-budget.md", "how-to/python.md", "how-to/roll-back.md", "how-to/several-machines.md",
    "how-to/ship.md", "how-to/silent-fp32.md", "how-to/verify-a-release.md",
)  # fmt: skip
"""Pages that CI follows: with the README's, they have each command once."""


def of_tier(page: Path) -> Any:
    """Return a page as a parameter, marked as nightly unless CI follows it."""
    name = page.relative_to(DOCS).as_posix()
    return pytest.param(page, id=name, marks=() if name in DAILY else pytest.mark.nightly)


def digits(directory: Path) -> None:
    """What every page may count on: the digits example, images to calibrate on, and others with labels to judge by."""
    (directory / "examples").symlink_to(ROOT / "examples")
    train, test = load_part("train"), load_part("held-out")
    np.savez(directory / "images.npz", images=train.images[:128])
    np.savez(directory / "held-out.npz", images=test.images[:64], labels=test.labels[:64])


# What readers of single pages have beside the digits example: small models under names like theirs.


def photographs(directory: Path, count: int = 8) -> None:
    """A folder of pictures, none of them square."""
    noise = np.random.default_rng(0)
    directory.mkdir()
    for number in range(count):
        pixels = noise.integers(0, 256, (180, 240, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(directory / f"{number:03}.jpg")


def of_timm(home: Path) -> None:
    """Weights of a fine-tuned ViT, a checkpoint with a moving average, and small models of other kinds."""
    torch.manual_seed(0)
    state = timm.create_model("vit_tiny_patch16_224", depth=2, num_classes=5).state_dict()
    save_file(state, home / "vit.safetensors")
    wrapped = {f"module.{name}": tensor for name, tensor in state.items()}
    average = {name: 0.9 * tensor for name, tensor in wrapped.items()}
    torch.save({"state_dict": wrapped, "state_dict_ema": average, "epoch": 3}, home / "last.pth.tar")
    photographs(home / "photos")
    normed = {"depth": 2, "qk_norm": True}
    windows = {"depths": [1, 1], "num_heads": [3, 6], "img_size": 56}
    for file, name, arguments in (
        ("normed", "vit_tiny_patch16_224", normed),
        ("swin", "swin_tiny_patch4_window7_224", windows),
        ("convnext", "test_convnext", {}),
    ):
        save_file(timm.create_model(name, num_classes=5, **arguments).state_dict(), home / f"{file}.safetensors")
        source = corp_deploy.Source(name, weights=home / f"{file}.safetensors", kwargs=arguments)
        corp_deploy.calibrate(source, home / "photos", home / f"{file}.moments.safetensors")
    (home / "snapshot").mkdir()
    hub = timm.create_model("test_vit", num_classes=5)
    save_file(hub.state_dict(), home / "snapshot" / "model.safetensors")
    config = {"architecture": "test_vit", "num_classes": 5, "pretrained_cfg": {"crop_pct": 0.95, "classifier": "head"}}
    (home / "snapshot" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    torch.save(torchvision.models.mobilenet_v3_small(num_classes=5).state_dict(), home / "mobilenet.pth")


def of_transformers(home: Path) -> None:
    """A DINOv2 and a classifier as transformers writes them, and images."""
    write_tower(home / "dinov2", "Dinov2Model")
    write_tower(home / "classifier", "ViTForImageClassification")
    images = np.random.default_rng(0).normal(size=(24, 3, 32, 32)).astype(np.float32)
    np.save(home / "images.npy", images[:16])
    np.save(home / "held-out.npy", images[16:])


def of_texts(home: Path) -> None:
    """A BERT as transformers writes it, with its tokenizer, and documents."""
    write_encoder(home / "bert")
    for name, lines in (("calibration.txt", texts(32)), ("held-out.txt", texts(48)[32:])):
        (home / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


def of_tokens(home: Path) -> None:
    """A Llama as transformers writes it, and two texts."""
    write_decoder(home / "dense", "llama")
    (home / "calibration.txt").write_text(text(letters=4_000), encoding="utf-8")
    (home / "held-out.txt").write_text(text(start=4_000, letters=2_000), encoding="utf-8")


def small_dense(home: Path) -> None:
    torch.manual_seed(0)
    small = {"img_size": 32, "patch_size": 8, "embed_dim": 96, "depth": 2, "num_classes": 5}
    architecture = Architecture(name="vit_tiny_patch16_224", kwargs=small)
    save(Checkpoint(model=dense_from_architecture(architecture), architecture=architecture, lineage={}), home / "dense")


def of_graphs(home: Path) -> None:
    """A ViT of two blocks, dense and reduced, and images of its size."""
    small_dense(home)
    images = np.random.default_rng(0).normal(size=(8, 3, 32, 32)).astype(np.float32)
    np.save(home / "images.npy", images)
    moments = corp_deploy.calibrate(home / "dense", images, home / "moments.safetensors")
    corp_deploy.reduce(home / "dense", moments, home / "reduced", mlp=0.5, attn=0.5)


def of_loaders(home: Path) -> None:
    """As many labelled images as show an agreement of 98 %."""
    test = load_part("held-out")
    np.savez(home / "held-out.npz", images=test.images[:256], labels=test.labels[:256])


def of_stored(home: Path) -> None:
    """A ViT of two blocks, and the same pictures with labels as parquet, a data set and packed shards."""
    from pyarrow import Table, parquet

    small_dense(home)
    contents, labels = [encoded(seed) for seed in range(24)], [seed % 3 for seed in range(24)]
    write_dataset(home, contents, labels)
    for part, rows in enumerate((range(12), range(12, 24))):
        chosen = table([contents[row] for row in rows], [labels[row] for row in rows], struct=True)
        parquet.write_table(chosen, home / f"train-{part}.parquet")
        pictures = {f"{row:02}.png": contents[row] for row in rows}
        write_tar(home / f"shards-{part}.tar.gz", pictures | {f"{row:02}.cls": b"%d" % labels[row] for row in rows})
    parquet.write_table(Table.from_pydict({"left": contents, "right": contents[::-1]}), home / "pairs.parquet")
    parquet.write_table(table([*contents[:17], None, *contents[18:]], labels, struct=False), home / "damaged.parquet")


PREPARED: Mapping[str, Callable[[Path], None]] = {
    "how-to/dataloader.md": of_loaders,
    "how-to/timm-model.md": of_timm,
    "how-to/hugging-face-model.md": of_transformers,
    "how-to/text-encoder.md": of_texts,
    "how-to/decoders.md": of_tokens,
    "how-to/typed-graphs.md": of_graphs,
    "how-to/stored-images.md": of_stored,
}
"""By page."""


@pytest.mark.slow("graph", "engine", "process")
@pytest.mark.parametrize("page", [of_tier(page) for page in FOLLOWED])
def test_page_commands_run_as_written(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digits(tmp_path)
    if (prepare := PREPARED.get(page.relative_to(DOCS).as_posix())) is not None:
        prepare(tmp_path)
    follow(page, tmp_path, monkeypatch)


def test_ci_runs_each_documented_command() -> None:
    """No page that CI follows runs those that depend on the machine or that only tables name."""
    assert set(DAILY) <= {page.relative_to(DOCS).as_posix() for page in FOLLOWED}
    followed = "\n".join(page.read_text() for page in (ROOT / "README.md", *(DOCS / name for name in DAILY)))
    absent = {name for name in main.commands if not re.search(rf"^\$ corp-deploy {name}", followed, re.MULTILINE)}
    assert absent == {"bench compare", "demo", "doctor", "doctor completion"}


def test_code_blocks_have_a_tested_language() -> None:
    """A command in a block of another kind would be run by nobody."""
    kinds = {"console", "python", "toml", "json", "yaml", "sh", "text", "mermaid", "xml"}
    for page in pages():
        for block in blocks(page):
            assert block.kind in kinds, (page.name, block.kind)
            own = re.search(r"^\$? ?corp-deploy ", block.text, re.MULTILINE)
            assert block.kind in ("console", "sh", "yaml", "text") or not own, (page.name, block.text)
        fences = re.findall(r"^ *```(\w*)", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert len(fences) == 2 * len(blocks(page)), f"{page.name}: a fence without a kind or an end"


def test_prepared_pages_exist() -> None:
    assert all((DOCS / page).is_file() for page in PREPARED)


def test_options_in_running_text_exist() -> None:
    """In running text too."""
    ours = {
        option
        for name, command in main.commands.items()
        for options in (name.split(), *((*each.opts, *each.secondary_opts) for each in command.params))
        for option in options
    }
    others = {
        "--cpus", "--gpus", "--nproc-per-node", "--nnodes", "--max-restarts", "--help", "--help-all", "--version",
        "--check", "--output", "--home", "--only",
        "--array", "--export", "--gpus-per-task", "--requeue",  # Slurm's
    }  # fmt: skip
    for page in pages():
        if page.name == "typed-graphs.md":  # names trtexec's, too; its own test looks at ours
            continue
        prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", prose))
        assert named <= ours | others, (page.name, named - ours - others)


def test_every_picture_is_shown_and_exists(tmp_path: Path) -> None:
    """No picture that no page shows, none shown that isn't there."""
    shown = {name for page in pages() for name in re.findall(r"pictures/([\w.-]+)", page.read_text())}
    shown |= set(re.findall(r"docs/pictures/([\w.-]+)", (ROOT / "README.md").read_text()))
    there = {path.name for path in (DOCS / "pictures").glob("*")} if (DOCS / "pictures").is_dir() else set()
    assert shown == there


def test_shown_output_must_be_printed() -> None:
    printed = (
        "reading ━━━ 3/3\n┃ site         ┃ lost    ┃\n│ blocks.0.mlp │ 3.1e-03 │\n│ blocks.1.mlp │ 0.24    │\n"
        "│              │ by far  │\nwarning: 12 of\n  64 images, sha256 9f5ba9a44e942808, tool 1.7.1\n"
    )
    shown = [
        "│ blocks.0.mlp │ 0.0035 │\n...\nwarning: 12 of 64 images, sha256 aa00bb11cc22dd33, tool 1.5.0.2",
        "│ blocks.1.mlp │ ... │\nwarning: 12 ... 64 images",
        "│ blocks.1.mlp │ 0.25  │\n│              │ by far │",
    ]
    assert [lacking(each, printed) for each in shown] == [[], [], []]
    for other in (
        "│ blocks.0.mlp │ 0.31 │",
        "│ blocks.2.mlp │ 0.0031 │",
        "│ 0.0031 │",
        "warning: 24 of 64",
        "12 of 64 texts",
    ):
        assert lacking(other, printed), other
    assert lacking("│ blocks.0.mlp │ 0.31 │\nwarning: 1 of 2", printed, varies=True) == []
    assert lacking("│ blocks.3.mlp │ 0.31 │", printed, varies=True)


def test_python_page_shows_the_worked_example() -> None:
    shown = (DOCS / "how-to" / "python.md").read_text(encoding="utf-8")
    for line in (ROOT / "examples" / "worked.py").read_text(encoding="utf-8").splitlines():
        assert line.startswith("# %%") or line.removeprefix("# ") in shown, line
