"""What readers of single pages of docs/ have beside the digits example: small models under names like theirs."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import timm
import torch
import torchvision  # type: ignore[import-untyped]
from PIL import Image
from safetensors.torch import save_file

import corp_deploy
from corp_deploy.families.architecture import Architecture
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture, save
from tests.decoders import text, write_decoder
from tests.encoders import texts, write_encoder
from tests.hf_towers import write_tower


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
    """A DINOv2 and a classifier as transformers writes them, one with an activation of its own, and images."""
    write_tower(home / "dinov2", "Dinov2Model")
    for name in ("classifier", "foreign"):
        write_tower(home / name, "ViTForImageClassification")
    config = home / "foreign" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"hidden_act": "mish"}), encoding="utf-8")
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


def of_graphs(home: Path) -> None:
    """A ViT of two blocks, dense and reduced, and images of its size."""
    torch.manual_seed(0)
    small = {"img_size": 32, "patch_size": 8, "embed_dim": 96, "depth": 2, "num_classes": 5}
    architecture = Architecture(name="vit_tiny_patch16_224", kwargs=small)
    save(Checkpoint(model=dense_from_architecture(architecture), architecture=architecture, lineage={}), home / "dense")
    images = np.random.default_rng(0).normal(size=(8, 3, 32, 32)).astype(np.float32)
    np.save(home / "images.npy", images)
    moments = corp_deploy.calibrate(home / "dense", images, home / "moments.safetensors")
    corp_deploy.reduce(home / "dense", moments, home / "reduced", mlp=0.5, attn=0.5)


PREPARED: Mapping[str, Callable[[Path], None]] = {
    "how-to/timm-model.md": of_timm,
    "how-to/hugging-face-model.md": of_transformers,
    "how-to/text-encoder.md": of_texts,
    "how-to/decoders.md": of_tokens,
    "how-to/typed-graphs.md": of_graphs,
}
"""By page."""
