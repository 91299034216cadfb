"""No command asks a network, and no file of this tool could but the one that asks a server it was given."""

import json
import re
import socket
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from corp_deploy.cli import main
from corp_deploy.store.checkpoint import save
from perf.runners.openvino import OpenVinoRunner
from tests import tiny
from tests.command import invoked, run
from tests.export_served import CLASSES, write_onnx
from tests.network import WentOut, stay_here

ROOT = Path(__file__).parents[1]
ROOMS = ("calib", "corp_deploy", "export", "ground", "perf")
# Python's ways out, those of the libraries here, and of who would count their use.
WAYS_OUT = {"aiohttp", "fsspec", "ftplib", "http", "httpx", "huggingface_hub", "requests", "smtplib", "socket", "ssl",
            "telnetlib", "urllib", "urllib3", "xmlrpc", "openvino_telemetry", "analytics"}  # fmt: skip
ASKS_A_SERVER = "export/triton/server.py"
READS_URLS = "ground/places.py"
# They take longer, or need what may be absent: their own tests run behind the guard that conftest puts before every
# test.
TRIED_ELSEWHERE = {"demo", "latency-table", "export-decoder", "perplexity"}


@pytest.fixture(autouse=True)
def _nothing_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a network, nor an environment that would have libraries stay away from it."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "DO_NOT_TRACK"):
        monkeypatch.delenv(name, raising=False)
    stay_here(monkeypatch, loopback=False)


def test_network_guard_sees_outgoing_connections() -> None:
    with pytest.raises(WentOut):
        urllib.request.urlopen("http://example.org", timeout=1)
    with pytest.raises(WentOut), socket.socket() as out:
        out.connect(("192.0.2.1", 80))
    with pytest.raises(WentOut):
        socket.create_connection(("localhost", 9))
    with pytest.raises(WentOut):
        socket.getaddrinfo("example.org", 80)


def calls(home: Path) -> dict[str, tuple[list[object], int]]:
    """A call of every command, in an order in which each finds what it needs, and its exit code here."""
    dense, reduced, moments = home / "dense", home / "reduced", home / "m.safetensors"
    images, graph, bench = ["--images", home / "images.npy"], home / "reduced/model.onnx", home / "bench.json"
    quick = ["--time-limit", 5, "--half-width", 0.9, "--min-rounds", 6, "--block-ms", 1]
    return {
        "doctor": (["doctor"], 0),
        "doctor completion": (["doctor", "completion", "bash"], 0),
        "inspect": (["inspect", "--model", dense], 0),
        "calibrate": (["calibrate", "--model", dense, *images, "-o", moments], 0),
        "calibrate --merge": (["calibrate", "--merge", moments, home / "other.safetensors", "-o", home / "two"], 0),
        "inspect redundancy": (["inspect", "redundancy", "--moments", moments], 0),
        "reduce": (["reduce", "--model", dense, "--moments", moments, "--mlp", 0.5, "-o", reduced], 0),
        "sweep": (["sweep", "--model", dense, "--moments", moments, *images, "--sparsity", 0.5, "--preset", "none",
                   "-o", home / "sweep"], 0),
        "export": (["export", "--model", reduced, "-o", graph], 0),
        "verify": (["verify", dense, reduced, graph, "--random", 2, "--max-error", 9, "-o", home / "parity.json"], 0),
        "build": (["build", graph, "--backend", "onnxruntime", "-o", home / "o.onnx"], 0),
        "audit": (["audit", graph, graph, "--backend", "tensorrt"], 4),
        "bench": (["bench", graph, graph, "--batch", 1, *quick, "-o", bench], 0),
        "gate": (["gate", bench, "--fail-if", "size_bytes > dense"], 0),
        "bench compare": (["bench", "compare", bench, bench], 0),
        "report": (["report", home, "-o", home / "r.html"], 0),
        "package": (["package", home, "-o", home / "repository"], 0),
        "package lint": (["package", "lint", home / "repository"], 0),
        "package serve": (["package", "serve", home / "repository", "--model-version", 1], 0),
        "release": (["release", home / "r.toml", "--init", dense], 0),
        "ship": (["ship", dense, *images, "-o", home / "shipped"], 2),
        "check": (["check", home], 2),
    }  # fmt: skip


def test_commands_use_no_network(tmp_path: Path) -> None:
    save(tiny.checkpoint(depth=1), tmp_path / "dense")
    for seed, name in enumerate(("images", "others")):
        np.save(tmp_path / f"{name}.npy", tiny.images(6, seed=seed))
    other = ("--images", tmp_path / "others.npy", "-o", tmp_path / "other.safetensors")
    invoked("calibrate", "--model", tmp_path / "dense", *other)
    every = calls(tmp_path)
    assert sorted({*every, *TRIED_ELSEWHERE}) == sorted(main.commands)
    for command, (words, code) in every.items():
        assert not isinstance(invoked(*words, code=code).exception, WentOut), command


@pytest.mark.parametrize(
    "words",
    [
        ("--model", "hf-hub:timm/vit_tiny_patch16_224"),
        ("--model", "timm/vit_tiny_patch16_224.augreg_in21k"),
        ("--model", "vit_tiny_patch16_224.augreg_in21k"),
        ("--model", "vit_tiny_patch16_224", "--model-kwargs", json.dumps({"pretrained": True})),
        ("--model", "vit_tiny_patch16_224", "--model-kwargs",
         json.dumps({"checkpoint_path": "https://example.org/w.pth"})),
        ("--model", "vit_tiny_patch16_224", "--model-kwargs",
         json.dumps({"pretrained_cfg_overlay": {"url": "https://example.org/w.pth"}, "pretrained": True})),
        ("--model", "https://example.org/model"),
        ("--model", "hf:google/vit-base-patch16-224"),
        ("--model", "torchvision:vit_b_16", "--weights", "https://example.org/w.pth"),
    ],
)  # fmt: skip
def test_model_names_cause_no_network_access(words: tuple[str, ...]) -> None:
    """What libraries would fetch by these names is refused, or built with no weights but those that are given."""
    done = run("inspect", *words)
    assert not isinstance(done.exception, WentOut), done.output
    assert done.exit_code in (0, 2), done.output
    assert "Traceback" not in done.output


def test_openvino_sends_no_telemetry(tmp_path: Path) -> None:
    pytest.importorskip("openvino", reason="the extra openvino is not installed")
    feeds = {"images": np.zeros((1, 3, 4, 4), np.float32)}
    with OpenVinoRunner(write_onnx(tmp_path / "m.onnx")) as runner:
        assert runner(feeds)["logits"].shape == (1, CLASSES)


def test_only_two_files_can_use_the_network() -> None:
    imports = re.compile(rf"^\s*(?:import|from) (?:{'|'.join(WAYS_OUT)})\b", re.MULTILINE)
    files = (path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    found = {str(path.relative_to(ROOT)) for path in files if imports.search(path.read_text(encoding="utf-8"))}
    assert found == {ASKS_A_SERVER, READS_URLS}
