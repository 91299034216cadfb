"""Token pairs that attend to each other, as programs tell them, against loops over windows and tokens."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, fx, nn
from torch.nn import functional as F

from calib.inputs import InputSet, run_model, tensors_by_name
from calib.moments import ChannelMoments, HeadMoments
from corp_deploy.families.family import sites_of
from corp_deploy.families.traced_model import steps, trace_model, tracing
from corp_deploy.polish.segments import segment_sublayer
from corp_deploy.polish.walk import StreamPair
from corp_deploy.reduction.calibrate import Statistics, calibrate
from corp_deploy.reduction.closed_loop import reduce_traced
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.reduction.sparsify import Sparsifying, sparsify
from corp_deploy.spec.architecture import Architecture
from corp_deploy.spec.sparsity import Sparsity
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.input_sets import arrays_for_model, texts_for_model
from corp_deploy.store.transformers_directory import load_transformers
from corp_deploy.traced.finding.cuts import extract_between, find_cuts, side_inputs
from corp_deploy.traced.models.pairs import TracedPairs
from corp_deploy.traced.models.segments import TokenRows
from corp_deploy.traced.models.steps import SegmentStep, StreamState
from corp_deploy.traced.programs.attention_masks import (
    SDPA,
    added_scores,
    find_attention_output,
    unread_queries,
    visible_keys,
)
from corp_deploy.traced.programs.exported import pad_uneven_heads
from corp_deploy.traced.programs.program import Program, operation
from corp_deploy.traced.programs.tracing import trace
from tests import encoders

D, HEADS, TOKENS, WINDOW, SHIFT, QK = 12, 2, 10, 4, 2, 4
FORMS = ("spelled", "five axes", "bool", "of the input", "causal")


class Shifted(nn.Module):
    """Attention in shifted windows of a padded line of tokens, whose two ends don't see each other."""

    def __init__(self, form: str, qk: int = QK) -> None:
        super().__init__()
        self.form, self.qk = form, qk
        self.q, self.k, self.v = nn.Linear(D, HEADS * qk), nn.Linear(D, HEADS * qk), nn.Linear(D, D)
        self.proj, self.bias = nn.Linear(D, D), nn.Parameter(torch.randn(HEADS, WINDOW, WINDOW))
        self.register_buffer("is_seen", shown(), persistent=False)

    is_seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "causal":
            return x + self.attended(x, is_causal=True)
        beyond = -x.shape[1] % WINDOW
        apart = F.pad(x, (0, 0, 0, beyond)).roll(-SHIFT, 1).reshape(-1, WINDOW, D)
        return x + self.attended(apart).reshape(len(x), -1, D).roll(SHIFT, 1)[:, : x.shape[1]]

    def attended(self, x: Tensor, *, is_causal: bool = False) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        if is_causal:
            z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.joined(z)
        windows = len(self.is_seen)
        added = self.bias + torch.zeros(windows, 1, WINDOW, WINDOW).masked_fill(~self.is_seen[:, None], -100.0)
        times = len(x) // windows
        if self.form == "spelled":
            scores = q @ k.mT * self.qk**-0.5 + added.repeat(times, 1, 1, 1)
            z = scores.softmax(-1) @ v
        elif self.form == "five axes":
            scores = (q * self.qk**-0.5) @ k.mT
            scores = scores.view(times, windows, HEADS, WINDOW, WINDOW) + added
            z = scores.view(-1, HEADS, WINDOW, WINDOW).softmax(-1) @ v
        elif self.form == "bool":
            mask = self.is_seen[:, None].repeat(times, 1, 1, 1)
            z = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            mask = x.mean(-1)[:, None, None] + added.repeat(times, 1, 1, 1)
            z = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.joined(z)

    def joined(self, z: Tensor) -> Tensor:
        return self.proj(z.transpose(1, 2).flatten(2))


def slots() -> list[list[int]]:
    """Return the places of each window, with those of padding."""
    places = TOKENS + -TOKENS % WINDOW
    line = [(place + SHIFT) % places for place in range(places)]
    return [line[start : start + WINDOW] for start in range(0, places, WINDOW)]


def shown() -> Tensor:
    """Return for each window which of its tokens see each other, those that were neighbours in the line."""
    return torch.tensor([[[(a < SHIFT) == (b < SHIFT) for b in each] for a in each] for each in slots()])


def model_of(form: str, **more: int) -> nn.Module:
    torch.manual_seed(0)
    module = Shifted(form, **more)
    module.inputs = {"x": (TOKENS, D)}  # type: ignore[assignment]
    return trace_model(module, Architecture(name="Shifted", family="module"))


