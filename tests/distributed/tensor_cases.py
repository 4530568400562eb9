"""Table of random cases of a `DomainTensor`: the same function of torch on a sharded tensor and on the whole one."""

import contextlib
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from longshard.domain.domain import Axis, Domain
from longshard.domain.tensor import DomainTensor
from tests.distributed.domain_cases import DomainCase, layout_of, local, on_shards

Function = Callable[..., object]
SHAPE = (3, 4, 8, 7)
BATCH_AND_SPACE, ROW, COLUMN, ALL = (0, 2, 3), (1, 1, 8, 1), (7,), (0, 1, 2, 3)
MATRIX, HEADS = (5, 7), (2, 2, 9, 4)


def in_other_layout(x: torch.Tensor, domain: Domain, rng: random.Random, dims: Sequence[int]) -> DomainTensor:
    """Return the whole x as a tensor sharded in some dimensions of the domain, in other layouts."""
    axes = {d: axis for d, axis in domain.axes.items() if d in dims and d < x.ndim and x.shape[d] > 1}
    other = Domain({d: Axis(layout_of(rng, x.shape[d], axis.degree), axis.group) for d, axis in axes.items()})
    return DomainTensor(local(x, other), other)


def case(
    name: str,
    function: Function,
    *parameters: tuple[int, ...],
    shape: tuple[int, ...] = SHAPE,
    sharded: tuple[int, ...] = BATCH_AND_SPACE,
    others: Sequence[int] = (),
    ties: bool = False,
) -> DomainCase:
    """others: the dimensions in which the parameters are sharded too, if x is, in layouts of their own."""

    def split(x: torch.Tensor, domain: Domain, *operands: torch.Tensor) -> tuple[torch.Tensor, Domain]:
        rng = random.Random(f"{name} {domain.axes.keys()}")
        if others:
            operands = tuple(in_other_layout(p, domain, rng, others) for p in operands)
        return on_shards(function)(x, domain, *operands)

    return DomainCase(name, shape, sharded, function, split, parameters, ties=ties)


def in_place(x, y):
    x = x * 1
    alias = x
    x += y
    alias *= 0.5
    x.sub_(y * 2).clamp_(min=-1.5)
    return F.relu(alias, inplace=True) + x


def merged_space(x):
    return (x.flatten(2).transpose(1, 2) * 2).permute(2, 0, 1)


