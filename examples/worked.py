# %% [markdown]
# This script runs the functions behind the commands on the digits example: a trained vision transformer of 6 blocks
# and the images of scikit-learn's digits. Replace the model and the images by your own; the rest stays the same. Run
# it as a script (`python worked.py`), or cell by cell in an editor that supports `# %%`.

# %%
from pathlib import Path

import corp_deploy
from corp_deploy.demo.run import write_inputs

here = Path("worked")
write_inputs(here)  # dense/, a trained model; images/, some to calibrate on and others, with labels, to judge by
calibration_images, held_out = here / "images" / "calibration.npz", here / "images" / "held-out.npz"
dense = here / "dense"

# %% [markdown]
# One pass over unlabelled images collects second-order sums, from which every reduction is solved. The fit leaves out
# 100 of the 500 images, and the loss of each site is also reported on those.

# %%
moments = corp_deploy.calibrate(dense, calibration_images, here / "moments.safetensors", samples=500, hold_out=100)
print(f"{moments.inputs} images fitted to, {len(moments.moments.sites)} sites")

# %% [markdown]
# This call reduces the model to 70 % of the multiply-adds. It gives each site a width by its effect on the outputs.
# The result is an ordinary module, and a directory of safetensors and JSON.

# %%
reduced = corp_deploy.reduce(
    dense, moments, here / "reduced", inputs=calibration_images, samples=200, macs=0.7, held_out=moments.held_out
)
share = reduced.macs[1] / reduced.macs[0]
print(f"{share:.0%} of the MACs, {reduced.parameters[1]:,} of {reduced.parameters[0]:,} parameters")
worst = max(reduced.sites, key=lambda site: site.error / site.energy)
print(f"most is lost at {worst.site}: {worst.error / worst.energy:.2g} of its energy")

# %% [markdown]
# Export typed graphs, and verify them on images that no earlier step used. Each link has its own error, so that the
# error of the reduction is never attributed to FP16. A link without a limit would be measured, but would not pass.

# %%
graph = corp_deploy.export(reduced, here / "reduced" / "model.onnx")
graph_fp16 = corp_deploy.export(reduced, here / "reduced" / "model.fp16.onnx", precision="fp16")
proof = corp_deploy.verify(
    dense,
    [reduced, graph, graph_fp16],
    held_out,
    labels=held_out,
    min_agreement=0.98,
    max_error=0.05,
    output=here / "parity.json",
)
print(proof.line)
for link in proof.links:
    print(f"{link.name}: relative error {link.measures.relative_error:.2g}, {link.status}")
assert proof.verdict == "PASS", proof.reason

# %% [markdown]
# Time the dense and the reduced graph in one process, interleaved, with 95 % intervals; `row.noise` is the dense
# model against itself.

# %%
dense_graph = corp_deploy.export(dense, here / "dense" / "model.onnx")
speed = corp_deploy.bench(dense_graph, graph, batches=(1, 8), time_limit=2, output=here / "bench.json")
for row in speed.summary.rows:
    assert row.speedup is not None, speed.warnings
    print(f"batch {row.batch}: {row.speedup.describe(bounds=' times as fast ({} to {})')}")

# %% [markdown]
# To load the model later, or on another machine, you need only the directory: no pruning code and no pickle.

# %%
model = corp_deploy.load(here / "reduced")
print(f"{sum(weight.numel() for weight in model.parameters()):,} parameters")
