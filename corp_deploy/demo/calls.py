"""The demo's commands as values: what it runs from, and what stands in its manifest and report."""

from dataclasses import dataclass

from corp_deploy.invocation.call import Invocation
from corp_deploy.store.checkpoint import CONFIG, WEIGHTS

from .example import Example

ONLY_DEMO = ("images/calibration.npz", "images/held-out.npz", "effects.json")
MODEL = (f"dense/{CONFIG}", f"dense/{WEIGHTS}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoScale:
    """How much of the example is used: images to calibrate on (None: all) and to leave out of the fit, types of graphs
    beside fp32, timing.
    """

    samples: int | None = None
    hold_out: int = 200
    batches: tuple[int, ...] = (1, 8, 32)
    time_limit: float = 8.0
    types: tuple[str, ...] = ("fp16",)


SCALE = DemoScale()


def itself(example: Example) -> Invocation:
    """The demo's own command."""
    return Invocation(command="demo", options={**example.demo_options, "output": "."})


def invocations(example: Example, scale: DemoScale) -> dict[tuple[str, ...], Invocation]:
    """Every command of the demo by the files that it makes, all in the demo's directory."""
    calibrate = {
        "model": "dense",
        "images": "images/calibration.npz",
        "samples": scale.samples,
        "batch_size": 64,
        "hold_out": scale.hold_out,
        "output": "moments.safetensors",
    }
    reduce = {
        "model": "dense",
        "moments": "moments.safetensors",
        "held_out": "moments.held-out.safetensors",
        **example.reduce,
        "output": "reduced",
    }
    verify = {
        "images": "images/held-out.npz",
        "labels": "images/held-out.npz",
        "moments": "moments.safetensors",
        "min_agreement": 0.98,
        "max_error": example.max_error,
        "output": "parity.json",
    }
    bench = {
        "batch": scale.batches,
        "images": "images/held-out.npz",
        "time_limit": scale.time_limit,
        "output": "bench.json",
    }
    names = ("model.onnx", *(f"model.{each}.onnx" for each in scale.types))
    graphs = {model: tuple(f"{model}/{name}" for name in names) for model in ("dense", "reduced")}
    calls: dict[tuple[str, ...], Invocation] = {
        ("moments.safetensors", "moments.held-out.safetensors"): Invocation(command="calibrate", options=calibrate),
        ("reduced/config.json", "reduced/model.safetensors"): Invocation(command="reduce", options=reduce),
    }
    for name, files in graphs.items():
        export = {"model": name, "precision": ("fp32", *scale.types), "output": files[0]}
        calls[files] = Invocation(command="export", options=export)
    chain = ("dense", "reduced", *graphs["reduced"])
    pair = (graphs["dense"][0], graphs["reduced"][0])
    return calls | {
        ("parity.json", "parity.npz"): Invocation(command="verify", arguments=chain, options=verify),
        ("bench.json",): Invocation(command="bench", arguments=pair, options=bench),
        ("report.html",): Invocation(
            command="report", arguments=(".",), options={"title": example.title, "output": "report.html"}
        ),
    }


def made_by(example: Example, scale: DemoScale) -> dict[str, str]:
    """The command that makes each file; what no other command makes the demo does."""
    by_calls = {name: str(run) for names, run in invocations(example, scale).items() for name in names}
    return dict.fromkeys((*ONLY_DEMO, *MODEL), str(itself(example))) | by_calls
