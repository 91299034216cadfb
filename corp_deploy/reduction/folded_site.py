"""Sites of traced models with merged channels or heads: rows of a cluster become their mean, and readers are refitted.

The activation of a mean row is not the mean of its members' activations, and can't be computed from the dense model's
moments. So the program runs with the mean rows on real images: sums of the readers' inputs, and of their outputs'
residual to the dense ones, give the error of any weight by one regression.

Legend: U units (channels or heads), K units kept, V groups of a unit, F columns of a layer, O its outputs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx
from torch.nn import functional

from corp_deploy.algebra.channels import ChannelRecovery
from corp_deploy.algebra.fold import averages, cluster_rows
from corp_deploy.algebra.patches import columns
from corp_deploy.algebra.quadratic import explained
from corp_deploy.algebra.regression import RegressionSums, refit_toward
from corp_deploy.algebra.whole_heads import recover_projection
from corp_deploy.traced.models.sites import Site, TracedChannels
from corp_deploy.traced.models.units import Units
from corp_deploy.traced.models.values import TracedValues
from corp_deploy.traced.narrowing.proof import Mask
from corp_deploy.traced.programs.program import Program
from corp_deploy.traced.programs.readers import replace_tensors
from ground.errors import BadInput

from .change import Change, Mapped, TracedReduced, changed_tensors, site_report
from .choice import missing_patches
from .kinds import kind_of
from .method import Method
from .reader_kind import TracedKind
from .reader_stats import ReaderStats
from .report import HeldOut
from .stream_walk import Values, run_on_batch
from .values_kind import TracedValuesKind, groups_of_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedRead:
    """A layer that reads merged units: its columns by unit, and the kept units.

    `plain_OK` is plain folding: the sum of the columns of each cluster. With `refits` the layer is fitted to the merged
    units' outputs, otherwise it is `foretold`, computed from the dense statistics alone. `fit` and `held_out`: sums of
    the merged activations and of the residual of plain folding, over the inputs shown so far.
    """

    read: ReaderStats
    columns_UF: Tensor
    kept_K: Tensor
    refits: bool
    plain_OK: Tensor
    foretold: ChannelRecovery
    fit: RegressionSums
    held_out: RegressionSums

    def see(self, dense: Tensor, merged: Tensor, there: Callable[[Tensor], Tensor], *, is_held_out: bool) -> None:
        """Add the layer's dense and merged inputs for some images to the sums; `there` leaves out padding tokens."""
        at_F = torch.from_numpy(self.read.portion.columns_CM).flatten().to(dense.device)
        by_place = (x.movedim(1, -1) if self.read.is_of_maps else x for x in (dense, merged))
        z, z_merged = (there(x)[..., at_F] for x in by_place)
        z_merged = z_merged[..., self.columns_UF[self.kept_K].flatten()]
        y, plain = (functional.linear(x, w.to(x)) for x, w in ((z, self.read.weight_OU), (z_merged, self.plain_OK)))
        sums = self.held_out if is_held_out else self.fit
        sums.add(z_merged.flatten(0, -2)[None], (y - plain).flatten(0, -2)[None])

    def judged(self, ridge_rel: float) -> tuple[Change, float | None]:
        """Return the repaired layer, its columns kept in their order, and its error on held-out images.

        It is as published (`gram`), or fitted to the merged units (`refit`: a ridge toward plain folding, the bias
        free).
        """
        last = self.foretold
        if self.refits:
            sums = self.fit.uncentred() if self.read.reading.is_biasless else self.fit
            refit = refit_toward(None, sums.regression(), strength=ridge_rel)
            weight_OK, bias_O = self.plain_OK + refit.weight_OK, self.read.bias_O + refit.bias_O
            last = replace(last, weight_OK=weight_OK, bias_O=bias_O, condition=refit.condition, ridge=refit.ridge)

        def error(of: RegressionSums) -> float:
            return of.regression().error(last.weight_OK - self.plain_OK, last.bias_O - self.read.bias_O)

        left, plain = error(self.fit), self.fit.regression().target_square
        recovery = replace(
            last,
            weight_OK=last.weight_OK[:, self.columns_UF[self.kept_K].flatten().argsort()],
            residual=left,
            residual_uncompensated=plain,
            r2=explained(left, plain),
        )
        return Change(read=self.read, recovery=recovery), error(self.held_out) if self.held_out.x.tokens else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedFold:
    """A site with merged units; `program` is the dense program with the mean rows in place of the merged ones."""

    site: Site
    units: Units
    kept_K: Tensor
    program: Program
    mapped: tuple[Mapped, ...]
    reads: tuple[FoldedRead, ...]

    def show(
        self,
        values: Values,
        weights_BN: Tensor | None,
        *,
        is_held_out: bool,
        masks: Mapping[fx.Node, Sequence[Mask]] | None = None,
    ) -> None:
        """Run the region around the site with merged units, from dense `values`, and add to each reader's sums."""
        if weights_BN is not None and isinstance(self.site, TracedValues):
            raise BadInput(
                f"{self.site.name}: folded heads are judged on whole images, and these inputs have padding; rank "
                "heads: --select heads=obs"
            )
        region = self.units.region
        unchanged = {node: value for node, value in values.items() if node not in region.changed}
        merged = run_on_batch(self.program, region.nodes, unchanged, masks=masks)

        def there(x: Tensor) -> Tensor:
            is_of_tokens = weights_BN is not None and x.dim() == 3 and x.shape[:2] == weights_BN.shape
            return x[weights_BN > 0.0] if weights_BN is not None and is_of_tokens else x

        by_name = {node.name: node for node in region.ends}
        for each in self.reads:
            end = by_name[each.read.reading.source]
            each.see(values[end], merged[end], there, is_held_out=is_held_out)

    def reduced(self, method: Method, held_out: tuple[ReaderStats, ...] | None) -> TracedReduced:
        """Return the reduced site, after all images were shown."""
        changes, lost = zip(*(each.judged(method.ridge_rel) for each in self.reads), strict=True)
        errors = [each for each in lost if each is not None]
        elsewhere = None
        if held_out is not None and len(errors) == len(lost):
            elsewhere = HeldOut(energy=sum(each.energy for each in held_out), error=sum(errors))
        site, kind, count, units = self.site, kind_of(self.site), len(self.kept_K), len(self.units.groups_UV)
        is_narrower = count < units
        if isinstance(site, TracedValues):
            (only,) = changes
            widths = units, units * method.heads_kept, count
            report = site_report(site.name, "heads", widths, only.recovery, energy=only.read.energy, held_out=elsewhere)
            beside = groups_of_heads(site, self.kept_K)
        else:
            assert isinstance(kind, TracedKind), site.name
            report, beside = kind.report(site, method, changes, count, elsewhere), {}
        return TracedReduced(
            reports=[report],
            kept_K=self.units.groups_UV.to(self.kept_K.device)[self.kept_K].flatten().sort().values,
            beside=beside,
            changes=changes if is_narrower else (),
            mapped=self.mapped if is_narrower else (),
        )


