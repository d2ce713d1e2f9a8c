"""LLaVA: a decoder whose input has images among its tokens (Liu et al. 2023).

A vision transformer and a connector of two linear layers (Liu et al. 2024, section 3.2) make one
embedding of each patch of an image. These replace the embeddings of image tokens in the input of
the decoder, `functron.models.gpt`. Image tokens are never targets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from functron import nn
from functron.apps.zoo import vit
from functron.apps.zoo.vit import ViTConfig
from functron.core import random
from functron.core.errors import Problem, public, raise_problems
from functron.core.scopes import named_scope
from functron.core.tables import shows_differences
from functron.core.typing import Float, Int, Key, Scalar, Tensor
from functron.models import decoder, gpt
from functron.models.config import Dtype, GPTConfig, Named
from functron.models.family import GPT, UNEVEN, Family
from functron.models.options import DEFAULTS, SAMPLE_AXES, ModelOptions, Sequence, arranged, require
from functron.nn.layers import linear_defs
from functron.pipeline.partition import Part
from functron.spmd import P
from functron.spmd import collectives as lax
from functron.spmd.mesh import BoundMesh, Mesh
from functron.spmd.spec import Rules

__all__ = [
    "PRESETS",
    "LlavaConfig",
    "check_batch",
    "defs",
    "forward",
    "loss",
    "num_targets",
    "rules",
]


@shows_differences
@dataclass(frozen=True)
class LlavaConfig:
    """Architecture of a LLaVA.

    Attributes:
        vision: the vision transformer.
        text: the decoder.
        image_token: the token whose embeddings are replaced by those of patches, in order.
        activation: between the connector's layers.
    """

    vision: ViTConfig = field(default_factory=ViTConfig)
    text: GPTConfig = field(default_factory=GPTConfig)
    image_token: int = 0
    activation: nn.Activation = "gelu"

    def __post_init__(self):
        found = []
        if not 0 <= self.image_token < self.text.vocab_size:
            wanted = f"0 to {self.text.vocab_size - 1}, a token of the decoder"
            found.append(Problem("image_token", str(self.image_token), wanted))
        if self.text.has_details:
            got, fix = "experts, or tokens further ahead", "leave out moe and mtp_depth"
            found.append(Problem("text", got, "a decoder whose loss is of the next token", fix))
        if self.vision.num_classes:
            got = str(self.vision.num_classes)
            found.append(Problem("vision.num_classes", got, "0", "its head would not be used"))
        if self.vision.dtype != self.text.dtype:
            got = f"{self.vision.dtype} and {self.text.dtype}"
            found.append(Problem("vision.dtype and text.dtype", got, "the same", "change one"))
        raise_problems("invalid LlavaConfig", found)

    @property
    def dtype(self) -> Dtype:
        """The dtype of parameters and activations."""
        return self.text.dtype


_CLIP = ViTConfig(
    image_size=336, patch_size=14, num_layers=23, embed_dim=1024, num_heads=16, mlp_dim=4096,
    activation="quick_gelu", patch_bias=False, pre_norm=True, final_norm=False, norm_eps=1e-5,
)  # fmt: skip
_SMALL = ViTConfig(num_layers=2, embed_dim=64, num_heads=4, mlp_dim=192, final_norm=False)


def _make_vicuna(num_layers: int, embed_dim: int, num_heads: int, mlp_dim: int) -> GPTConfig:
    return GPTConfig(
        vocab_size=32064, num_layers=num_layers, embed_dim=embed_dim, num_heads=num_heads,
        mlp_dim=mlp_dim, max_seq=4096, vocab_multiple=64,
    )  # fmt: skip


PRESETS: Mapping[str, LlavaConfig] = Named(
    {
        "llava-tiny": LlavaConfig(_SMALL, gpt.PRESETS["llama3-tiny"]),
        "llava-1.5-7b": LlavaConfig(_CLIP, _make_vicuna(32, 4096, 32, 11008), image_token=32000),
        "llava-1.5-13b": LlavaConfig(_CLIP, _make_vicuna(40, 5120, 40, 13824), image_token=32000),
    }
)
"""Named configs; those of LLaVA 1.5 are without CLIP's last block, which is not used."""


