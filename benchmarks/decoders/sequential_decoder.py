"""What `calibrate --sequential` takes of a large decoder: peak memory, and time a block, in a process of its own.

Random weights of real shapes in float16, written block by block: OPT-1.3B whole (24 blocks), and four of LLaMA-2-7B's
blocks, which say what a whole one needs, since one is held at a time. Sequences are random ids. Peak memory is what the
process holds for itself (RssAnon), looked at all the time: pages of the mapped weights are the kernel's.

    python -m benchmarks.decoders.sequential_decoder --output benchmarks/results/sequential_decoder.json
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.speed.long_runs import own_mib
from corp_deploy.families.decoder_config import architecture_from_transformers
from corp_deploy.families.decoder_model import DecoderArchitecture, DecoderBlock, TextDecoder
from corp_deploy.families.decoder_names import state_to_transformers
from corp_deploy.machine import versions
from ground.files import write_json
from perf.timing.watch import environment
from tests import decoders

SEQUENCES, LENGTH = 16, 512
MODELS: dict[str, dict[str, Any]] = {
    "OPT-1.3B": {
        "model_type": "opt",
        "vocab_size": 50_272,
        "hidden_size": 2048,
        "ffn_dim": 8192,
        "word_embed_proj_dim": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    "LLaMA-2-7B, 4 of 32 blocks": {
        "model_type": "llama",
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
}


def _random(tensors: dict[str, torch.Tensor], draw: torch.Generator) -> dict[str, torch.Tensor]:
    """Norms of ones and little beside zero, all else as it is initialised when trained."""
    return {
        name: (torch.ones if name.endswith("norm.weight") else torch.zeros)(tensor.shape, dtype=torch.float16)
        if tensor.ndim == 1
        else 0.02 * torch.randn(tensor.shape, generator=draw, dtype=torch.float32).half()
        for name, tensor in tensors.items()
    }


def _named(state: dict[str, torch.Tensor], architecture: DecoderArchitecture, kind: str) -> dict[str, torch.Tensor]:
    wide, narrow = (count * architecture.head for count in (architecture.heads, architecture.groups))
    return state_to_transformers(state, (wide, narrow, narrow), architecture.layers, kind)


def write_model(directory: Path, config: dict[str, Any]) -> int:
    """A directory as transformers has it, a shard a block; gives its parameters."""
    architecture = architecture_from_transformers(config, where="here")
    draw, index, parameters = torch.Generator().manual_seed(0), dict[str, str](), 0
    with torch.device("meta"):
        block = DecoderBlock(architecture).state_dict()
        outside = {name: each for name, each in TextDecoder(architecture).state_dict().items() if "blocks." not in name}
    states = {"model-outside.safetensors": outside}
    for number in range(architecture.layers):
        states[f"model-{number}.safetensors"] = {f"blocks.{number}.{name}": each for name, each in block.items()}
    for file, state in states.items():
        shard = _random(_named(state, architecture, config["model_type"]), draw)
        save_file(shard, directory / file, metadata={"format": "pt"})
        index |= dict.fromkeys(shard, file)
        parameters += sum(each.numel() for each in shard.values())
    write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})
    write_json(directory / "config.json", config)
    decoders.write_tokenizer(directory)
    return parameters


def calibrated(directory: Path) -> dict[str, Any]:
    """One calibration in a process of its own: seconds a block, peak MiB, and what the file takes."""
    ids = np.random.default_rng(0).integers(0, 32_000, (SEQUENCES, LENGTH), dtype=np.int32)
    np.save(directory / "ids.npy", ids)
    words = f"calibrate --model hf:{directory} --tokens {directory / 'ids.npy'} --sequential --batch-size 4".split()
    words += ["--model-kwargs", json.dumps({"length": LENGTH}), "-o", str(directory / "moments.safetensors")]
    begun = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "corp_deploy", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    most, seen = 0.0, dict[str, float]()
    while process.poll() is None:
        most = max(most, own_mib(process.pid))
        for part in directory.glob("*.partial.safetensors"):
            seen.setdefault(part.name, time.monotonic())
        time.sleep(0.05)
    assert process.stdout is not None
    said = process.stdout.read()
    assert process.returncode == 0, said
    needed = re.search(r"will take ([\d,]+) MiB", said)
    at = sorted(seen.values())
    return {
        "seconds": time.monotonic() - begun,
        "seconds_by_block": [later - earlier for earlier, later in pairwise(at)],
        "peak_mib": most,
        "told_mib": None if needed is None else int(needed[1].replace(",", "")),
        "moments_mib": (directory / "moments.safetensors").stat().st_size / 2**20,
    }


def measured(name: str) -> dict[str, Any]:
    """One of the models."""
    with tempfile.TemporaryDirectory() as scratch:
        parameters = write_model(Path(scratch), MODELS[name])
        return {"model": name, "parameters": parameters, "blocks": MODELS[name]["num_hidden_layers"]} | calibrated(
            Path(scratch)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    asked = parser.parse_args()
    record = {
        "kind": "corp-deploy/benchmark-sequential-decoder",
        "sequences": SEQUENCES,
        "tokens": LENGTH,
        "rows": [measured(name) for name in asked.models],
        "versions": versions(),
        "environment": environment(),
    }
    write_json(asked.output, record)


if __name__ == "__main__":
    main()