def windows(x, size):
    """As Swin's: windows of rows and columns, and back; shards may end inside a window."""
    n, c, h, w = x.shape
    parts = x.permute(0, 2, 3, 1).view(n, h // size, size, w // size, size, c)
    parts = parts.permute(0, 1, 3, 2, 4, 5).reshape(-1, size * size, c).softmax(1)
    seen = parts.view(n, -1, size * size, c) * torch.arange(1.0, 1 + h // size * (w // size)).view(-1, 1, 1)
    parts = seen.view(n, h // size, w // size, size, size, c).permute(0, 1, 3, 2, 4, 5)
    return parts.reshape(n, h, w, c)


def assigned(x, y):
    z = x * 1
    z[:, 1:3, 2:-1] = y[:, :2, 2:-1] * 2
    z[..., -1] = 0.5
    z[:, :, 3] = y[:, :, 4].sin()
    z[:, 0, ::3, 1:] = y[0, 0, 1, 1:]
    whole = torch.zeros(x.shape, dtype=x.dtype)
    whole[:, :, :4] = (x * y)[:, :, 2:6]
    made = x.new_zeros(size=x.shape) + x.new_full((7,), 2.0) * x.new_ones(3, 1, 1, 1)
    made = made + x.new_full(x.shape, fill_value=1.0) + x.new_full(fill_value=1.0, size=(7,))
    made[:, 2:] = x[:, :2]
    kept = made * 1
    kept.copy_(made * x).masked_fill_(x > 1, 0.0)
    kept[:, 3].clone().fill_(2)
    return z * whole + kept


def frequencies(x):
    """A layer of a Fourier neural operator: it mixes few frequencies, and sets the others to zero."""
    seen = torch.fft.rfft2(x, norm="ortho")
    mixed = torch.zeros(*seen.shape, dtype=torch.complex128)
    mixed[:, :, :3, :2] = seen[:, :, :3, :2] * (1 + 2j)
    mixed[:, :, -3:, :2] = torch.einsum("bchw,cd->bdhw", seen[:, :, -3:, :2], torch.eye(4, dtype=seen.dtype) * 2j)
    return torch.fft.irfft2(mixed, s=x.shape[-2:], norm="ortho") * x


def transforms(x):
    seen = torch.fft.fftn(x, dim=(2, 3)).abs() + torch.fft.ifft(x, dim=2).real + torch.fft.fft2(x, (8, 7)).imag
    seen = seen + torch.fft.fftshift(torch.fft.fft(x, dim=3).real, dim=(2, 3)) + torch.fft.irfft(x, 8, 2)
    back = torch.fft.ifft2(torch.fft.fft2(torch.complex(x, x.sin()))).real
    short = torch.fft.rfft(x, dim=2).abs().sum(2, keepdim=True) + torch.fft.irfftn(x, (6, 4)).mean((2, 3), keepdim=True)
    return seen * short + torch.view_as_real(torch.fft.rfftn(x)).sum(-1).sum() + back


def best(x):
    values, places = x.topk(3, 2)
    low = x.topk(2, dim=-1, largest=False, sorted=True).values
    least, at = x.min(-2)
    return values.sum(2) + places.sum(2) + x.max(2).values * x.argmax(2) + least * at + low.sum(-1).mean(-1)[..., None]


def ordered(x):
    values, places = x.sort(2)
    y = values * places + torch.sort(x, descending=True, dim=-1).values + x.argsort(2)
    y = y + x.cumprod(2) + x.cummax(2).values + torch.logcumsumexp(x, 3)
    return y + x.median(2).values.unsqueeze(2) + x.kthvalue(2, 2, True).values + x.median(dim=-1, keepdim=True)[0]


def along_rows(x):
    y = x.softmax(2) + F.log_softmax(x, dim=2) + x.logsumexp((2, 3), keepdim=True) + F.softmax(x, -1, dtype=x.dtype)
    return y + x.logsumexp(2).unsqueeze(2) + F.normalize(x, dim=2) * F.normalize(x, 1.0, -1)


def along_all_pieces(x):
    a, b, c = x.chunk(3, 2)
    d, e = torch.split(x, [3, 5], dim=2)
    parts = [x.diff(dim=2), x.narrow(2, 1, 4), F.glu(x, 2), *x.tensor_split(3, 2), a, b, c, d, e]
    rows = [x.select(2, 3), *x.unbind(2)[2:4], x.diff(2, 3).sum(3).sum(2, keepdim=True)]
    return sum((n + 1) * part.cos().sum(2) for n, part in enumerate(parts)) + sum(r.sum(-1, keepdim=True) for r in rows)


def shuffles(x):
    y = F.pixel_shuffle(x, 2) * 2  # (3, 1, 16, 14)
    y = F.pixel_unshuffle(y, 2) * x
    z = F.channel_shuffle(y, 2) + F.prelu(y, torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=x.dtype))
    z = (
        z.repeat(1, 2, 2, 1)[:, 2:6, 3:11]
        + z.repeat_interleave(3, 2)[:, :, 5:13] * z.repeat_interleave(2, -1)[..., 1:8]
    )
    columns = F.unfold(x, (3, 2), dilation=(1, 2), padding=(1, 0), stride=(2, 1))  # (3, 24, 4 * 5)
    z = z + columns.unflatten(2, (4, 5)).sum(1, keepdim=True).mean((2, 3), keepdim=True) * x
    z = z + F.unfold(x, 2, stride=2).sin().sum((1, 2))[:, None, None, None]
    return z + x.unfold(2, 3, 2).sum((2, 4)).unsqueeze(2) + x.unfold(-1, 2, 1).prod(-1).mean(-1, keepdim=True)


def heads_with_masks(x, y, *parameters):
    weight, bias, out, mask = parameters
    arguments = (6, 2, weight, bias, None, None, False, 0.0, out, None)
    padded = (torch.arange(7).expand(3, 7) + torch.arange(3).view(3, 1)) % 4 == 1
    how = {"key_padding_mask": padded, "attn_mask": mask}
    a, seen = F.multi_head_attention_forward(x, y, y.sin(), *arguments, **how)
    hidden = (mask > 0.3) & (mask < mask.amax(-1, keepdim=True))  # not all keys of a query
    b, each = F.multi_head_attention_forward(x, y, y, *arguments, average_attn_weights=False, attn_mask=hidden)
    c, _ = F.multi_head_attention_forward(x, y, y, *arguments, need_weights=False, **how)
    return (
        a
        + b.nan_to_num()
        + c
        + (seen.movedim(1, 0) @ y.movedim(1, 0).cos().sum(0))
        + each.nan_to_num().sum((1, 3)).mT[..., None]
    )


def causal_encoder(x):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(9, dtype=torch.float64)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)(x, mask, is_causal=True)


def edges(x, y, targets):
    """A layer of a graph with 11 edges; each rank has some of the messages, or all are whole. targets: (11, 1)."""
    to = targets.abs().mul(1.7).long().squeeze(-1).clamp(max=8)
    back = (8 - to).abs()
    messages = x[to] * y + x[back].sin() + x.index_select(0, back).cos()
    out = torch.zeros_like(x).index_add(0, to, messages) + x.index_add(0, back, y, alpha=0.5)
    out = out.scatter_add(0, to.unsqueeze(-1).expand(-1, 4), messages * 2)
    into = to.unsqueeze(-1).expand(-1, 4)
    for reduce in ("mean", "amax", "amin", "sum"):
        out = out + (x * 2).scatter_reduce(0, into, messages, reduce) * targets.amax()
        out = out + (x * 3).scatter_reduce(0, into, y.sin(), reduce, include_self=False)
    out = out + F.embedding(to, torch.arange(36.0, dtype=x.dtype).view(9, 4)).sum() + F.one_hot(to, 9).sum()
    neighbours = torch.stack([to, back, to], 1)  # (11, 3)
    sums = torch.zeros(9, 4, dtype=x.dtype).index_add_(0, to, x[neighbours].amax(1))
    sums = sums + torch.zeros(9, 4, dtype=x.dtype).scatter_reduce(0, into, messages, "amax")
    return (
        out * 2
        + sums * targets.mean()
        + x[None, :, 1:3, None][:, (torch.arange(9) * 2) % 9 - 9].sum((0, 2, 3))[:, None]
    )


def equal_edges(x, y):
    to = torch.arange(11) * 5 % 9
    into = to.unsqueeze(-1).expand(-1, 4)
    return x.scatter_reduce(0, into, y, "amax") + (x * 2).scatter_reduce(0, into, y.clamp(max=1), "amin")


def products(x, y, targets):
    """Products over the edges of a graph; some of them, and some factors, are equal or zero."""
    to = targets.abs().mul(1.7).long().squeeze(-1).clamp(max=8)
    into = to.unsqueeze(-1).expand(-1, 4)
    out = x.scatter_reduce(0, into, y, "prod") * (x.sin().scatter_reduce(0, into, y, "prod", include_self=False) + 1)
    few = (torch.arange(11) * 5 % 9).unsqueeze(-1).expand(-1, 4)
    out = out + x.cos().scatter_reduce(0, few, y + 0.5, "prod") * targets.mean()
    return out + torch.ones(9, 4, dtype=x.dtype).scatter_reduce(0, into, x[to] * y, "prod")


def crossed(x):
    """Numbers that are sharded over the ranks that share the other dimension of the rows."""
    numbers = x.T[:, 0].detach().abs().mul(2).long().clamp(max=5)
    y = x.index_add(0, numbers, x.sin()) + x.index_select(0, numbers) * x[numbers].cos()
    return (
        y
        + torch.zeros_like(x).index_add_(1, numbers, x)
        + torch.cat([x, x.T], 0)[3:9]
        + torch.cat([x.T, x], 1)[:, 4:10]
    )


def sampled(x, grid):
    """Fields at the places where the wind comes from; some are beyond the borders."""
    y = F.grid_sample(x, grid.tanh() * 1.3, align_corners=False)
    y = y + F.grid_sample(x, grid[..., :1] * 0.1 + grid.sin(), "bicubic", "border", align_corners=True)
    y = y + F.grid_sample(x, grid.sin() * 0.3, "bicubic", align_corners=False)  # reads rows of the middle alone
    return y * F.grid_sample(x, grid.cos(), "nearest", align_corners=False)


def points_of(x):
    """Values at places of several dimensions, negative ones too, also by sharded numbers and for a line of channels."""
    rows, columns = torch.tensor([[0, 5, -1], [3, 3, 6]]), torch.tensor([1, -2, 4])
    own = x[:, 0].sum(-1).detach().sin().mul(3).long()  # (batch, rows)
    y = x[:, :, rows, columns].sum((-1, -2)) + x[..., -3:, [2, 0], [1, 1]].sum(-1).sum(-1, keepdim=True)
    return y * x[:, :, own, own.abs()].cos().sum((2, 3))


def apart(x):
    """Index dimensions that are not adjacent; torch puts the dimensions of the result first."""
    rows, columns = torch.tensor([[0, 5, -1], [3, 3, 6]]), torch.tensor([1, -2, 4])
    own = x[:, 0].sum(-1).detach().sin().mul(3).long()  # (batch, rows)
    y = x[own.abs() % 2, :, own].cos().sum((2, 3)) + x[own, None, ..., own.abs()].sin().sum((2, 3, 4))
    few = rows.clamp(max=2)
    near = x[1:, few, :, columns].sum((0, 1, 2)) + x[[0, 2], ..., [1, 1]].sum((0, 1)) + x[few, 2, columns][0, 1, :1]
    return y[..., None] * near + x[:, columns, None, columns].sum() + x[..., few, 1:3, columns].mean(1).sum()


def taken(x, y):
    order = y.argsort(2)
    z = torch.gather(x, 2, order) + x.take_along_dim(order, 2) * y
    return z + x.gather(1, (y > 0).long()) + x[:, [0, 2, 1, 3]][..., torch.tensor([0, 2, 1]), :].sum(2, keepdim=True)


def shown(x, y):
    return torch.cat([x[x > 0.2], y[x.sum((2, 3)) > 0].flatten(), torch.masked_select(y, x[:, :1] < 0.1)])


def shown_rows(x, y):
    rows = (x * y)[(x > y).flatten(2).any(2)]
    return (rows * rows.shape[0]).sum(0)


def changed_where_shown(x, y):
    z = x * 2
    z[y > 0.5] = -1.0
    z[x.sum((2, 3)) > 0] = y[0, 0] * 3
    z[(x > y).flatten(1).any(1)] = (y * x)[(x > y).flatten(1).any(1)].sin()
    return z


def equation(x, w, b):
    """A loss of a partial differential equation: derivatives of a network's output by its inputs and weights."""
    u = F.conv2d(F.group_norm(x, 2), w / 8, b, padding=1).tanh() * x.sin().mean(2, True) + x.diff(dim=2).square().mean()
    u = u + F.avg_pool2d(u, 3, 1, 1) * u.roll(1, 2) + (u @ u.mT).softmax(-1)[..., :7] + x.logsumexp(2, True)
    (slope,) = torch.autograd.grad(u.sin().mean(), x, create_graph=True)
    (second, weight_slope) = torch.autograd.grad(slope, [x, w], slope.detach().cos(), create_graph=True)
    return (slope.square() * u).sum() + (1 + second.square().sum()) * (1 + weight_slope.square().sum())


def sharded_mask(q, k, v, bias):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias * 2)


