"""Statistics of weighted and unweighted tokens against float64 loops over inputs and tokens."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from calib.calibrate import ResumeFile, calibrate_sites
from calib.collect import Collector, Options, collect
from calib.inputs import Inputs
from calib.moments import ChannelMoments, HeadMoments, Moments
from calib.products import TokenWeights
from calib.sites import ChannelTaps, HeadTaps, Site, Tap
from calib.store import load_moments, save_moments
from calib.texts import open_texts
from tests import tiny_text
from tests.doubles import some
from tests.refusals import rejects

COUNT, LENGTH = 21, 11


def ids_and_masks(seed: int = 0) -> dict[str, Tensor]:
    """Draw random ids, and masks with holes that keep the first token."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, tiny_text.LETTERS, (COUNT, LENGTH), generator=generator)
    masks = (torch.rand(COUNT, LENGTH, generator=generator) < 0.6).long()
    masks[:, 0] = 1
    return {"input_ids": ids, "attention_mask": masks}


def mask_of(inputs: Inputs) -> Tensor:
    assert not isinstance(inputs, Tensor)
    return inputs["attention_mask"]


def sizes_of(inputs: Inputs) -> Tensor:
    """Return fractional weights by token id, 0 for masked tokens."""
    assert not isinstance(inputs, Tensor)
    return inputs["attention_mask"] * (0.3 + (inputs["input_ids"] % 5))


def collected(inputs: Mapping[str, Tensor], weights: TokenWeights | None, *, batch: int = 5, **kept: Tensor) -> Moments:
    encoder = tiny_text.model()
    parts = [{name: tensor[at : at + batch] for name, tensor in inputs.items()} for at in range(0, COUNT, batch)]
    options = Options(attention_system=not kept, kept=kept, token_weights=weights)
    moments = collect(encoder, tiny_text.sites_of(encoder), parts, device="cpu", options=options)
    return replace(moments, lineage={"model": "m"})