def product_of(program: Program) -> fx.Node:
    (node,) = (node for node in program.nodes if operation(node) in (SDPA, "matmul") and find_attention_output(node))
    return node


@pytest.mark.parametrize("form", FORMS)
def test_program_reports_which_token_pairs_attend(form: str) -> None:
    program = trace(Shifted(form), (torch.randn(2, TOKENS, D),))
    product = product_of(program)
    whole = find_attention_output(product)
    assert whole is not None
    added, gone = added_scores(program, product), unread_queries(program, whole)
    if form == "of the input":
        assert added is None
    elif form == "causal":
        assert added is not None
        assert visible_keys(added).tolist() == [[a >= b for b in range(TOKENS)] for a in range(TOKENS)]
    else:
        assert added is not None
        assert torch.equal(visible_keys(added), shown()[:, None].expand(added.shape))
    if form == "causal":
        assert gone is None
    else:
        assert gone is not None
        expected = torch.tensor([[place >= TOKENS for place in each] for each in slots()])
        assert torch.equal(gone, expected[:, None].expand(gone.shape))
        with torch.inference_mode():  # plans inspect models in this mode, and copies of them
            copied = trace(deepcopy(Shifted(form)), (torch.randn(2, TOKENS, D),))
            (of_copy,) = (node for node in copied.nodes if node.name == whole.name)
            told = unread_queries(copied, of_copy)
        assert told is not None
        assert torch.equal(told, gone)


