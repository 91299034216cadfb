"""The time that a reduction at 50 % by preset best takes after a calibration, on the GPU and on the CPU."""

from dataclasses import replace

from benchmarks.gpu import models
from benchmarks.gpu.load import LOADS, clock_s, held_images, sizes, timed_s
from benchmarks.gpu.record import Row
from benchmarks.gpu.setting import ALIGN_HEAD, Setting
from calib.collect import Collector, Options
from corp_deploy.families import traced_model
from corp_deploy.families.family import listened, sites_of
from corp_deploy.traced.models.sites import calibration_taps

SPARSITY = 0.5


def reduced(name: str, where: str, setting: Setting) -> Row:
    """The row of one model's reduction at 50 % by preset best: the whole model on a GPU, on a CPU its first blocks.

    On a GPU the sums are put there site by site, which is counted. On a CPU the seconds of the blocks timed are scaled
    to all of them.
    """
    from corp_deploy.reduction.method import method_from_preset
    from corp_deploy.reduction.model import reduce, uniform_widths
    from corp_deploy.store.input_sets import lineage_of_model

    size, device = sizes(setting), setting.device
    model = models.dense(name, setting)
    depth = traced_model.depth(model)
    blocks = depth if where == "cuda" else min(LOADS[name].cpu_blocks, depth)
    chosen, found = tuple(f"blocks.{index}." for index in range(blocks)), sites_of(model)
    sites = replace(found, every=tuple(site for site in found.every if site.name.startswith(chosen)))
    held = held_images(size["images"], setting.image_size, device)[: size["reduction_images"]]
    taps = calibration_taps(model, sites)
    with Collector(listened(model), taps, device=device, options=Options(precision="bfloat16")) as collector:
        timed_s(device, held, size["batch"], collector.add)
        moments = collector.moments(lineage_of_model(model))
    del collector
    method = method_from_preset(
        "best",
        mlp_sparsity=SPARSITY,
        attention_sparsity=SPARSITY,
        align_hidden=setting.align_hidden,
        align_head=ALIGN_HEAD,
    )
    model = model.to(where)
    widths = {site: width for site, width in uniform_widths(model, method).items() if site in sites.by_name}
    finished_s: list[float] = []
    begun_s = clock_s(where)
    reduction = reduce(model, moments, method, widths=widths, on_progress=lambda *_: finished_s.append(clock_s(where)))
    seconds, sites_s = clock_s(where) - begun_s, finished_s[-1] - begun_s
    return {
        "row": "reduction",
        "model": name,
        "where": where,
        "preset": "best",
        "sparsity": SPARSITY,
        "calibration_images": len(held),
        "blocks": depth,
        "blocks_timed": blocks,
        "seconds_timed": seconds,
        "seconds": seconds + sites_s * (depth / blocks - 1.0),
        "extrapolated": blocks < depth,
        **{f"reduced_{key}": value for key, value in models.facts(reduction.model).items() if blocks == depth},
    }