def activations(inputs: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Return q, k [B,H,N,D], z, x [B,N,C] and the head's input [B,1,F] of a float32 pass, as float64."""
    encoder = tiny_text.model()
    seen: dict[str, np.ndarray] = {}

    def keep(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
            seen[name] = change(out if name in "qk" else inputs[0]).double().numpy()

        return hook

    encoder.q.register_forward_hook(keep("q", tiny_text.heads))
    encoder.k.register_forward_hook(keep("k", tiny_text.heads))
    encoder.out.register_forward_hook(keep("z", lambda x: x))
    encoder.fc2.register_forward_hook(keep("x", lambda x: x))
    encoder.classes.register_forward_hook(keep("pooled", lambda x: x[:, None]))
    with torch.no_grad():
        encoder(*inputs.values())
    return seen


def channel_loops(x_BNF: np.ndarray, weight_BN: np.ndarray) -> dict[str, np.ndarray]:
    width = x_BNF.shape[2]
    sums = {"sum_F": np.zeros(width), "gram_FF": np.zeros((width, width)), "active_F": np.zeros(width)}
    for tokens, weights in zip(x_BNF, weight_BN, strict=True):
        for token, weight in zip(tokens, weights, strict=True):
            sums["sum_F"] += weight * token
            sums["gram_FF"] += weight * np.outer(token, token)
            sums["active_F"] += weight * (np.abs(token) > 1e-3)
    return sums | {"tokens": weight_BN.sum()}


def half_vector(matrix: np.ndarray) -> np.ndarray:
    return np.array([matrix[i, j] for i in range(len(matrix)) for j in range(i, len(matrix))])


def head_loop(q_ND: np.ndarray, k_ND: np.ndarray, weight_N: np.ndarray, keep: np.ndarray) -> dict[str, np.ndarray]:
    """Return one input's share of every statistic of a head, from its tokens with a weight above zero."""
    seen = np.flatnonzero(weight_N)
    dim = q_ND.shape[1]
    qq, kk, centred = (np.zeros((dim, dim)) for _ in range(3))
    mean = sum(weight_N[n] * k_ND[n] for n in seen) / weight_N.sum()
    for n in seen:
        qq += weight_N[n] * np.outer(q_ND[n], q_ND[n])
        kk += weight_N[n] * np.outer(k_ND[n], k_ND[n])
        centred += weight_N[n] * np.outer(k_ND[n] - mean, k_ND[n] - mean)
    drop = np.setdiff1d(np.arange(dim), keep)
    left_out = sum(weight_N[n] * weight_N[m] * (q_ND[n, drop] @ k_ND[m, drop]) ** 2 for n in seen for m in seen)
    return {
        "q_sum_HD": sum(weight_N[n] * q_ND[n] for n in seen),
        "k_sum_HD": sum(weight_N[n] * k_ND[n] for n in seen),
        "qq_HDD": qq,
        "kk_HDD": kk,
        "kk_centred_HDD": centred,
        "energy_HD": np.diag(qq) * np.diag(kk),
        "system_HTT": np.outer(half_vector(kk[np.ix_(keep, keep)]), half_vector(qq[np.ix_(keep, keep)])),
        "target_HKK": qq[np.ix_(keep, drop)] @ kk[np.ix_(drop, keep)],
        "target_energy_H": np.asarray(left_out),
    }


def head_loops(
    seen: Mapping[str, np.ndarray], weight_BN: np.ndarray, kept: Tensor | None = None
) -> dict[str, np.ndarray]:
    sums = channel_loops(seen["z"], weight_BN)
    heads = []
    for head in range(tiny_text.HEADS):
        keep = np.arange(tiny_text.DIM) if kept is None else kept[head].numpy()
        each = [head_loop(seen["q"][b, head], seen["k"][b, head], w, keep) for b, w in enumerate(weight_BN)]
        heads.append({name: np.sum([one[name] for one in each], 0) for name in each[0]})
    by_head = {name: np.stack([head[name] for head in heads]) for name in heads[0]}
    return by_head | {"z_sum_C": sums["sum_F"], "zz_CC": sums["gram_FF"], "tokens": sums["tokens"]}


def require_equal(site: HeadMoments | ChannelMoments, expected: Mapping[str, np.ndarray], limit: float) -> None:
    for name in type(site).__slots__:
        value = getattr(site, name)
        if isinstance(value, Tensor) and value.is_floating_point():
            difference = np.linalg.norm(value.numpy() - expected[name])
            assert difference <= limit * np.linalg.norm(expected[name]), name
    assert site.tokens == pytest.approx(float(expected["tokens"]), rel=1e-12)


def counted(weights: TokenWeights | None, inputs: Inputs) -> np.ndarray:
    weight_BN = torch.ones(COUNT, LENGTH) if weights is None else weights(inputs)
    assert isinstance(weight_BN, Tensor)
    return weight_BN.double().numpy()


@pytest.mark.parametrize("weights", [None, mask_of, sizes_of])
def test_every_statistic_equals_float64_loops(weights: TokenWeights | None) -> None:
    inputs = ids_and_masks()
    seen, weight_BN = activations(inputs), counted(weights, inputs)
    moments = collected(inputs, weights).sites
    attention, mlp, head = moments["attn"], moments["mlp"], moments["head"]
    assert isinstance(attention, HeadMoments)
    assert isinstance(mlp, ChannelMoments)
    assert isinstance(head, ChannelMoments)
    require_equal(attention, head_loops(seen, weight_BN), 1e-6)
    require_equal(mlp, channel_loops(seen["x"], weight_BN), 1e-6)
    require_equal(head, channel_loops(seen["pooled"], np.ones((COUNT, 1))), 1e-6)
    assert attention.images == COUNT
    assert isinstance(mlp.tokens, int) == (weights is not sizes_of)


@pytest.mark.parametrize("weights", [None, sizes_of])
def test_restricted_system_equals_float64_loops(weights: TokenWeights | None) -> None:
    inputs, kept = ids_and_masks(1), torch.tensor([[0, 2, 5], [1, 3, 4]])
    attention = collected(inputs, weights, attn=kept).sites["attn"]
    assert isinstance(attention, HeadMoments)
    require_equal(attention, head_loops(activations(inputs), counted(weights, inputs), kept), 1e-6)
    assert torch.equal(some(attention.kept_HK), kept)


def moments_equal(a: Moments, b: Moments, limit: float) -> None:
    for name, site in a.sites.items():
        other = b.sites[name]
        assert isinstance(site, HeadMoments | ChannelMoments)
        require_equal(site, {f: np.asarray(getattr(other, f)) for f in type(other).__slots__}, limit)


def test_weights_of_one_change_nothing() -> None:
    inputs = ids_and_masks()
    without = collected(inputs, None)
    for ones in (torch.ones(COUNT, LENGTH), torch.ones(COUNT, LENGTH, dtype=torch.bool)):
        moments_equal(collected(inputs, lambda piece, ones=ones: ones[: len(mask_of(piece))]), without, 1e-7)  # type: ignore[misc]
    moments_equal(collected(inputs, lambda _: None), without, 0.0)


class Passing(nn.Module):
    """A model whose sites have its input tokens [B,N,4] as q, k, z and x."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.last = nn.Identity(), nn.Linear(4, 4)

    def forward(self, x_BN4: Tensor, weight_BN: Tensor) -> Tensor:
        out: Tensor = self.last(self.tokens(x_BN4))
        return out

    def sites(self) -> list[Site]:
        tap = Tap(module=self.tokens, take=lambda out: out[:, None])
        heads = HeadTaps(name="attn", queries=tap, keys=tap, output=self.last)
        return [heads, ChannelTaps(name="mlp", output=self.last)]


def moments_of_tokens(x_BN4: Tensor, weight_BN: Tensor) -> Moments:
    def token_weights(piece: Inputs) -> Tensor | None:
        return None if isinstance(piece, Tensor) else piece["weights"]

    model, inputs = Passing(), {"x": x_BN4, "weights": weight_BN}
    options = Options(attention_system=True, token_weights=token_weights)
    return collect(model, model.sites(), [inputs], device="cpu", options=options)


@pytest.mark.parametrize("garbage", [1e30, float("inf"), float("nan")])
def test_zero_weight_token_has_no_effect(garbage: float) -> None:
    x_BN4 = torch.randn(9, 6, 4, generator=torch.Generator().manual_seed(0))
    weight_BN = torch.ones(9, 6)
    weight_BN[::2, 4:] = 0.0
    clean = moments_of_tokens(x_BN4, weight_BN)
    spoilt_BN4 = x_BN4.masked_fill(weight_BN[..., None] == 0, garbage)
    moments_equal(moments_of_tokens(spoilt_BN4, weight_BN), clean, 0.0)


def test_single_token_has_zero_centred_keys() -> None:
    """Centred keys are zero although the keys are large, and other sums are of rank one per input."""
    x_BN4 = 1000.0 + torch.randn(5, 6, 4, generator=torch.Generator().manual_seed(0))
    weight_BN = torch.zeros(5, 6)
    weight_BN[:, 2] = 0.3
    attention = moments_of_tokens(x_BN4, weight_BN).sites["attn"]
    assert isinstance(attention, HeadMoments)
    one_B4 = x_BN4[:, 2].double()
    weight = float(torch.tensor(0.3))
    assert attention.tokens == pytest.approx(5 * weight)
    assert float(attention.kk_centred_HDD.abs().max()) < 1e-7 * float(attention.kk_HDD.abs().max())
    assert torch.allclose(attention.kk_HDD[0], weight * one_B4.T @ one_B4, rtol=1e-6)


def test_zero_weight_input_adds_nothing() -> None:
    x_BN4 = torch.randn(4, 6, 4, generator=torch.Generator().manual_seed(0))
    weight_BN = torch.ones(4, 6)
    weight_BN[1] = 0.0
    with_it, without = moments_of_tokens(x_BN4, weight_BN), moments_of_tokens(x_BN4[[0, 2, 3]], weight_BN[[0, 2, 3]])
    moments_equal(with_it, without, 1e-6)
    rejects("attn: the token weights of all 4 inputs are zero", moments_of_tokens, x_BN4, torch.zeros(4, 6))


@pytest.mark.parametrize(
    ("weight_BN", "message"),
    [
        (torch.ones(3, 5), r"attn: q has 6 tokens, the token weights are for 5; give one weight a token"),
        (torch.ones(3, 6, 1), r"got torch.float32 \[3, 6, 1\], expected numbers \[3, tokens\]"),
        (torch.ones(3, 0), r"got torch.float32 \[3, 0\]"),
        (torch.full((3, 6), -1.0), "from -1 to -1, expected finite ones of 0 or more"),
        (torch.full((3, 6), float("nan")), "expected finite ones"),
        (torch.full((3, 6), float("inf")), "expected finite ones"),
    ],
)
def test_malformed_weights_are_refused(weight_BN: Tensor, message: str) -> None:
    rejects(message, moments_of_tokens, torch.zeros(3, 6, 4), weight_BN)


def test_weighted_moments_round_trip_and_continue(tmp_path: Path) -> None:
    (tmp_path / "documents.txt").write_text("\n".join(f"number {number}" * (number % 3 + 1) for number in range(9)))
    encoder, state = tiny_text.model(), ResumeFile(path=tmp_path / "state.safetensors", every=4)
    options = Options(attention_system=True, token_weights=sizes_of)

    def run(options: Options, stop_at: int | None = None) -> Moments:
        def progress(done: int) -> None:
            if done == stop_at:
                raise KeyboardInterrupt

        texts = open_texts(tmp_path / "documents.txt", encode=tiny_text.encode_to(12))
        return calibrate_sites(
            Collector(encoder, tiny_text.sites_of(encoder), device="cpu", options=options), texts, batch_size=2,
            lineage={"model": "m"}, checkpoint=state, progress=progress,
        )  # fmt: skip

    with pytest.raises(KeyboardInterrupt):
        run(options, stop_at=6)
    rejects("checkpoint of another run: options was", run, replace(options, token_weights=None))
    resumed = run(options)
    state.clear()
    moments_equal(resumed, run(options), 0.0)
    save_moments(resumed, tmp_path / "m.safetensors")
    moments_equal(load_moments(tmp_path / "m.safetensors"), resumed, 0.0)
    assert not float(resumed.sites["mlp"].tokens).is_integer()