def attended(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.7)


def masked(q, k, v, bias):
    seen = F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(9, 9, dtype=torch.bool).tril(2))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias) + seen


def latents(x, queries):
    return attended(queries, x, x.sin())


def sums(x, y, z):
    return x.mT @ y + y.T @ z


def vectors(x, y, z):
    return (y @ x) * (x @ z).sum() + y @ y


def by_hand(q, k, v):
    return (q @ k.transpose(-2, -1) / 2).softmax(-1) @ v


def equations(x, y, z):
    mixed = torch.einsum("bchw,bhk,wc->kb", x, y, z)  # sums over ranks, over what both have, and over one alone
    patches = torch.einsum("...hw, wc", x, z).sum() + torch.einsum("bchw->cbwh", x)
    return torch.einsum("kb,cbwh->chwk", [mixed, patches])


def labelled(x, y, reduction):
    labels = (torch.arange(3 * 8 * 7).view(3, 8, 7) * 5 % 7 - 3).clamp(min=-1)  # 0 to 3, and -1, which is none
    how = {"weight": torch.tensor([0.5, 1, 2, 0.1], dtype=torch.float64), "reduction": reduction}
    loss = F.cross_entropy(x, labels, ignore_index=-1, label_smoothing=0.1, **how)
    loss = loss + F.nll_loss(x.log_softmax(1), labels, ignore_index=-1, **how)
    return loss + F.cross_entropy(x, y.softmax(1), **how)


