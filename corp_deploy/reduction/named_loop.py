"""Closed loops of modules that are run whole: their sites are reduced in the order in which they run, each on what
enters it in the module as reduced so far.

Nothing is known of what lies between two sites, so there is no residual stream that a layer could mend: a layer is
fitted to what it gives in the dense module, on other inputs (asymmetric calibration, arXiv 2504.02692). Every site
takes a run of the dense module and one of the reduced, both ended where the site is reached.

Legend: B images, N tokens, C channels.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from calib.hooks import evaluating
from calib.input_set import InputSet
from calib.inputs import Inputs, moved
from corp_deploy.families.family import family_of, is_run_whole
from corp_deploy.families.modules import device, replaced
from corp_deploy.families.site import LinearSite
from corp_deploy.families.sites import Sites
from corp_deploy.families.steps import Branch, Nothing
from corp_deploy.families.traced_module import TracedModule
from corp_deploy.families.widths import Widths
from ground.errors import BadInput

from .closed_loop import Loop, fitted_site, reduce_closed_loop
from .coverage import coverage
from .kinds import kind_of
from .method import Method
from .model import Reduction, notes_on, uniform_widths
from .report import SiteReport, as_allocated
from .streams import Embedded, Streams
from .symmetric_loop import reduce_symmetric_loop
from .traced_loop import reduce_traced

Done = Callable[[int], None] | None
Hook = Callable[[nn.Module, tuple[object, ...], dict[str, object]], None]


class _Reached(Exception):
    """Ends a run whose rest would compute nothing that is asked for."""


@contextmanager
def _before(model: nn.Module, hooks: Mapping[str, Hook]) -> Iterator[None]:
    """Within it, each is called before the module of its name runs."""
    with ExitStack() as stack:
        for name, hook in hooks.items():
            handle = model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)
            stack.callback(handle.remove)
        yield


def _stream(name: str, inputs: tuple[object, ...], how: Mapping[str, object], images: int) -> Tensor:
    """What enters a site. Raises BadInput for anything but tokens of each image."""
    x_BNC = inputs[0] if len(inputs) == 1 and not how else None
    if not isinstance(x_BNC, Tensor) or x_BNC.ndim != 3 or len(x_BNC) != images:
        got = f"{list(x_BNC.shape)}" if isinstance(x_BNC, Tensor) else f"{len(inputs) + len(how)} arguments"
        raise BadInput(
            f"closed loop: {name} takes {got} for {images} images, expected one tensor [images, tokens, channels]; "
            "reduce without --closed-loop"
        )
    return x_BNC


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """Sites in the order in which they run."""

    names: tuple[str, ...]

    def entering(self, model: nn.Module, site: str, batch: Inputs) -> Tensor:
        """What enters the site [B,N,C]; nothing behind it is run. Raises BadInput where another was to come first."""
        came: list[str] = []
        entered: list[Tensor] = []

        def hook_of(name: str) -> Hook:
            def hook(_: nn.Module, inputs: tuple[object, ...], how: dict[str, object]) -> None:
                came.append(name)
                if name == site:
                    assert isinstance(batch, Tensor), type(batch)
                    entered.append(_stream(site, inputs, how, len(batch)))
                    raise _Reached

            return hook

        with _before(model, {name: hook_of(name) for name in self.names}), suppress(_Reached):
            model(batch)
        expected = self.names[: self.names.index(site) + 1]
        if tuple(came) != expected:
            raise BadInput(
                f"closed loop: {', '.join(came) or 'no site'} ran where {', '.join(expected)} had before; what runs "
                "first isn't the same for all images, so sites can't be reduced in order: leave --closed-loop away"
            )
        return entered[0]


def _order(model: nn.Module, names: Sequence[str], batch: Inputs) -> _Order:
    """By one run. Raises BadInput for a site that doesn't run once for an image."""
    came: list[str] = []

    def hook_of(name: str) -> Hook:
        return lambda *_: came.append(name)

    with _before(model, {name: hook_of(name) for name in names}):
        model(batch)
    for name in names:
        if came.count(name) != 1:
            raise BadInput(
                f"closed loop: {name} is run {came.count(name)} times for an image, expected once, so it has no place "
                "in an order of sites; reduce without --closed-loop"
            )
    return _Order(names=tuple(came))


def _refuse_more_than_layers(model: nn.Module, site: LinearSite, batch: Inputs) -> None:
    """Raise BadInput where a site's module does more than its linear layers and what lies between them."""
    module, entering, inside = model.get_submodule(site.name), list[object](), list[object]()
    given: list[object] = []
    with ExitStack() as stack:
        hooks = [module.register_forward_pre_hook(lambda _, inputs: entering.append(inputs[0]))]
        hooks += [first.register_forward_pre_hook(lambda _, inputs: inside.append(inputs[0])) for first in site.firsts]
        hooks += [each.register_forward_hook(lambda _, __, out: given.append(out)) for each in (site.last, module)]
        for handle in hooks:
            stack.callback(handle.remove)
        model(batch)
    pairs = [*((entering[0], x) for x in inside), (given[0], given[1])]
    for one, other in pairs:
        if not (isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)):
            raise BadInput(
                f"closed loop: {site.name} does more than its linear layers and what lies between them (a norm or a "
                "sum inside it), so what it lacks can't be fitted; name the module that holds those alone, or reduce "
                "without --closed-loop"
            )


