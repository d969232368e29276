"""Functions of torch's in a module: losses and the update of a parameter before each are torch's, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import distir

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false
F: Any = functional
T: Any = torch
BATCH, ROWS, WIDTH = 8, 6, 12
Part = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]
"""A term of the loss: of the module, its hidden values (BATCH, ROWS, WIDTH) and labels (BATCH, ROWS)."""


def square(f: Callable[[torch.Tensor], torch.Tensor]) -> Part:
    return lambda m, z, y: f(z * 2).square().mean()


def between(f: Callable[[torch.Tensor], torch.Tensor]) -> Part:
    """Of numbers from 0.1 to 0.9."""
    return lambda m, z, y: f(z.sigmoid() * 0.8 + 0.1).square().mean()


def against(f: Callable[..., torch.Tensor], **settings: Any) -> Part:
    return lambda m, z, y: f(z * 2, other(z), **settings)


def other(z: torch.Tensor) -> torch.Tensor:
    """A target that is no part of what is differentiated."""
    return z.detach().roll(1, 0).tanh()


def image(f: Callable[[torch.Tensor], torch.Tensor]) -> Part:
    return lambda m, z, y: f(z.reshape(BATCH, 2, ROWS, ROWS)).pow(3).mean()


def attention(**settings: Any) -> Part:
    return lambda m, z, y: F.scaled_dot_product_attention(*[z[:, None]] * 3, **settings).pow(3).mean()


def assigned(m: Any, z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = z.clone()
    z[:, 0] = 0.5
    z[:, 1:3] = z[:, 1:3] * 2
    return z.pow(3).mean()


def largest(f: Callable[[torch.Tensor], Any]) -> Part:
    return lambda m, z, y: f(z)[0].square().mean()


POINTS = [T.abs, T.ceil, T.cos, T.erf, T.erfc, T.exp, T.exp2, T.expm1, T.floor, T.frac, T.neg, T.relu, T.round, T.sin]
POINTS += [T.sign, T.tan, T.tanh, T.trunc, T.sinc, T.atan, T.asinh, T.sinh, T.cosh, F.relu6, F.elu, F.selu, F.celu]
POINTS += [F.gelu, F.silu, F.mish, F.softplus, F.softsign, F.tanhshrink, F.hardtanh, F.hardswish, F.leaky_relu]
POINTS += [F.logsigmoid, F.softshrink, F.hardshrink, F.softmin, F.glu, F.normalize]
OPEN = [T.log, T.log2, T.log10, T.log1p, T.rsqrt, T.sqrt, T.reciprocal, T.logit, T.acos, T.asin, T.atanh]
LOSSES = [F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss]
ALONG = [T.sum, T.mean, T.prod, T.amax, T.amin, T.std, T.var, T.logsumexp, T.nanmean, T.logcumsumexp, T.cumsum]

PARTS: Mapping[str, Mapping[str, Part]] = {
    "points": {
        **{f.__name__: square(f) for f in POINTS},
        **{f"{f.__name__}, open": between(f) for f in OPEN},
        "gelu by tanh": square(lambda z: F.gelu(z, approximate="tanh")),
        "threshold": square(lambda z: F.threshold(z, 0.1, 20.0)),
        "prelu": lambda m, z, y: F.prelu(z, m.some[:1]).square().mean(),
        "clamp": square(lambda z: z.clamp(-0.2, 0.3)),
        "fmod": square(lambda z: torch.fmod(z, 0.7)),
        "remainder": square(lambda z: torch.remainder(z, 0.7)),
        "floor division": square(lambda z: torch.div(z, 0.7, rounding_mode="floor") + z),
        "powers": lambda m, z, y: (z.sigmoid() + 0.1).pow(-1.5).mean() + (2**z).mean() + z.pow(0).mean(),
        "power": lambda m, z, y: torch.pow(z.sigmoid(), z).mean(),
        "maximum": square(lambda z: torch.maximum(z, z.roll(1, 1)) + torch.minimum(z, z.roll(2, 1))),
        "atan2": square(lambda z: torch.atan2(z, z.roll(1, 1) + 0.1)),
        "addcmul": square(lambda z: torch.addcmul(z, z, z.roll(1, 1), value=0.3)),
        "addcdiv": square(lambda z: torch.addcdiv(z, z, z.sigmoid() + 1, value=0.3)),
        "lerp": square(lambda z: torch.lerp(z, z.roll(1, 1), 0.3) + torch.lerp(z, z.roll(1, 1), z.sigmoid())),
        "logaddexp": square(lambda z: torch.logaddexp(z, z.roll(1, 1))),
        "xlogy": square(lambda z: torch.xlogy(z, z.sigmoid())),
        "nan_to_num": square(lambda z: z.sigmoid().log().nan_to_num()),
    },
    "losses": {
        **{f.__name__: against(f) for f in LOSSES},
        **{f"sum of {f.__name__}": against(f, reduction="sum") for f in LOSSES},
        "smooth_l1_loss, beta": against(F.smooth_l1_loss, beta=0.3),
        "huber_loss, delta": against(F.huber_loss, delta=0.3),
        "kl_div": lambda m, z, y: F.kl_div(z.log_softmax(-1), other(z).softmax(-1), reduction="batchmean"),
        "kl_div of logs": lambda m, z, y: F.kl_div(z.log_softmax(-1), other(z).log_softmax(-1), log_target=True),
        "bce": lambda m, z, y: F.binary_cross_entropy(z.sigmoid(), other(z).sigmoid(), weight=m.given),
        "bce of logits": lambda m, z, y: F.binary_cross_entropy_with_logits(z, other(z).sigmoid(), pos_weight=m.given),
        "nll": lambda m, z, y: F.nll_loss(z.log_softmax(-1).mT, y, weight=m.given, ignore_index=2),
        "classes": lambda m, z, y: F.cross_entropy(z.mT, y, weight=m.given, ignore_index=2),
        "shares": lambda m, z, y: F.cross_entropy(z.mT, other(z).softmax(-1).mT),
        "shares, smoothed": lambda m, z, y: F.cross_entropy(z[:, 0], other(z)[:, 0].softmax(-1), label_smoothing=0.2),
        "shares, weighted": lambda m, z, y: F.cross_entropy(z[:, 0], other(z)[:, 0].softmax(-1), weight=m.given),
        "sum of shares": lambda m, z, y: F.cross_entropy(z.mT, other(z).softmax(-1).mT, reduction="sum"),
        "poisson": against(F.poisson_nll_loss),
        "hinge": lambda m, z, y: F.hinge_embedding_loss(z, other(z).sign()),
        "ranking": lambda m, z, y: F.margin_ranking_loss(z[:, 0], z[:, 1], other(z)[:, 0].sign()),
        "triplet": lambda m, z, y: F.triplet_margin_loss(z[:, 0], z[:, 1], z[:, 2]),
        "soft margin": lambda m, z, y: F.soft_margin_loss(z, other(z).sign()),
        "margins": lambda m, z, y: F.multi_margin_loss(z[:, 0], y[:, 0]),
        "cosine": lambda m, z, y: F.cosine_embedding_loss(z[:, 0], z[:, 1], other(z)[:, 0, 0].sign()),
        "several labels": lambda m, z, y: F.multilabel_soft_margin_loss(z[:, 0], (other(z)[:, 0] > 0).double()),
        "focal": lambda m, z, y: ((1 - z.sigmoid()) ** 2 * -F.logsigmoid(z)).mean(),
    },
    "along dims": {
        **{f.__name__: square(lambda z, f=f: f(z, 1)) for f in ALONG},
        "largest": largest(lambda z: z.max(1)),
        "smallest": largest(lambda z: torch.aminmax(z, dim=1)),
        "var_mean": largest(lambda z: torch.var_mean(z, 1)),
        "of all": lambda m, z, y: z.max() * 2 + z.min() + z.norm() + z.std(unbiased=False),
        "norms": square(lambda z: z.norm(p=1, dim=-1) + torch.linalg.vector_norm(z, ord=3, dim=-1)),
        "norm of the largest": square(lambda z: torch.linalg.vector_norm(z, ord=float("inf"), dim=-1)),
        "softmax": square(lambda z: z.softmax(1) + z.log_softmax(-1)),
        "topk": largest(lambda z: z.topk(3, -1)),
        "sort": lambda m, z, y: (z.sort(-1)[0] * m.given).mean(),
        "layer_norm": lambda m, z, y: F.layer_norm(z, (ROWS, WIDTH)).pow(3).mean(),
        "group_norm": lambda m, z, y: F.group_norm(z, 3).pow(3).mean(),
        "instance_norm": lambda m, z, y: F.instance_norm(z).pow(3).mean(),
        "rms_norm": lambda m, z, y: F.rms_norm(z, (WIDTH,)).pow(3).mean(),
        "local_response_norm": lambda m, z, y: F.local_response_norm(z, 3).pow(3).mean(),
        "batch_norm": lambda m, z, y: F.batch_norm(z, m.given[:6], m.given[6:], eps=1e-3).pow(3).mean(),
        "cosine_similarity": lambda m, z, y: F.cosine_similarity(z, z.roll(1, 1), -1).mean(),
        "diff": lambda m, z, y: z.diff(dim=1).pow(3).mean() + torch.trapezoid(z, dim=-1).square().mean(),
    },
    "shapes and indices": {
        "gather": lambda m, z, y: z.gather(-1, y[..., None]).square().mean(),
        "scatter": lambda m, z, y: torch.zeros_like(z).scatter(-1, y[..., None], z[..., :1]).square().mean(),
        "scatter_add": lambda m, z, y: T.zeros_like(z).scatter_add(1, y[..., None] % 3 + 0 * z.long(), z).pow(3).mean(),
        "index_select": square(lambda z: z.index_select(1, torch.tensor([0, 2, 2]))),
        "index_add": square(lambda z: torch.zeros_like(z).index_add(1, torch.tensor([0, 2, 2]), z[:, :3])),
        "lists": lambda m, z, y: z[:, [0, 2, 2]].pow(3).mean() + z[:, [0, 1], [2, 3]].pow(3).mean(),
        "rows": lambda m, z, y: z[torch.arange(BATCH), y[:, 0] % ROWS].pow(3).mean(),
        "masks": lambda m, z, y: (
            z.masked_fill(z > 0.1, -2.0).square().mean() + torch.where(y[..., None] > 3, z, 2).mean()
        ),
        "assigned": assigned,
        "roll": lambda m, z, y: (z.roll((1, 2), (1, 2)) * m.given).square().mean(),
        "flip": lambda m, z, y: (z.flip(1).cumsum(1) * m.given).square().mean(),
        "triangles": lambda m, z, y: z.tril().square().mean() + z.triu(1).pow(3).mean(),
        "diagonals": square(lambda z: torch.diagonal(z, dim1=1, dim2=2)),
        "repeated": lambda m, z, y: z.repeat(1, 2, 1).pow(3).mean() + z.repeat_interleave(2, 1)[:, 1:7].square().mean(),
        "unfold": lambda m, z, y: z.unfold(1, 3, 2).pow(3).mean(),
        "padded": lambda m, z, y: (
            F.pad(z, (1, 2), value=0.5).pow(3).mean() + F.pad(z, (1, 2), mode="reflect").pow(3).mean()
        ),
        "parts": lambda m, z, y: (z.chunk(3, -1)[1] * z.split([3, 4, 5], -1)[1]).mean(),
        "steps": lambda m, z, y: z[:, ::2, 1:7:3].pow(3).mean(),
        "one_hot": lambda m, z, y: (F.one_hot(y, WIDTH) * z).pow(3).mean(),
        "in place": lambda m, z, y: z.clone().mul_(2).add_(1).pow(3).mean(),
    },
    "products and layers": {
        "einsum": square(lambda z: torch.einsum("bic,bjc->bij", z, z)),
        "baddbmm": square(lambda z: torch.baddbmm(z[:, :, :ROWS], z, z.mT, beta=0.3, alpha=0.7)),
        "addmm": lambda m, z, y: torch.addmm(z[:, 0], z[:, 1], m.square, beta=0.5, alpha=0.2).square().mean(),
        "tensordot": lambda m, z, y: torch.tensordot(z, m.square, 1).square().mean(),
        "bilinear": lambda m, z, y: F.bilinear(z, z, m.square[None].expand(3, -1, -1)).square().mean(),
        "cross": square(lambda z: torch.linalg.cross(z[..., :3], z[..., 3:6])),
        "vmap": lambda m, z, y: torch.vmap(lambda r: (r @ m.square).square().mean())(z).mean(),
        "recomputed": lambda m, z, y: T.utils.checkpoint.checkpoint(lambda x: x.tanh(), z, use_reentrant=False).mean(),
        "masked attention": lambda m, z, y: attention(attn_mask=y[:, None, None] != 11)(m, z, y),
        "causal attention": attention(is_causal=True, scale=0.7),
        "biased attention": lambda m, z, y: attention(attn_mask=z[:, None, :, :ROWS])(m, z, y),
        "MultiheadAttention": lambda m, z, y: m.heads(z, z, z, key_padding_mask=y == 3)[0].square().mean(),
        "LSTM": lambda m, z, y: m.lstm(z)[0].square().mean(),
        "GRU": lambda m, z, y: m.gru(z)[1].square().mean(),
        "weight_norm": lambda m, z, y: m.normed(z).square().mean(),
    },
    "images": {
        "conv1d": lambda m, z, y: F.conv1d(z, m.kernel1, padding=1, stride=2).pow(3).mean(),
        "conv2d": lambda m, z, y: image(lambda x: F.conv2d(x, m.kernel2, padding=2, dilation=2))(m, z, y),
        "transposed": lambda m, z, y: image(lambda x: F.conv_transpose2d(x, m.kernel2.mT.transpose(0, 1), stride=2))(
            m, z, y
        ),
        "max_pool": image(lambda x: F.max_pool2d(x, 3, 2, 1)),
        "max_pool, rounded up": image(lambda x: F.max_pool2d(x, 4, 3, ceil_mode=True)),
        "avg_pool": image(lambda x: F.avg_pool2d(x, 3, 2, 1)),
        "avg_pool without pads": image(lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False)),
        "avg_pool, own divisor": image(lambda x: F.avg_pool2d(x, 2, divisor_override=3)),
        "avg_pool, own divisor, pads": image(lambda x: F.avg_pool2d(x, 3, 2, 1, False, False, 5)),
        "avg_pool, rounded up": image(lambda x: F.avg_pool2d(x, 4, 3, ceil_mode=True)),
        "adaptive": image(lambda x: F.adaptive_avg_pool2d(x, 4)),
        "adaptive max": image(lambda x: F.adaptive_max_pool2d(x, 3)),
        "nearest": image(lambda x: F.interpolate(x, scale_factor=2)),
        "bilinear": image(lambda x: F.interpolate(x, size=(9, 9), mode="bilinear", align_corners=True)),
        "bicubic": image(lambda x: F.interpolate(x, size=(9, 9), mode="bicubic")),
        "area": image(lambda x: F.interpolate(x, size=(3, 3), mode="area")),
        "pixel_shuffle": lambda m, z, y: F.pixel_shuffle(z.reshape(BATCH, 8, 3, 3), 2).pow(3).mean(),
        "unfold": image(lambda x: F.unfold(x, 3, padding=1)),
    },
}


class Functions(nn.Module):
    """Each function after a parameter of its own; the loss is the sum of all terms."""

    given: torch.Tensor

    def __init__(self, parts: Mapping[str, Part]) -> None:
        super().__init__()
        self.parts = dict(parts)
        self.own = nn.ParameterList([torch.rand(WIDTH) + 0.5 for _ in parts])
        self.some, self.square = nn.Parameter(torch.rand(WIDTH) + 0.1), nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.kernel1, self.kernel2 = nn.Parameter(torch.randn(4, 6, 3)), nn.Parameter(torch.randn(3, 2, 3, 3))
        self.register_buffer("given", torch.rand(WIDTH) + 0.1)
        self.heads = nn.MultiheadAttention(WIDTH, 3, batch_first=True)
        self.lstm = nn.LSTM(WIDTH, 5, 2, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(WIDTH, 5, batch_first=True)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        terms = [f(self, x * w, y) for f, w in zip(self.parts.values(), self.own, strict=True)]
        return cast(torch.Tensor, sum(terms))


@pytest.mark.parametrize("kind", PARTS)
def test_functions(kind: str) -> None:
    torch.manual_seed(0)
    module = Functions(PARTS[kind]).double()
    batch = {"x": torch.randn(BATCH, ROWS, WIDTH).double(), "y": torch.randint(0, WIDTH, (BATCH, ROWS))}
    want = copy.deepcopy(module)
    loss = want(**batch)
    loss.backward()
    model = distir.load(module, batch, {"batch": BATCH}, loss="loss", optimizer=distir.SGD(lr=1.0))
    found = distir.run(model, data={k: x.numpy() for k, x in batch.items()}, steps=1, backend="numpy")
    assert abs(found.losses[0] - loss.item()) < 1e-10 * abs(loss.item())
    names = {f"own.{k}": name for k, name in enumerate(PARTS[kind])}
    for key, p in want.named_parameters():
        if p.grad is None:
            assert key not in found.weights, key
            continue
        update = found.weights.get(key, p.detach().numpy()) - p.detach().numpy()
        scale = max(1.0, np.abs(p.grad.numpy()).max())
        assert np.abs(update + p.grad.numpy()).max() < 1e-9 * scale, names.get(key, key)
