"""A vision transformer (Dosovitskiy et al. 2021), and with other settings CLIP's (Radford 2021).

A linear map embeds the patches of an image, which follow a learned class token; learned position
embeddings are added, and pre-norm blocks attend to all patches. `features` returns a vector per
patch, `forward` the logits of classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch.nn import functional as F

from functron import nn
from functron.apps.zoo.layers import (
    Stack,
    encoder_block,
    encoder_defs,
    head_problems,
    round_up,
    size_problems,
    sum_cross_entropies,
    tensor_rules,
)
from functron.core.errors import Problem, public, raise_problems
from functron.core.scopes import named_scope
from functron.core.settings import choice_problems
from functron.core.tables import shows_differences
from functron.core.typing import Float, Key, Tensor
from functron.models.config import Dtype, Named
from functron.models.family import UNEVEN, Family
from functron.models.options import DEFAULTS, Batch, ModelOptions, check_gathered, num_targets
from functron.nn.layers import linear_defs, sequence_axes, weights
from functron.ops.moe import look_up
from functron.spmd import P, Uneven, params
from functron.spmd import collectives as lax
from functron.spmd.mesh import BoundMesh, Mesh
from functron.spmd.params import Normal, ParamDef
from functron.spmd.spec import Rules
from functron.transforms import Gather

__all__ = ["PRESETS", "ViTConfig", "defs", "features", "forward", "loss", "num_targets", "rules"]

VisionActivation = Literal["gelu", "gelu_tanh", "quick_gelu"]


@shows_differences
@dataclass(frozen=True)
class ViTConfig:
    """Architecture of a vision transformer.

    Attributes:
        image_size: height and width of an image, in pixels.
        patch_size: height and width of a patch, in pixels.
        channels: numbers per pixel.
        num_layers: number of blocks.
        embed_dim: width of the residual stream.
        num_heads: number of attention heads.
        mlp_dim: width of the feed-forward hidden layer.
        activation: of feed-forward layers; "quick_gelu" is x sigmoid(1.702 x) (CLIP).
        patch_bias: the embedding of patches has a bias (not in CLIP).
        pre_norm: a norm before the first block (CLIP).
        final_norm: a norm after the last block (not for the features that LLaVA reads).
        num_classes: number of classes; 0: the model has no head, and only `features`.
        norm_eps: epsilon of the norms.
        init_stddev: standard deviation of all initial matrices.
        class_multiple: classes are padded to a multiple of it; every tensor-parallel size that
            divides it fits.
        dtype: of parameters and activations.
    """

    image_size: int = 32
    patch_size: int = 4
    channels: int = 3
    num_layers: int = 4
    embed_dim: int = 256
    num_heads: int = 8
    mlp_dim: int = 1024
    activation: VisionActivation = "gelu"
    patch_bias: bool = True
    pre_norm: bool = False
    final_norm: bool = True
    num_classes: int = 0
    norm_eps: float = 1e-6
    init_stddev: float = 0.02
    class_multiple: int = 64
    dtype: Dtype = "float32"

    def __post_init__(self):
        sizes = ("image_size", "patch_size", "channels", "num_layers", "embed_dim", "num_heads")
        found = size_problems(self, *sizes, "mlp_dim", "class_multiple")
        if not found:
            found += head_problems("num_heads", self.embed_dim, self.num_heads)
            if self.image_size % self.patch_size:
                wanted = f"a multiple of patch_size={self.patch_size}"
                found.append(Problem("image_size", str(self.image_size), wanted, "crop images"))
        if self.num_classes < 0:
            found.append(Problem("num_classes", str(self.num_classes), "at least 0"))
        found += choice_problems(self)
        raise_problems("invalid ViTConfig", found)

    @property
    def num_patches(self) -> int:
        """The number of patches of an image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def padded_classes(self) -> int:
        """Columns of the head."""
        return round_up(self.num_classes, self.class_multiple)

    @property
    def attention(self) -> nn.AttentionConfig:
        """The shapes of the attention layers."""
        return nn.AttentionConfig(embed_dim=self.embed_dim, num_heads=self.num_heads, bias=True)

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch's."""
        return getattr(torch, self.dtype)


def _make_preset(
    num_layers: int, embed_dim: int, num_heads: int, patch_size: int, num_classes: int = 1000
) -> ViTConfig:
    return ViTConfig(
        image_size=224, patch_size=patch_size, num_layers=num_layers, embed_dim=embed_dim,
        num_heads=num_heads, mlp_dim=4 * embed_dim, num_classes=num_classes,
    )  # fmt: skip