def weighted(x, y, w, reduction):
    how = {"reduction": reduction}
    each = F.mse_loss(x, y, weight=w.sigmoid(), **how) + F.huber_loss(x, y, weight=w.sin(), **how)
    each = each + F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), w.detach().cos(), **how)
    each = each + F.binary_cross_entropy_with_logits(x, y.sigmoid(), w.detach().sin().abs(), **how)
    return each + F.kl_div(x, y.sigmoid(), **how)


def numbered(x):
    y = x[:, :, 0] * x[:, :, -1] + x[:, :, 1::3].sum(2) + x[0, 1:2, 4].cos()
    return y + x[..., 2::2].sin().sum((-1, -2))[..., None]


def with_tokens(x, tokens, other):
    y = torch.cat([tokens, x, other, x * 2], 2) * 3
    return torch.cat([y[:, :, 2:10].sin(), y[:, :, :1]], 2) + y[:, :, -9:]


def grouped(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def broadcast(q, k, v, w):
    """Queries, keys and values of other leading sizes, heads that share keys, and causality of other lengths."""
    y = attended(q[:1], k, v[:, :, :, :3]) + attended(q, k[1], v[0, 1])[..., 1:]
    y = y + F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True)[..., 1:]
    y = (
        y
        + F.scaled_dot_product_attention(q, k, v[:, :1], enable_gqa=True)[..., :3]
        + attended(q[0], w, w.sin())[..., 1:]
    )
    for keys, values in ((k[:, :, :5], v[:, :, 1:6]), (torch.cat([k, k * 2], 2), torch.cat([v, v.sin()], 2)), (w, w)):
        y = y + F.scaled_dot_product_attention(q, keys, values, is_causal=True)[..., 1:]
    return y.repeat(1, 1, 1, 2)


def multi_head_with_extras(x, y, *parameters):
    weight, bias, out, mask, key_bias, value_bias, keys, values = parameters
    z = torch.cat([x, x[:2].sin()]) * y
    causal = torch.ones(5, 7, dtype=torch.bool).triu(1)
    padded = torch.arange(7).expand(3, 7) % 4 == torch.arange(3)[:, None]
    a, seen = F.multi_head_attention_forward(
        x,
        y,
        y.sin(),
        6,
        2,
        weight,
        bias,
        key_bias,
        value_bias,
        True,
        0.0,
        out,
        None,
        attn_mask=mask,
        key_padding_mask=padded,
    )
    b, _ = F.multi_head_attention_forward(
        x,
        z,
        y.sin() * z,
        6,
        2,
        weight,
        bias,
        key_bias,
        value_bias,
        False,
        0.0,
        out,
        None,
        True,
        None,
        False,
        causal,
        is_causal=True,
    )
    c, _ = F.multi_head_attention_forward(
        x, y, y, 6, 2, weight, bias, None, None, True, 0.0, out, None, static_k=keys, static_v=values
    )
    return a * seen.sum(-1).mean(1)[:, None] + b + c * seen[..., -2:].sum(-1).mT[..., None]


def multi_head(x, y, *parameters):
    weight, bias, out = parameters
    arguments = (6, 2, weight, bias, None, None, False, 0.0, out, None)
    return F.multi_head_attention_forward(x, y, y.sin(), *arguments, need_weights=False)[0]


def encoder(x):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True, dtype=torch.float64)
    return layer(x)


def separate(x, y):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = nn.MultiheadAttention(6, 2, bias=False, kdim=5, vdim=5, dtype=torch.float64).eval()
    return module(x, y, y, need_weights=False)[0]


def pieces(x):
    a, b = x.chunk(2, 1)
    c, d = torch.split(x, [1, 3], dim=1)
    return torch.cat([b, d, a, c, *x.unbind(1)[0].unsqueeze(1).tensor_split(1, 1)], 1)


class Mixed(nn.Module):
    """Two results and a number of three inputs."""

    def forward(self, x, y, w, times):
        return x * w * times, F.conv2d(y, torch.ones(4, 4, 3, 3, dtype=y.dtype), padding=1), times


def hooked(x, y, w):
    """Hooks that see and change gradients of a module, of one in it whose result is no tuple, and of all modules."""
    module, norm = Mixed(), nn.GroupNorm(2, 4, dtype=torch.float64)
    module.register_full_backward_pre_hook(lambda _, grads: (grads[0] * grads[1].std(), grads[1].sin(), grads[2]))
    module.register_full_backward_hook(lambda _, into, out: (into[0] * out[0].amax(), into[1], into[2] * 3, into[3]))
    module.register_full_backward_hook(lambda _, into, out: (into[0][:, :, torch.arange(8)], *into[1:]))
    norm.register_full_backward_hook(lambda _, into, out: (into[0] * (out[0] - into[0]).std(),))
    global_hook = nn.modules.module.register_module_full_backward_hook(
        lambda *args: None if args[2][0] is None else tuple(None if grad is None else grad * 1.5 for grad in args[1])
    )
    with contextlib.closing(SimpleNamespace(close=global_hook.remove)):
        a, b, times = module(x.sin(), x * y, w * 1, 3)
        return a * times + norm(b) + F.conv2d(norm(x), torch.ones(4, 4, 1, 3, dtype=x.dtype), padding="same")