def _streams(loop: Loop | None, enter: Callable[[Inputs], Embedded], images: InputSet, batch_size: int) -> Streams:
    if loop is None:
        # Nothing is fitted for which an image would be held out.
        return Streams((enter(batch) for batch in images.batches(batch_size)), held_out_every=1)
    return loop.streams_of(enter, images, batch_size)


def _entering_both(order: _Order, dense: nn.Module, reduced: nn.Module, name: str) -> Callable[[Inputs], Embedded]:
    """What enters a site in both modules [B,N,2C], dense first."""

    def enter(batch: Inputs) -> Embedded:
        here = moved(batch, device(dense))
        return torch.cat([order.entering(model, name, here) for model in (dense, reduced)], dim=-1), None

    return enter


def _apart(streams: Streams) -> Streams:
    """The streams of both modules, each by itself."""
    for pair in streams:
        pair.dense, pair.reduced = (half_BNC.contiguous() for half_BNC in pair.dense.chunk(2, dim=-1))
    return streams


@torch.no_grad()
def reduce_in_order(
    model: nn.Module,
    images: InputSet,
    method: Method,
    *,
    widths: Widths | None = None,
    batch_size: int = 32,
    loop: Loop | None = None,
    done: Done = None,
) -> Reduction:
    """A new module with the widths asked for, every site repaired on the module as reduced so far; without `loop` by
    the statistics there alone, as reduce_symmetric_loop has it. Other arguments as in reduce_closed_loop.

    Raises BadInput where the order of the sites can't be known, and for sites whose layers can't be followed.
    """
    sites = family_of(model).sites(model)
    asked = uniform_widths(model, method) if widths is None else widths
    if loop is not None and loop.reads is not None:
        raise BadInput("closed loop: which tokens are read isn't known of a module that is run whole; drop --reads")
    modules: dict[str, nn.Module] = {}
    reports: list[SiteReport] = []
    with evaluating(model):
        first = moved(next(iter(images.batches(min(batch_size, 4)))), device(model))
        order = _order(model, list(asked), first)
        for name in order.names:
            _refuse_more_than_layers(model, sites.linear_by_name[name], first)
        for place, name in enumerate(order.names):
            reduced = replaced(model, modules).eval() if modules else model
            enter = _entering_both(order, model, reduced, name)
            streams = _apart(_streams(loop, enter, images, batch_size))
            new, reported = _reduced_site(model, sites, name, streams, method, asked, loop)
            modules |= new
            reports += reported
            if done is not None:
                done(place + 1)
    way = "fitted to what each layer gives in the dense module" if loop else "each to its dense weights"
    return Reduction(
        model=replaced(model, modules).eval().requires_grad_(False),
        method=method,
        sites=tuple(reports if widths is None else as_allocated(reports)),
        coverage=coverage(sites, method, asked, by_site=widths is not None),
        notes=notes_on(sites, method, asked),
        said=(f"closed loop over {len(order.names)} sites in the order in which they run, {way}",),
    )


def _reduced_site(
    model: nn.Module,
    sites: Sites,
    name: str,
    streams: Streams,
    method: Method,
    asked: Widths,
    loop: Loop | None,
) -> tuple[dict[str, nn.Module], list[SiteReport]]:
    site = sites.linear_by_name[name]
    step = Branch(
        name=name,
        norm=nn.Identity(),
        layer=model.get_submodule(name),
        scale_C=None,
        shortcut=Nothing(None, site.last.out_features),
    )
    if loop is not None:
        new, reports = fitted_site(step, site, streams, method, asked[name], loop)
        return new.modules, reports
    new = kind_of(site).rebuilt(step, site, streams, method, asked[name])
    return new.modules, new.reports


def reduce_by_closed_loop(
    model: nn.Module,
    images: InputSet,
    method: Method,
    *,
    widths: Widths | None = None,
    loop: Loop | None = None,
    done: Done = None,
) -> Reduction:
    """In the way that the model allows: block by block, or site by site where it is run whole or traced."""
    if isinstance(model, TracedModule):
        return reduce_traced(model, images, method, widths=widths, loop=loop or Loop(), done=done)
    how = reduce_in_order if is_run_whole(model) else reduce_closed_loop
    return how(model, images, method, widths=widths, loop=loop or Loop(), done=done)


def reduce_by_symmetric_loop(
    model: nn.Module, images: InputSet, method: Method, *, widths: Widths | None = None, done: Done = None
) -> Reduction:
    """Likewise, as reduce_symmetric_loop does it."""
    if isinstance(model, TracedModule):
        return reduce_traced(model, images, method, widths=widths, done=done)
    if is_run_whole(model):
        return reduce_in_order(model, images, method, widths=widths, done=done)
    return reduce_symmetric_loop(model, images, method, widths=widths, done=done)