def merges_units(site: Site, method: Method) -> bool:
    kind = kind_of(site)
    if isinstance(site, TracedValues) and isinstance(kind, TracedValuesKind):
        return method.folds_heads and kind.heads_left(site, method) < len(site.groups_HV)
    return isinstance(site, TracedChannels) and method.merges


def fold_site(site: Site, reads: tuple[ReaderStats, ...], method: Method, width: int) -> TracedFold:
    """Cluster the site's units to one width; return the fold, with empty sums of its readers."""
    is_of_heads = isinstance(site, TracedValues)
    units = site.units() if isinstance(site, TracedValues | TracedChannels) else ""
    assert isinstance(units, Units), (site.name, units)
    count = width // units.groups_UV.shape[1]
    # As published, channels are clustered by their weights alone.
    written = units.written(site.program) if is_of_heads else site.writing_GX()
    map_KU = averages(cluster_rows(written, count, seed=0), count)
    kept_K = (map_KU > 0.0).double().argmax(1)
    rows = {name: rows_UX.to(map_KU.device).T for name, rows_UX in units.rows.items()}
    mapped = tuple(
        Mapped(
            name=name,
            dense=site.program.tensor(name).detach().double(),
            rows_HD=rows_XU,
            map_HRD=map_KU.expand(len(rows_XU), -1, -1),
            kept_HR=rows_XU[:, kept_K],
        )
        for name, rows_XU in rows.items()
    )
    alone = TracedReduced(reports=[], kept_K=kept_K, mapped=mapped)
    recovery = method.heads_recovery if is_of_heads else method.mlp_recovery
    tensors = {
        name: tensor.to(site.program.tensor(name)) for name, tensor in changed_tensors({site.name: alone}).items()
    }
    return TracedFold(
        site=site,
        units=units,
        kept_K=kept_K,
        program=replace_tensors(site.program, tensors),
        mapped=mapped,
        reads=tuple(_fold_reader(read, units, map_KU, kept_K, recovery, method.ridge_rel) for read in reads),
    )


def _fold_reader(
    read: ReaderStats, units: Units, map_KU: Tensor, kept_K: Tensor, recovery: str, ridge_rel: float
) -> FoldedRead:
    if len(read.groups_C) < units.groups_UV.numel():
        raise missing_patches(len(read.groups_C), units.groups_UV.numel(), len(kept_K), recovery)
    columns_UF = columns(units.groups_UV.flatten(), read.joined).view(len(units.groups_UV), -1).to(map_KU.device)
    order_F = columns_UF.flatten()
    parts = (
        read.stats.mean_U[order_F],
        read.stats.second_UU[order_F[:, None], order_F],
        read.weight_OU[:, order_F],
        read.bias_O,
        map_KU,
    )
    plain = recover_projection(*parts, "none", ridge_rel=ridge_rel)
    foretold = recover_projection(*parts, "gram", ridge_rel=ridge_rel) if recovery == "gram" else plain
    outputs, inputs = plain.weight_OK.shape
    fit, held_out = (
        RegressionSums.empty(inputs=inputs, outputs=outputs, device=map_KU.device) for _ in ("fit", "held out")
    )
    return FoldedRead(
        read=read,
        columns_UF=columns_UF,
        kept_K=kept_K,
        refits=recovery in ("affine", "refit"),
        plain_OK=plain.weight_OK,
        foretold=foretold,
        fit=fit,
        held_out=held_out,
    )