def counted_pairs(q: Tensor, k: Tensor, form: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield sets of queries and of keys [., H, D] of one image in which every query sees every key."""
    if form == "causal":
        yield from ((q[place : place + 1], k[: place + 1]) for place in range(TOKENS))
        return
    for window, places in enumerate(slots()):
        sides = [(place < SHIFT and form != "of the input") for place in places]
        for side in sorted(set(sides)):
            inside = [slot for slot in range(WINDOW) if sides[slot] == side]
            yield q[window][[slot for slot in inside if places[slot] < TOKENS]], k[window][inside]


@pytest.mark.parametrize("form", FORMS)
def test_only_attending_pairs_are_counted(form: str, tmp_path: Path) -> None:
    """Loops over images, windows and their parts give the expected second moments and energies."""
    model = model_of(form)
    (site,) = (each for each in sites_of(model).every if isinstance(each, TracedPairs))
    inputs = torch.randn(5, TOKENS, D, generator=torch.Generator().manual_seed(1))
    checkpoint = Checkpoint(model=model, architecture=Architecture(name="Shifted", family="module"), lineage={})
    save_file({"x": inputs}, tmp_path / "x.safetensors")
    opened = arrays_for_model(model, tmp_path / "x.safetensors")
    moments = calibrate(checkpoint, opened, batch_size=2, statistics=Statistics(attention_system=True))
    told = moments.sites[site.name]
    assert isinstance(told, HeadMoments)
    qq_HDD, energy_HD = torch.zeros(HEADS, QK, QK, dtype=torch.float64), torch.zeros(HEADS, QK, dtype=torch.float64)
    plain = Shifted(form)
    plain.load_state_dict(model.state_dict())
    plain.double()
    for x in inputs.double():
        if form != "causal":
            x = F.pad(x, (0, 0, 0, -TOKENS % WINDOW))[torch.tensor(slots())]
        q, k = (each(x).unflatten(-1, (HEADS, QK)).detach() for each in (plain.q, plain.k))
        q = q * QK**-0.5 if form == "five axes" else q  # as they enter the product of scores
        for q_NHD, k_MHD in counted_pairs(q, k, form):
            qq_HDD += torch.einsum("nhd,nhe->hde", q_NHD, q_NHD)
            energy_HD += q_NHD.square().sum(0) * k_MHD.square().sum(0)
    torch.testing.assert_close(told.energy_HD, energy_HD, rtol=1e-5, atol=1e-5)
    if form != "causal":  # causal attention weights these sums otherwise
        torch.testing.assert_close(told.qq_HDD, qq_HDD, rtol=1e-5, atol=1e-5)
    assert told.images == len(inputs)
    (read,) = (each for each in moments.sites.values() if isinstance(each, ChannelMoments))
    assert read.tokens == len(inputs) * TOKENS  # padding doesn't count at the output projection either


@pytest.mark.parametrize("form", ["spelled", "five axes"])
def test_narrow_queries_and_keys_are_padded_before_any_softmax(form: str) -> None:
    program = trace(Shifted(form), (torch.randn(2, TOKENS, D),))
    wider, x = pad_uneven_heads(program), torch.randn(3, TOKENS, D)
    added = [
        node for node in wider.graph.nodes if operation(node) == "pad" and node.meta["val"].shape[-1] == D // HEADS
    ]
    assert len(added) == 1
    torch.testing.assert_close(wider(x), program.graph(x))


# Traced models that take a mask beside ids: their segments take it too, and fits leave padding out.

HALF = method_from_preset("best", mlp_sparsity=0.5, attention_sparsity=0.5, align_hidden=8, align_head=4)
SHORT, LONG = 18, 30
"""Lengths of padded texts; no text has more than SHORT tokens."""


def loaded(home: Path, length: int) -> tuple[Checkpoint, InputSet]:
    """Load an encoder and texts that are padded to this length."""
    if not (home / "hf").exists():
        encoders.write_encoder(home / "hf")
        words = " ".join(encoders.TEXTS).split()
        texts = [" ".join(words[at : at + 1 + at % 3]) for at in range(32)]
        (home / "texts.txt").write_text("\n".join(texts))
    checkpoint = load_transformers(home / "hf", {"length": length})
    return checkpoint, texts_for_model(checkpoint.model, home / "texts.txt")


def test_segments_with_a_mask_equal_the_program(tmp_path: Path) -> None:
    checkpoint, texts = loaded(tmp_path, SHORT)
    model, (tokens, *_) = checkpoint.model, texts.batches(5)
    own = tracing(model)
    at = [None, *(cut.node for cut in find_cuts(own.analysis)), None]
    assert [node.name for node in side_inputs(own.program)] == ["attention_mask"]
    x, mask = tensors_by_name(tokens).values()
    assert not bool(mask.all())
    with torch.no_grad():
        for before, after in pairwise(at):
            x = extract_between(own.program, before, after)(x, mask)
        torch.testing.assert_close(x, run_model(model, tokens))
    *blocks, pooling = own.segments
    assert len(blocks) == 4
    norm = "encoder.layer.1.output.LayerNorm"
    assert pooling.weights == {f"{norm}.weight", f"{norm}.bias"}


def looped(dense: Checkpoint, texts: InputSet) -> nn.Module:
    return reduce_traced(dense.model, texts, HALF, loop=Loop()).model


def made_sparse(dense: Checkpoint, texts: InputSet) -> nn.Module:
    kinds = Sparsifying(kinds={"head": Sparsity(kept=2, of=4), "mlp": Sparsity(kept=2, of=4)}, permute="none")
    return sparsify(dense.model, texts, kinds)[0]


def folded(dense: Checkpoint, texts: InputSet) -> nn.Module:
    how = method_from_preset("fold", mlp_sparsity=0.5, align_hidden=8)
    return reduce(dense.model, calibrate(dense, texts, batch_size=8), how, images=texts).model


@pytest.mark.slow("models")
@pytest.mark.parametrize("lever", [looped, made_sparse, folded])
def test_padding_does_not_change_the_fit(lever: Callable[[Checkpoint, InputSet], nn.Module], tmp_path: Path) -> None:
    answers = list[Tensor]()
    for length in (SHORT, LONG):
        dense, texts = loaded(tmp_path, length)
        reduced = lever(dense, texts)
        with torch.inference_mode():
            own, asked = (
                torch.cat([run_model(each, batch) for batch in texts.batches(8)]) for each in (reduced, dense.model)
            )
        assert float((own - asked).norm()) > 0.01 * float(asked.norm())
        answers.append(own)
    torch.testing.assert_close(answers[1], answers[0], rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_padded_tokens_have_no_weight(tmp_path: Path) -> None:
    """The residuals of layers are weighted by the mask."""
    checkpoint, _ = loaded(tmp_path, SHORT)
    model = checkpoint.model
    mask_BN = (torch.arange(SHORT) < torch.tensor([[SHORT], [4]])).float()
    for step in steps(model):
        assert isinstance(step, SegmentStep)
        assert isinstance(step.module, TokenRows)
        x_BNC: Tensor = torch.randn(2, SHORT, 32, generator=torch.Generator().manual_seed(0))
        if step.name == "encoder.layer.0.attention":
            x_BNC = torch.ones(2, 1, SHORT, dtype=torch.int64)
        pair = StreamPair(step.module(x_BNC, mask_BN), mask_BN, StreamState.of(x_BNC, mask_BN))
        for group in segment_sublayer(model, step).groups:
            (piece,) = group.linearised([pair])
            assert piece.weight_X is not None
            assert torch.equal(piece.weight_X, mask_BN.flatten())
            torch.testing.assert_close(piece.residual_XO, torch.zeros_like(piece.residual_XO), atol=1e-5, rtol=0.0)
