"""The decoder written out position by position: slow, dense and plain, to hold the fast one against.

Nothing here is shared with tt_cli.model but the configuration and the parameters' names. Float64 throughout.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tt_cli.model.dalle_config import DalleConfig

Parameters = dict[str, Tensor]


def may_attend(config: DalleConfig, kind: str, query: int, key: int) -> bool:
    """Whether position ``query`` attends to position ``key`` in a layer of this attention type."""
    text, side, reach = config.text_length + 1, config.image_size, config.conv_kernel // 2
    if key > query:
        return False
    if query < text or key < text:
        return True
    row, column = divmod(query - text, side)
    key_row, key_column = divmod(key - text, side)
    if kind == "axial_row":
        return key_row == row
    if kind == "axial_col":
        return key_column == column
    return abs(key_row - row) <= reach and abs(key_column - column) <= reach


def angles(config: DalleConfig, position: int) -> list[float]:
    """Rotary angles of one position, one for each pair of channels, with the rounding of float32."""
    rotated = config.dim_head // 3
    count = rotated // 2
    text, side = config.text_length + 1, config.image_size
    language = (1.0 / (10000 ** (torch.arange(0, 2 * count, 2).float() / rotated))).tolist()
    pixel = (torch.linspace(1.0, 5.0, count) * math.pi).tolist()
    line = torch.linspace(-1.0, 1.0, side).tolist()
    if position < text:
        place = (float(position), -10.0, -10.0)
    else:
        row, column = divmod(position - text, side)
        place = (8192.0, line[row], line[column])
    products = [(place[0], w) for w in language] + [(x, u) for x in place[1:] for u in pixel]
    return [torch.tensor(x).mul(torch.tensor(w)).item() for x, w in products]


def rotate(config: DalleConfig, x: Tensor, position: int) -> Tensor:
    """Rotate the channel pairs of x (..., dim_head) by the position's angles."""
    out = x.clone()
    for i, angle in enumerate(angles(config, position)):
        a, b = x[..., 2 * i], x[..., 2 * i + 1]
        out[..., 2 * i] = a * math.cos(angle) - b * math.sin(angle)
        out[..., 2 * i + 1] = b * math.cos(angle) + a * math.sin(angle)
    return out


def shift(config: DalleConfig, h: Tensor) -> Tensor:
    """Token shift of h (n, dim)."""
    text, side, d = config.text_length + 1, config.image_size, h.shape[1]
    out = h.clone()
    for p in range(h.shape[0]):
        if p < text:
            out[p, : d // 2] = h[p - 1, : d // 2] if p > 0 else 0.0
        else:
            row, column = divmod(p - text, side)
            out[p, : d // 4] = h[p - side, : d // 4] if row > 0 else 0.0
            out[p, d // 4 : d // 2] = h[p - 1, d // 4 : d // 2] if column > 0 else 0.0
    return out


def attention(config: DalleConfig, kind: str, h: Tensor, weights: Parameters) -> Tensor:
    """Attention of h (n, dim) with a full matrix of scores for each head."""
    n = h.shape[0]
    q, k, v = (h @ weights["qkv"].t()).view(n, 3, config.heads, config.dim_head).unbind(1)
    if config.rotary:
        q, k, v = (torch.stack([rotate(config, x[p], p) for p in range(n)]) for x in (q, k, v))
    allowed = torch.tensor([[may_attend(config, kind, i, j) for j in range(n)] for i in range(n)])
    heads = []
    for head in range(config.heads):
        scores = q[:, head] @ k[:, head].t() / math.sqrt(config.dim_head)
        heads.append(scores.masked_fill(~allowed, -math.inf).softmax(dim=-1) @ v[:, head])
    return torch.cat(heads, dim=-1) @ weights["out.weight"].t() + weights["out.bias"]


def feed_forward(h: Tensor, weights: Parameters) -> Tensor:
    """GEGLU feed-forward of h (n, dim)."""
    value, gate = (h @ weights["expand.weight"].t() + weights["expand.bias"]).chunk(2, dim=-1)
    active = gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2)))
    return (value * active) @ weights["contract.weight"].t() + weights["contract.bias"]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """LayerNorm over the last axis."""
    centred = x - x.mean(dim=-1, keepdim=True)
    return centred / torch.sqrt((centred**2).mean(dim=-1, keepdim=True) + 1e-5) * weight + bias


def weight_set(config: DalleConfig, layer: int) -> int:
    """Which shared set a layer uses: groups in turn, the last layer its own."""
    sets = min(config.shared_layer_groups, config.depth - 1)
    return sets if layer == config.depth - 1 else layer % config.shared_layer_groups


def logits(config: DalleConfig, parameters: Parameters, text: list[int], image: list[int]) -> Tensor:
    """Logits (n, vocab) of one caption and any number of codes; impossible ids hold -inf."""
    unique = [t if t != 0 else config.text_vocab + p for p, t in enumerate(text)]
    text_ids = config.text_vocab + config.text_length
    ids = ([0, *unique] + [text_ids + c for c in image])[: config.text_length + config.image_size**2]
    table = parameters["logits.weight"] if config.tied_embeddings else parameters["embedding"]
    x1 = x2 = table[ids]

    def under(prefix: str) -> Parameters:
        return {k.removeprefix(prefix): v for k, v in parameters.items() if k.startswith(prefix)}

    def branch(layer: int, name: str, x: Tensor) -> Tensor:
        own = under(f"layers.{layer}.{name}.")
        h = layer_norm(x, own["norm.weight"], own["norm.bias"])
        if config.shift_tokens:
            h = shift(config, h)
        shared = under(f"{name}.{weight_set(config, layer)}.")
        if name == "feed_forward":
            return own["scale"] * feed_forward(h, shared)
        last = layer == config.depth - 1
        kind = config.last_attention if last else config.attention_types[layer % len(config.attention_types)]
        return own["scale"] * attention(config, kind, h, shared)

    for layer in range(config.depth):
        if config.reversible:
            x1 = x1 + branch(layer, "attention", x2)
            x2 = x2 + branch(layer, "feed_forward", x1)
        else:
            x1 = x1 + branch(layer, "attention", x1)
            x1 = x1 + branch(layer, "feed_forward", x1)
    z = layer_norm((x1 + x2) / 2 if config.reversible else x1, parameters["norm.weight"], parameters["norm.bias"])
    out = z @ parameters["logits.weight"].t() + parameters["logits.bias"]
    for p in range(len(ids)):
        if p < config.text_length:
            out[p, text_ids:] = -math.inf
        else:
            out[p, :text_ids] = -math.inf
    return out


def losses(config: DalleConfig, parameters: Parameters, text: list[int], image: list[int]) -> list[Tensor]:
    """[total, text, image] of one caption and its whole picture."""
    rows = logits(config, parameters, text, image)
    text_ids = config.text_vocab + config.text_length
    labels = [t if t != 0 else config.text_vocab + p for p, t in enumerate(text)] + [c + text_ids for c in image]
    each = F.cross_entropy(rows, torch.tensor(labels), reduction="none")
    text_loss, image_loss = each[: config.text_length].mean(), each[config.text_length :].mean()
    w = config.loss_image_weight
    return [(text_loss + w * image_loss) / (1 + w), text_loss, image_loss]