PRESETS: Mapping[str, ViTConfig] = Named(
    {
        "vit-tiny": ViTConfig(
            num_layers=2, embed_dim=64, num_heads=4, mlp_dim=192, num_classes=10
        ),
        "vit-base-16": _make_preset(12, 768, 12, 16),
        "vit-large-16": _make_preset(24, 1024, 16, 16),
        "vit-huge-14": _make_preset(32, 1280, 16, 14),
        "clip-large-14-336": ViTConfig(
            image_size=336, patch_size=14, num_layers=24, embed_dim=1024, num_heads=16,
            mlp_dim=4096, activation="quick_gelu", patch_bias=False, pre_norm=True, norm_eps=1e-5,
        ),
    }
)  # fmt: skip
"""Named configs: "vit-tiny" is for images of 32 x 32; the others have their papers' sizes."""


@public
def defs(config: ViTConfig) -> dict:
    """The parameters of the patches, the blocks, and the head.

    ``{"patches", "class", "positions", "pre_norm"?, "blocks", "norm"?, "head"?}``; parameters of
    blocks are stacked on a leading "layers" dim.
    """
    c, dtype, stddev = config, config.torch_dtype, config.init_stddev
    normal, size = Normal(stddev), config.patch_size
    norm = nn.norm_defs(c.embed_dim, "layer", axis="embed", dtype=dtype)
    model = {
        "patches": linear_defs(
            (c.channels, size, size, c.embed_dim),
            (None, None, None, "embed"),
            stddev=stddev,
            bias=(c.embed_dim,) if c.patch_bias else None,
            bias_axes=("embed",),
            dtype=dtype,
        ),
        "class": ParamDef((c.embed_dim,), ("embed",), normal, dtype, decay=False),
        "positions": ParamDef((c.num_patches + 1, c.embed_dim), (None, "embed"), normal, dtype),
        "blocks": params.stack(encoder_defs(c), c.num_layers),
    }
    model |= {"pre_norm": norm} if c.pre_norm else {}
    model |= {"norm": norm} if c.final_norm else {}
    if c.num_classes:
        model["head"] = linear_defs(
            (c.embed_dim, c.padded_classes),
            ("embed", "vocab"),
            stddev=stddev,
            bias=(c.padded_classes,),
            bias_axes=("vocab",),
            dtype=dtype,
        )
    return model


@public
def rules(
    config: ViTConfig,
    mesh: Mesh | BoundMesh,
    *,
    fsdp: tuple[str, ...] = ("fsdp",),
    uneven: tuple[str, ...] = (),
) -> Rules:
    """Rules for tensor parallelism and FSDP; see `gpt.rules`."""
    c = config
    split = {"num_heads": ("heads", c.num_heads), "mlp_dim": ("mlp", c.mlp_dim)}
    split |= {"class_multiple": ("vocab", c.padded_classes)} if c.num_classes else {}
    embed = {"embed_dim": c.embed_dim}
    return tensor_rules(mesh, split=split, embed=embed, fsdp=fsdp, uneven=uneven)