@public
def defs(config: LlavaConfig, options: ModelOptions = DEFAULTS) -> dict:
    """The parameters: ``{"vision": vit.defs, "connector": {"up", "down"}, "text": gpt.defs}``.

    The options are those of `gpt.defs`.
    """
    c, dtype = config, config.text.torch_dtype

    def layer(rows: int, axes: tuple[str, str]) -> dict:
        return linear_defs(
            (rows, c.text.embed_dim),
            axes,
            stddev=c.text.init_stddev,
            bias=(c.text.embed_dim,),
            bias_axes=axes[1:],
            dtype=dtype,
        )

    connector = {
        "up": layer(c.vision.embed_dim, ("embed", "mlp")),
        "down": layer(c.text.embed_dim, ("mlp", "embed")),
    }
    return {"vision": vit.defs(c.vision), "connector": connector, "text": gpt.defs(c.text, options)}


@public
def rules(
    config: LlavaConfig,
    mesh: Mesh | BoundMesh,
    *,
    fsdp: tuple[str, ...] = ("fsdp",),
    uneven: tuple[str, ...] = (),
) -> Rules:
    """Rules for tensor parallelism and FSDP: those of `vit` and of `gpt`."""
    both = dict(vit.rules(config.vision, mesh, fsdp=fsdp, uneven=uneven))
    both |= gpt.rules(config.text, mesh, fsdp=fsdp, uneven=uneven)
    found = []
    if config.text.embed_dim % mesh["tp"] and "mlp" not in uneven:
        wanted = f"a multiple of tp={mesh['tp']}, which splits the connector"
        found.append(Problem("text.embed_dim", str(config.text.embed_dim), wanted, "change tp"))
    raise_problems("this model cannot run on this mesh", found)
    return Rules(both)


@public
def forward(
    config: LlavaConfig,
    weights: dict,
    tokens: Int[Tensor, "batch seq"],
    images: Float[Tensor, "batch images channels height width"],
    options: ModelOptions = DEFAULTS,
    *,
    rows: Int[Tensor, " batch"] | None = None,
    key: Key | None = None,
) -> Float[Tensor, "batch seq columns"]:
    """The logits of every next token.

    Args:
        config: the architecture.
        weights: this rank's part of the parameters.
        tokens: int64 ``[batch, seq]``, with an image token for each patch of each image, in order;
            see `check_batch`.
        images: ``[batch, images, channels, image_size, image_size]``; a sample with fewer image
            tokens does not use its last images.
        options: as in `gpt.forward`; context, experts, router and watch are refused. Hooks apply to
            the decoder.
        rows, key: as in `gpt.forward`.

    Returns:
        ``[batch, seq, padded_vocab / tp]``, as `gpt.forward`. Collectives: those of `vit.features`,
        one all-reduce of the connector's output, and those of `gpt.forward`.

    Raises:
        ValueError: as `vit.features` and `gpt.forward` do.
    """
    batch = {"tokens": tokens} if rows is None else {"tokens": tokens, "rows": rows}
    text, x, sequence = _embed(config, weights, batch, images, options, key)
    part = Part(range(config.text.num_layers), loss=True)
    x, _ = decoder.stream(config.text, part, weights["text"], x, sequence, text, key)
    return decoder.logits(config.text, weights["text"], x, text)


@public
def loss(
    config: LlavaConfig,
    weights: dict,
    batch: Mapping[str, Tensor],
    options: ModelOptions = DEFAULTS,
    *,
    key: Key | None = None,
) -> Scalar:
    """The sum of all tokens' losses over the batch of all ranks; replicated, as `gpt.loss`.

    Args:
        batch: this rank's ``tokens`` and ``targets``, int64 ``[batch, seq]``, and ``images``, see
            `forward`; perhaps ``rows``. Targets of `nn.IGNORE_INDEX` and image tokens do not count.
    """
    require(batch, "tokens", "targets", "images")
    batch = {**batch, "targets": _hide_image_targets(config, batch)}
    text, x, sequence = _embed(config, weights, batch, batch["images"], options, key)
    part = Part(range(config.text.num_layers), loss=True)
    return decoder.loss(config.text, part, weights["text"], x, sequence, text, key)


_OPTIONS = ("stream", "remat", "gather", "kernels", "loss_chunk_tokens", "axes", "attention", "mlp",
            "norm", "block")  # fmt: skip