ELEMENTWISE = [
    case("hooks of modules", hooked, SHAPE, (4, 1, 1), others=(2, 3)),
    case("hooks of modules beside a plain tensor", hooked, SHAPE, (4, 1, 1)),
    case("x + row", lambda x, y: x + y, ROW),
    case("column - x", lambda x, y: y - x, COLUMN),
    case("whole operand", lambda x, y: torch.lerp(x, y, 0.3), SHAPE),
    case("another layout", lambda x, y: x * y, SHAPE, others=(2, 3)),
    case("a layout in one dimension", lambda x, y: torch.where(y > 0, x, y), SHAPE, others=(3,)),
    case("a smaller tensor, sharded", lambda x, y: x * y.exp(), (3, 1, 1, 7), others=(0, 3)),
    case("more dimensions than x", lambda x, y: y - x, SHAPE, shape=(8, 7), sharded=(0, 1)),
    case("scalars", lambda x: 2 - x * 3 + x / 2 - 1.5 / (x.abs() + 1) + 2**x),
    case(
        "keywords",
        lambda x, y: torch.addcmul(input=x, tensor1=y, tensor2=x, value=0.5).clamp(min=-0.5).clamp(max=y),
        SHAPE,
    ),
    case("in place", in_place, SHAPE, others=(2,)),
    case(
        "activations", lambda x: F.silu(x, inplace=False) + F.gelu(x) + F.logsigmoid(x) + torch.tanh(-x) + x.sigmoid()
    ),
    case("masks", lambda x, y: x.masked_fill((y > 0) & ~(y > 1), 0.25).double() * y, SHAPE, others=(0, 2, 3)),
    case("types", lambda x, y: (x > 0).type_as(y) * x + y.type_as(x) + torch.zeros_like(x), SHAPE),
]
VIEWS = [
    case("view and back", lambda x: x.view(3, 2, 2, 8, 7).reshape(3, 4, 8, 7) * 2),
    case("flatten and unflatten", lambda x: x.flatten(1, 2).unflatten(1, (-1, 8)), sharded=(0, 3)),
    case("merged behind a sharded one", lambda x: x.permute(0, 2, 3, 1).reshape(3, 8, -1), sharded=(0, 2)),
    case("split of a batch", lambda x: x.reshape(3, 1, 2, 2, 56).squeeze(1), sharded=(0,)),
    case("merged space", merged_space, sharded=(2, 3)),
    case("merged and split", lambda x: x.view(12, 56).view(3, 2, 2, 8, 7), sharded=(0, 2)),
    case("merged batch", lambda x: x.flatten(0, 1), sharded=(0, 2, 3)),
    case("shape by keyword", lambda x: torch.reshape(x, shape=(3, 4, 1, 8, 7)).view((12, 8, 7))),
    case(
        "size one",
        lambda x: x.reshape(1, 3, 1, 4, 8, 7, 1).squeeze().unsqueeze(-1).squeeze(-1),
        sharded=BATCH_AND_SPACE,
    ),
    case("unsqueeze beside a size of one", lambda x: x.unsqueeze(1).unsqueeze(0), shape=(4, 1, 5), sharded=(0, 2)),
    case("permute", lambda x: x.permute(3, 0, -2, 1).transpose(-1, 0).movedim(1, 3), sharded=ALL),
    case("t", lambda x: x.t().adjoint(), shape=(5, 6), sharded=(0, 1)),
    case("view_as", lambda x, y: x.view_as(y) + y.view_as(x), SHAPE),
    case("expand", lambda x: x.unsqueeze(0).expand(2, -1, 4, 8, -1), sharded=ALL),
    case("expand a size of one", lambda x: x[:, :1].expand(3, 4, 8, 7)),
    case("expand_as", lambda x, y: y.expand_as(x) * x, ROW),
    case("slices", lambda x: x[:, 1:3, 2:-1, -6:], sharded=(0, 2, 3)),
    case("numbers and None", lambda x: x[:, 2, None, ..., 1:][None]),
    case("negative index", lambda x: x[:, -1, ..., :3] + x[:, 2, ..., -3:]),
    case("steps of a whole dimension", lambda x: x[:, ::2, 3:]),
    case("pieces", pieces),
    case("cat", lambda x, y: torch.cat([y, x, y[:, :1]], dim=-3), (3, 2, 8, 7), others=(0, 2, 3)),
    case("cat with a whole tensor", lambda x, y: torch.cat(tensors=(x, y), axis=1), SHAPE),
    case("rows by number and step", numbered, shape=(3, 4, 9, 7)),
    case("cat along a sharded dimension", with_tokens, (3, 4, 1, 7), (3, 4, 8, 7), others=(0, 2, 3), sharded=(0, 2, 3)),
    case("cat with a class token", with_tokens, (3, 4, 1, 7), (3, 4, 8, 7), sharded=(0, 2, 3)),
    case("stack", lambda x, y: torch.stack([x, y, x], -2), SHAPE, others=(2,)),
    case(
        "narrow and select",
        lambda x: x.narrow(1, 1, 2).select(1, 0).unsqueeze(1) * x.index_select(1, torch.tensor([3])),
    ),
    case(
        "sharded elsewhere",
        lambda x: x * x.mT.sin() + torch.cat([x.mT, x], 1)[:, 2:6] + x.movedim(0, 1)[:3].mean() + (x.mT[:, :, :1] + x),
        shape=(3, 4, 7, 7),
        sharded=ALL,
    ),
    case(
        "distances",
        lambda x, y: torch.cdist(x, y).sin() + torch.cdist(y, x, 1.0).mT,
        (2, 5, 6),
        shape=(2, 7, 6),
        sharded=(0, 1),
        others=(0, 1),
    ),
    case("glu", lambda x: F.glu(x, 1).softmax(1).logsumexp(1, True) + F.log_softmax(x, dim=1)),
    case("normalize", lambda x: F.normalize(x, dim=1) + F.normalize(x, p=1.0)),
    case("argmax", lambda x: x.logsumexp(1) * x.argmax(1) + x.max(1).values + x.max(dim=1, keepdim=True)[0].squeeze(1)),
    case("sharded sizes of one", lambda x: x.reshape(1, 4, 1).view(4, 1) * 2, shape=(1, 4), sharded=(1,)),
]
REDUCTIONS = [
    case("sum of all", lambda x: x.sum() * x.mean(), sharded=ALL),
    case("sum over no dimension", lambda x: x.sum(dim=()).reshape(1) + x.mean([]), sharded=ALL),
    case("mean over sharded and whole", lambda x: x.mean((1, -1), keepdim=True) * x, sharded=ALL),
    case("sum by axis", lambda x: torch.sum(x, axis=2) / x.size(2), sharded=ALL),
    case("var", lambda x: x.var(dim=(2, 3), unbiased=False, keepdim=True) + x.var(False), sharded=ALL),
    case("std", lambda x: x.std(-1, correction=0) + torch.std(x, (1, 3)).sum(), sharded=ALL),
    case("std of equal values", lambda x: (x * 0 + 1).std(2) + x.std(2), sharded=ALL),
    case("amax", lambda x: x.amax((0, 2)) - x.amin([0, 2]) + x.max() - x.min(), sharded=ALL, ties=True),
    case("max of two", lambda x, y: torch.max(x, y) + torch.min(y, x), SHAPE, others=(2, 3)),
    case("norms", lambda x: x.norm() + x.norm(p=1, dim=2) + torch.linalg.vector_norm(x, ord=3, dim=(2,)), sharded=ALL),
    case("norm in float", lambda x: x.norm(2, dim=-1, keepdim=True, dtype=torch.float64), sharded=ALL),
    case("counts", lambda x: (x > 0).sum() * x.mean((0, 2, 3)) + (x > 1).any().double() + (x < 9).all(2).sum()),
]
PRODUCTS = [
    case("linear", lambda x, w, b: F.linear(x, w, b), MATRIX, (5,), sharded=(0, 1, 2)),
    case("matmul", lambda x, w: x @ w, (7, 5), sharded=(0, 1, 2)),
    case(
        "sums over ranks",
        lambda x, w, v: x.mT @ w + w.mT @ v,
        MATRIX,
        MATRIX,
        shape=MATRIX,
        sharded=(0, 1),
        others=(0,),
    ),
    case("columns of both", lambda x, y: x @ y, (4, 7, 6), shape=(4, 5, 7), sharded=(0, 1, 2), others=(0, 1, 2)),
    case(
        "vectors",
        lambda x, y, z: (y @ x) * (x @ z).sum() + y @ y,
        (5,),
        (7,),
        shape=MATRIX,
        sharded=(0, 1),
        others=(0,),
    ),
    case("added products", lambda x, y: torch.addmm(x, x, y, beta=0.5, alpha=2), (7, 7), shape=MATRIX, sharded=(0, 1)),
    case("features over ranks", lambda x, w, b: F.linear(x, w, b), (6, 5), (6,), shape=(4, 7, 5), sharded=(0, 1, 2)),
    case("attention by hand", by_hand, HEADS, HEADS, shape=HEADS, sharded=(0, 1, 2), others=(0, 1, 2)),
    case("equations", equations, (3, 8, 5), (7, 4), others=(0,), sharded=(0, 1, 2, 3)),
    case("product from the left", lambda x, w: w @ x, (4, 6, 8), sharded=(0, 1)),
    case("batched product", lambda x, y: torch.matmul(x, y), (3, 4, 7, 2), others=(0, 1), sharded=(0, 1, 2)),
    case("bmm", lambda x, y: torch.bmm(x, y), (4, 6, 3), shape=(4, 5, 6), sharded=(0, 1), others=(0,)),
    case("attention", attended, HEADS, HEADS, shape=HEADS, sharded=(0, 1, 2), others=(0, 1, 2)),
    case("attention of other keys", attended, (2, 2, 5, 4), (2, 2, 5, 3), shape=HEADS, sharded=(0, 1, 2)),
    case("attention, keys sharded elsewhere", attended, HEADS, HEADS, shape=HEADS, sharded=(0, 1, 2), others=(1, 2)),
    case("causal attention", causal, HEADS, HEADS, shape=HEADS, sharded=(0, 1, 2), others=(0, 1, 2)),
    case("causal attention, whole keys", causal, HEADS, HEADS, shape=HEADS, sharded=(0, 1, 2)),
    case("masked attention", masked, HEADS, HEADS, (9, 9), shape=HEADS, sharded=(0, 1, 2)),
    case("attention of sharded queries with a mask", masked, HEADS, HEADS, (9, 9), shape=HEADS, sharded=(2,)),
    case("masked heads", masked, HEADS, HEADS, (2, 1, 9), shape=HEADS, sharded=(0, 1, 2)),
    case("whole queries of sharded keys", latents, (2, 2, 5, 4), shape=HEADS, sharded=(0, 1, 2)),
    case("wide values", lambda x, y: attended(x, x.sin(), torch.cat([x, y], -1)), HEADS, shape=HEADS, sharded=(2,)),
    case("multi-head attention", multi_head, (7, 3, 6), (18, 6), (18,), (6, 6), shape=(5, 3, 6), sharded=(0, 1)),
    case("multi-head attention without a batch", separate, (7, 5), shape=(9, 6), sharded=(0,)),
    case("broadcast attention", broadcast, HEADS, HEADS, (1, 1, 6, 4), shape=HEADS, sharded=ALL, others=ALL),
    case("sharded heads that share keys", grouped, (2, 2, 9, 4), (2, 2, 9, 4), shape=(2, 4, 9, 4), sharded=(1,)),
    case("broadcast attention of whole keys", broadcast, HEADS, HEADS, (1, 1, 6, 4), shape=HEADS, sharded=ALL),
    case(
        "multi-head attention with more keys",
        multi_head_with_extras,
        *((7, 3, 6), (18, 6), (18,), (6, 6), (5, 7), (1, 1, 6), (1, 1, 6), (6, 4, 3), (6, 4, 3)),
        shape=(5, 3, 6),
        sharded=(0, 1),
    ),
    case("an encoder's layer", encoder, shape=(3, 9, 6), sharded=(0, 1)),
    case("attention of itself", lambda x: attended(x, x * 2, x.sin()), shape=HEADS, sharded=(0, 1, 2)),
    *[
        case(f"weighted losses {r}", lambda x, y, w, r=r: weighted(x, y, w, r).reshape(-1), SHAPE, SHAPE, sharded=(0,))
        for r in ("mean", "sum", "none")
    ],
    *[
        case(
            f"losses of distributions {r}",
            lambda x, y, v, r=r: (
                F.gaussian_nll_loss(x, y, v.abs() + 0.1, full=True, reduction=r)
                + F.gaussian_nll_loss(x, y, 2.0, eps=3.0, reduction=r)
                + F.poisson_nll_loss(x, y.exp(), reduction=r)
                + F.soft_margin_loss(x, y.detach().sign(), reduction=r) * (y * v).mean()
            ).reshape(-1),
            SHAPE,
            SHAPE,
            others=(2,),
            sharded=(0,) if r == "none" else BATCH_AND_SPACE,
        )
        for r in ("mean", "sum", "none")
    ],
    case("divergence of a batch", lambda x, y: F.kl_div(x, y.sigmoid(), reduction="batchmean"), SHAPE),
    *[
        case(f"labels {r}", lambda x, y, r=r: labelled(x, y, r).reshape(-1), SHAPE, others=o, sharded=d)
        for r, o, d in (("mean", (), (0, 2, 3)), ("sum", (0, 2), (0, 2, 3)), ("none", (), (0,)))
    ],
    case("grouped attention", grouped, (2, 1, 9, 4), (2, 1, 9, 4), shape=HEADS, sharded=(0, 2), others=(0, 2)),
    *[
        case(
            f"{f.__name__} {r}", lambda x, y, f=f, r=r: f(x, y, reduction=r).reshape(-1), SHAPE, others=o, sharded=(0,)
        )
        for f in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits)
        for r, o in (("mean", (0,)), ("sum", ()))
    ],
    case("loss of each element", lambda x, y: F.mse_loss(y, x, reduction="none"), SHAPE, others=(3,)),
]
SPATIAL = [
    case("conv", lambda x, w, b: F.conv2d(x, w, b, 2, (1, 2), groups=2), (6, 2, 3, 4), (6,)),
    case("conv by keywords", lambda x, w: F.conv2d(input=x, weight=w, padding="same"), (2, 4, 3, 2)),
    case("conv_transpose", lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1, 1), (4, 3, 3, 3), (3,)),
    case(
        "max_pool", lambda x: F.max_pool2d(x, 3, 2, 1) + F.max_pool2d(x, (3, 3), stride=2, padding=1, ceil_mode=False)
    ),
    case("avg_pool", lambda x: F.avg_pool2d(x, 2, ceil_mode=True, count_include_pad=False)),
    case("adaptive pools", lambda x: F.adaptive_avg_pool2d(x, 1) + F.adaptive_max_pool2d(x, (1, 1))),
    case(
        "adaptive pools to other sizes",
        lambda x: (
            F.adaptive_avg_pool2d(x, (3, None)).sum(3) * F.adaptive_max_pool2d(x, (3, 5)).mean(3)
            + F.adaptive_avg_pool2d(x, 5).amax(3)[:, :, 1:4]
        ),
    ),
    case("adaptive pool of a sharded batch", lambda x: F.adaptive_avg_pool2d(x, (3, None)), sharded=(0, 1)),
    case(
        "adaptive pools without a batch",
        lambda x: F.adaptive_avg_pool2d(x, 1) * F.adaptive_max_pool1d(x.sum(2), 1).unsqueeze(-1),
        shape=(4, 8, 7),
        sharded=(1,),
    ),
    case(
        "pools and convolution without a batch",
        lambda x, w: F.conv2d(F.max_pool2d(x, 2, 1) + F.avg_pool2d(x, 2, 1), w, padding=1),
        (2, 4, 3, 3),
        shape=(4, 8, 7),
        sharded=(1, 2),
    ),
    case("pools of one dimension", lambda x: F.avg_pool1d(F.max_pool1d(x, 2, 1), 3), shape=(2, 3, 9), sharded=(0, 2)),
    case("interpolate", lambda x: F.interpolate(x, scale_factor=2) + F.interpolate(x, (16, 14), mode="bilinear")),
    case("interpolate a sharded batch", lambda x: F.interpolate(x, (5, 9), mode="bicubic"), sharded=(0, 1)),
    case("cumsum", lambda x: x.cumsum(2) + torch.cumsum(x, dim=-1), sharded=ALL),
    case("flip", lambda x: x.flip(2, -1) + torch.flip(x, dims=(0, 3)) + x.flip([1]) + x.flip(()), sharded=ALL),
    case(
        "roll",
        lambda x: x.roll(3, 2) + torch.roll(x, (1, 2, -4), (2, 3, 2)) + x.roll(shifts=(0,), dims=(2,)),
        sharded=ALL,
    ),
    case("pad", lambda x: F.pad(x, (1, 2, 0, 3), value=0.5), sharded=ALL),
    case(
        "pad by reflection", lambda x: F.pad(x, (1, 2, 3, 0), mode="reflect") + F.pad(x, (1, 2, 3, 0), mode="replicate")
    ),
    case("pad the channels", lambda x: F.pad(x, (0, 0, 1, -2, 2, 1)), sharded=(0, 2, 3)),
    case("pad circularly", lambda x: F.pad(x, (1, 2, 3, 0), mode="circular")),
    case("cut", lambda x: F.pad(x, (-1, -1, 0, -2)), sharded=ALL),
    case("group_norm", lambda x, w, b: F.group_norm(x, 2, w, b), (4,), (4,)),
    case("group_norm of single values", lambda x: F.group_norm(x, 4) + x, shape=(3, 4, 1, 1), sharded=(0,)),
    case("instance_norm", lambda x: F.instance_norm(x)),
    case(
        "layer_norm", lambda x, w, b: F.layer_norm(x, (8, 7), w, b) * F.rms_norm(x, (7,)), (8, 7), (8, 7), sharded=(0,)
    ),
    case("layer_norm of channels", lambda x, w: F.layer_norm(x.permute(0, 2, 3, 1), (4,), w).permute(0, 3, 1, 2), (4,)),
    case("batch_norm", lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), (4,), (4,)),
    case("dropout in evaluation", lambda x: F.dropout(x, 0.3, training=False) + F.dropout2d(x, 0.0)),
]
ALONG = [
    case("statistics", along_rows, sharded=ALL),
    case("pieces of rows", along_all_pieces, sharded=ALL),
    case("best rows", best, sharded=(0, 2, 3)),
    case("order", ordered, sharded=ALL),
    case("order of a vector", lambda x: x.sort().values * x.cumprod(0) + x.median(0).values, shape=(9,), sharded=(0,)),
    case("order of a matrix", lambda x: x.sort(0).values + x.cummin(1).values, shape=(5, 6), sharded=(0, 1)),
    case("transforms", transforms, sharded=(0, 1, 2, 3)),
    case("a layer of frequencies", frequencies, sharded=(0, 2, 3)),
    case("a transform of a vector", lambda x: torch.fft.rfft(x).abs().sum() * x, shape=(9,), sharded=(0,)),
    case("windows", lambda x: windows(x, 2), shape=(3, 4, 8, 6), sharded=(0, 2, 3)),
    case("windows of all rows", lambda x: windows(x, 4), shape=(2, 3, 8, 4), sharded=(0, 2, 3)),
    case("merged behind", lambda x: x.flatten(1, 2).softmax(1).view(3, 8, 4, 7), sharded=ALL),
    case("all in one", lambda x: x.reshape(-1).view(2, 6, 56).roll(1, 1), sharded=ALL),
    case("assignments", assigned, SHAPE, others=(0, 2, 3), sharded=ALL),
    case("assignments of what is whole", assigned, SHAPE, sharded=ALL),
    case("edges", edges, (11, 4), (11, 1), shape=(9, 4), sharded=(0, 1), others=(0,)),
    case("edges that are whole", edges, (11, 4), (11, 1), shape=(9, 4), sharded=(0,)),
    *[
        case(
            f"products of {kind}edges", products, (11, 4), (11, 1), shape=(9, 4), sharded=dims, others=others, ties=ties
        )
        for kind, dims, others, ties in (
            ("", (0, 1), (0,), False),
            ("equal ", (0, 1), (0, 1), True),
            ("equal whole ", (0,), (), True),
        )
    ],
    case("edges that are equal", equal_edges, (11, 4), shape=(9, 4), sharded=(0, 1), others=(0, 1), ties=True),
    case("values at places of two dimensions", points_of, shape=(3, 5, 7, 6), sharded=(0, 1, 2, 3)),
    case("values at places that are apart", apart, shape=(3, 5, 7, 6), sharded=(0, 1, 2, 3)),
    case("numbers of the other ranks", crossed, shape=(6, 6), sharded=(0, 1)),
    case("sampled at places", sampled, (3, 5, 6, 2), sharded=(0, 1, 2, 3)),
    case(
        "sampled in a sharded batch",
        lambda x: F.grid_sample(x, x.permute(2, 3, 0, 1).tanh(), align_corners=False),
        shape=(8, 2, 8, 7),
        sharded=(0, 2, 3),
    ),
    case("sampled at sharded places", sampled, (3, 8, 6, 2), sharded=(0, 2), others=(0, 1)),
    case("taken along", taken, SHAPE, sharded=ALL, others=(0, 3)),
    case("shown by a mask", shown, SHAPE, others=(2,)),
    case("changed where a mask shows", changed_where_shown, SHAPE, sharded=ALL, others=(0, 1)),
    case("rows shown by a mask", shown_rows, SHAPE, sharded=ALL, others=(0, 1)),
    case("derivatives in the loss", equation, (4, 4, 3, 3), (4,), sharded=(0, 2)),
    case("shuffled pixels", shuffles, sharded=(0, 2, 3)),
    case("product of all", lambda x: x.prod() + x.prod(2).sum() * x.prod(-1, keepdim=True), sharded=ALL),
    case(
        "heads with masks", heads_with_masks, (7, 3, 6), (18, 6), (18,), (6, 6), (5, 7), shape=(5, 3, 6), sharded=(0, 1)
    ),
    case("a causal encoder", causal_encoder, shape=(3, 9, 6), sharded=(0, 1)),
    case("a sharded mask", sharded_mask, HEADS, HEADS, (2, 1, 9, 9), shape=HEADS, sharded=(0, 2), others=(2,)),
    case("a mask of keys", sharded_mask, HEADS, HEADS, (2, 2, 9, 9), shape=HEADS, sharded=(0, 1, 2), others=(0, 1)),
]
# Sharded where their rules are. In ALONG a random layout, which its length changes, may leave that dimension whole.
ROWS = [
    case("best of sharded rows", best, sharded=(2,)),
    case("equal edges of sharded rows", equal_edges, (11, 4), shape=(9, 4), sharded=(0,), others=(0,), ties=True),
    case("sampled in sharded rows", sampled, (3, 5, 6, 2), sharded=(2,)),
    case("changed in sharded rows", changed_where_shown, (9, 4, 3, 2), shape=(9, 4, 3, 2), sharded=(0,), others=(0,)),
]
_GROUPED = (grouped, (2, 2, 9, 4), (2, 2, 9, 4))
# Heads that share keys are repeated for queries whose heads are cut, in some of the random layouts.
SHARED_HEADS = [case(f"heads that share keys, {i}", *_GROUPED, shape=(2, 4, 9, 4), sharded=(1,)) for i in range(4)]
FAMILIES = {
    "along": ALONG,
    "rows": ROWS,
    "elementwise": ELEMENTWISE,
    "views": VIEWS,
    "reductions": REDUCTIONS,
    "products": PRODUCTS,
    "space": SPATIAL,
    "shared_heads": SHARED_HEADS,
}