@public
def features(
    config: ViTConfig,
    weights: dict,
    images: Float[Tensor, "batch channels height width"],
    options: ModelOptions = DEFAULTS,
) -> Float[Tensor, "batch places embed"]:
    """A vector for the class token and for every patch, row by row.

    Args:
        config: the architecture.
        weights: this rank's part of the parameters.
        images: ``[batch, channels, image_size, image_size]``, this rank's.
        options: stream, remat, gather and axes; others are refused. A sequence that is split over
            ranks is padded to a multiple of their number.

    Returns:
        ``[batch, 1 + num_patches, embed]``, the same on all ranks of tp. Collectives per block: see
        `nn.self_attention` and `nn.mlp`; one all-gather at the end where the sequence is split.

    Raises:
        ValueError: the images have another size.
    """
    count, axes = config.num_patches + 1, sequence_axes(options.stream)
    total = round_up(count, ranks := lax.axis_size(axes))
    if axes:
        stream = P(options.stream[0], Uneven(axes, count))
        options = replace(options, stream=stream)
    stack, stream, gather = Stack("vit", options), options.stream, options.gather
    with named_scope("embed"):
        place = lax.global_index(total // ranks, axes, device=images.device)
        x = _embed_patches(config, weights, _cut_patches(config, images), place, total, gather)
    if config.pre_norm:
        x = nn.norm(gather.at("pre_norm")(weights["pre_norm"]), x, eps=config.norm_eps)
    mlp = partial(_feed_forward, config, stream)
    block = encoder_block(config, stack, None, mlp, norm_first=True)
    x = stack.at("blocks").over(block, x, weights["blocks"], None)
    if config.final_norm:
        with named_scope("norm"):
            x = nn.norm(gather.at("norm")(weights["norm"]), x, eps=config.norm_eps)
    return nn.gather_sequence(x, stream)


def _cut_patches(config: ViTConfig, images: Tensor) -> Tensor:
    """``[batch, num_patches, channels * patch_size ** 2]``, row by row."""
    side = config.image_size
    if tuple(images.shape[1:]) != (config.channels, side, side):
        raise ValueError(
            f"vit: got images of shape {tuple(images.shape[1:])}; wanted "
            f"{(config.channels, side, side)}; resize them, or change image_size and channels"
        )
    size = config.patch_size
    x = images.unflatten(3, (-1, size)).unflatten(2, (-1, size))
    return x.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def _embed_patches(
    config: ViTConfig, weights: dict, patches: Tensor, place: Tensor, total: int, gather: Gather
) -> Tensor:
    """The residual stream at the positions `place`: the class token, then patches, then padding."""
    layer = gather.at("patches")(weights["patches"])
    check_gathered("embed_dim", layer["w"].shape[-1], config.embed_dim)
    w, table = layer["w"].flatten(0, 2), gather.at("positions")(weights["positions"])
    x = F.pad(patches.to(w.dtype), (0, 0, 1, total - config.num_patches - 1))
    if place.numel() < total:
        x = x.index_select(1, place)
        table = look_up(table, place.clamp(max=config.num_patches), whole=True)
    x = x @ w
    x = x + layer["b"] if "b" in layer else x
    x = torch.where((place == 0)[:, None], gather.at("class")(weights["class"]), x)
    return x + table


def _feed_forward(config: ViTConfig, stream: P, layer: dict, x: Tensor) -> Tensor:
    if config.activation != "quick_gelu":
        return nn.mlp(layer, x, activation=config.activation, stream=stream)
    y = nn.column_parallel(nn.gather_sequence(x, stream), *weights(layer["up"]))
    return nn.row_parallel(y * (1.702 * y).sigmoid(), *weights(layer["down"]), stream=stream)


@public
def forward(
    config: ViTConfig,
    weights: dict,
    images: Float[Tensor, "batch channels height width"],
    options: ModelOptions = DEFAULTS,
) -> Float[Tensor, "batch columns"]:
    """The logits of every image's class, from the class token's features.

    The arguments are those of `features`.

    Returns:
        ``[batch, padded_classes / tp]``: this rank's columns, those from ``num_classes`` on being
        padding. Collectives: those of `features`.

    Raises:
        ValueError: the model has no classes.
    """
    if not config.num_classes:
        raise ValueError("vit: got num_classes=0; wanted at least 1; set it, or use vit.features")
    x = features(config, weights, images, options)
    with named_scope("head"):
        head = options.gather.at("head")(weights["head"])
        return nn.column_parallel(x[:, 0], head["w"], head["b"])


@sum_cross_entropies("images", "targets", classes="num_classes")
def loss(config: ViTConfig, weights: dict, batch: Batch, options: ModelOptions, key: Key | None):
    """The sum of all images' cross-entropies over the batch of all ranks, as `gpt.loss`.

    Args:
        batch: this rank's ``images``, and ``targets`` int64 ``[batch]``, of which `nn.IGNORE_INDEX`
            do not count.
        key: not used; there is no dropout.
    """
    del key
    return forward(config, weights, batch["images"], options)


FREE_FIELDS = ("init_stddev", "class_multiple", "dtype")
"""Fields of a `ViTConfig` that leave the model what it is; see `Family`."""


def make_family() -> Family:
    """The family of vision transformers."""
    return Family(
        "vit", "a vision transformer", ViTConfig, PRESETS, defs, rules, loss, num_targets,
        vocab_size=lambda config: config.num_classes, free=FREE_FIELDS, rules_settings=UNEVEN,
    )  # fmt: skip