def _embed(
    config: LlavaConfig,
    weights: dict,
    batch: Mapping[str, Tensor],
    images: Tensor,
    options: ModelOptions,
    key: Key | None,
) -> tuple[ModelOptions, Tensor, Sequence]:
    """The decoder's options, the residual stream before its first block, and the token positions.

    The stream has embeddings of tokens, and those of patches at image tokens.
    """
    options.require_only("llava", *_OPTIONS)
    vision = ModelOptions(options.stream, options.remat, options.gather.at("vision"))
    text = gpt.ready(config.text, replace(options, gather=options.gather.at("text")))
    sequence = arranged(batch, text.context)
    with named_scope("vision"):
        seen = vit.features(config.vision, weights["vision"], images.flatten(0, 1), vision)
    with named_scope("connector"):
        connector = options.gather.at("connector")(weights["connector"])
        patches = nn.mlp(connector, seen[:, 1:], activation=config.activation, stream=P())
        patches = patches.unflatten(0, images.shape[:2]).flatten(1, 2)
    with named_scope("embed"):
        own, scale = weights["text"], config.text.embed_scale
        x = decoder.embed_tokens(config.text, own, sequence.tokens, text, scale)
        here = sequence.tokens == config.image_token
        which = (here.long().cumsum(1) - 1).clamp(0, patches.shape[1] - 1)
        which, here = (nn.stream_positions(x, text.stream, y) for y in (which, here.long()))
        placed = patches.gather(1, which.unsqueeze(-1).expand(-1, -1, patches.shape[2]))
        x = torch.where(here.unsqueeze(-1) != 0, placed.to(x.dtype), x)
        key = decoder.drawing_key(config.text, options, key)
        last = None if key is None else random.split(key, config.text.num_layers + 1)[-1]
        return (
            text,
            decoder.positioned(config.text, own, sequence, text, x, last),
            sequence,
        )


def _hide_image_targets(config: LlavaConfig, batch: Mapping[str, Tensor]) -> Tensor:
    require(batch, "targets")
    targets = batch["targets"]
    return torch.where(targets == config.image_token, nn.IGNORE_INDEX, targets)


@public
def num_targets(
    config: LlavaConfig, batch: Mapping[str, Tensor], axes: tuple[str, ...] = SAMPLE_AXES
) -> Int[Tensor, ""]:
    """The number of targets that count, over the batch of all ranks: int64; one all-reduce.

    Args:
        config: the architecture, whose image tokens do not count; for `make_step` use
            ``functools.partial(llava.num_targets, config)``.
        batch: this rank's ``targets``.
        axes: those of the loss's `ModelOptions`.
    """
    return lax.psum((_hide_image_targets(config, batch) != nn.IGNORE_INDEX).sum(), axes)


def check_batch(config: LlavaConfig, batch: Mapping[str, Tensor]) -> None:
    """Check that the image tokens of every sample are those of whole images, and not too many.

    For batches on the host, before a step, as values are read.

    Args:
        batch: ``tokens`` and ``images``.

    Raises:
        ValueError: the samples where this is not so are listed.
    """
    each, images = config.vision.num_patches, batch["images"].shape[1]
    counts = (batch["tokens"] == config.image_token).sum(1).tolist()
    found = [
        Problem(
            f"tokens[{row}]",
            f"{count} image tokens",
            f"a multiple of the {each} patches of an image, at most {images * each}",
            f"write {each} image tokens for each image",
        )
        for row, count in enumerate(counts)
        if count % each or count > images * each
    ]
    raise_problems("images and image tokens do not fit", found)


def make_family() -> Family:
    """The family of LLaVAs."""
    return Family(
        "llava", "a LLaVA", LlavaConfig, PRESETS, defs, rules, loss, num_targets,
        make=_make_config, free=(), rules_settings=UNEVEN, canonical=_write_out,
        vocab_size=lambda config: config.text.vocab_size,
    )  # fmt: skip


def _make_config(values: Mapping[str, Any], dtype: Dtype) -> LlavaConfig:
    parts = {
        "vision": ViTConfig(**values["vision"], dtype=dtype),
        "text": GPTConfig(**values["text"], dtype=dtype),
    }
    return LlavaConfig(**{**values, **parts})


def _write_out(config: LlavaConfig) -> LlavaConfig:
    """The config with derived sizes written out, and what does not matter at its default."""
    text, vision = GPT.canonical(config.text), config.vision
    plain: dict[str, Any] = {name: getattr(GPTConfig, name) for name in GPT.free}
    if text.positions == "rope":  # shorter sequences are as good
        plain["max_seq"] = GPTConfig.max_seq
    bare: dict[str, Any] = {name: getattr(ViTConfig, name) for name in vit.FREE_FIELDS}
    return replace(config, text=replace(text, **plain), vision=replace(vision, **bare))
