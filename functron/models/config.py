"""The architecture of a decoder, as a frozen config that refuses what cannot be built.

There are named ones: published sizes of well-known families, and small ones to try.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import torch

from functron import nn
from functron.core.errors import Problem, nearest, on_hub, raise_problems
from functron.core.settings import Need, Needs, choice_problems, needs_under, setting
from functron.core.tables import shows_differences
from functron.nn.mla import MLAConfig, latent_problems
from functron.nn.moe import MOE_NEEDS, ExpertActivation, MoEConfig

Config = TypeVar("Config")
Positions = Literal["rope", "learned", "none"]
Norms = Literal["before", "after", "both", "shared"]
Dtype = Literal["float32", "float64", "bfloat16", "float16"]
_ROPE_DEFAULTS = (
    *(("local_rope_theta", 0), ("rope_fraction", 1), ("nope_every", 0)),
    *(("rope_pairs", "halves"), ("rope_sections", ())),
)
_NOT_NEGATIVE = (
    *("window", "global_every", "nope_every", "dense_layers", "mtp_depth", "mtp_weight"),
    *("local_rope_theta", "attention_scale", "score_cap", "logit_cap", "qkv_clip", "temperature"),
    *("mup_base_dim", "mup_base_head_dim"),
)


_LLAMA3 = Need(lambda c: c.kind == "llama3", "kind llama3", "set its kind to llama3")
_YARN = Need(lambda c: c.kind == "yarn", "kind yarn", "set its kind to yarn")
_LONG_ROPE = Need(lambda c: c.kind == "longrope", "kind longrope", "set its kind to longrope")
_FOR_YARN = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
_SCALING: Needs = MappingProxyType(
    {
        **dict.fromkeys(("low_freq_factor", "high_freq_factor"), _LLAMA3),
        "original_max_seq": Need(
            lambda c: c.kind != "linear", "kind llama3 or yarn", "set its kind to one of these"
        ),
        "attention_factor": Need(
            lambda c: c.kind in ("yarn", "longrope"), "kind yarn or longrope", "set its kind to one"
        ),
        "factors": _LONG_ROPE,
        "factor": Need(lambda c: c.kind != "longrope", "another kind", "set factors"),
        **dict.fromkeys(_FOR_YARN, _YARN),
    }
)
_AHEAD = Need(lambda c: c.mtp_depth > 0, "modules that predict tokens further on", "set mtp_depth")
_ROPE = Need(lambda c: c.positions == "rope", "rotary positions", "set positions to rope")

_DENSE = Need(
    lambda c: c.moe is None or c.dense_layers > 0 or bool(c.dense_at),
    "a feed-forward layer, where all layers are experts",
    "set moe.expert_dim, which is the width of an expert, or dense_layers",
)

GPT_NEEDS: Needs = MappingProxyType(
    {
        "mlp_dim": _DENSE,
        "mlp_bias": replace(_DENSE, fix="set moe.expert_bias, or dense_layers"),
        "rope_theta": _ROPE,
        "rope_scaling": _ROPE,
        **needs_under("rope_scaling", _SCALING),
        "rope_interleaved": Need(lambda c: c.kv_rank > 0, "latent attention", "set kv_rank"),
        **dict.fromkeys(
            ("qkv_bias", "out_bias"),
            Need(
                lambda c: not c.kv_rank, "attention that is not latent", "set bias, or kv_rank to 0"
            ),
        ),
        "temperature_seq": Need(
            lambda c: c.temperature > 0, "temperatures of queries", "set temperature"
        ),
        "latent_eps": Need(lambda c: c.kv_rank > 0, "latent attention", "set kv_rank"),
        "mtp_weight": _AHEAD,
        "mtp_detached": _AHEAD,
        "mtp_repeated": Need(
            lambda c: c.mtp_depth > 1,
            "several modules that predict tokens further on",
            "set mtp_depth to 2 or more",
        ),
        **needs_under("moe", MOE_NEEDS),
    }
)
"""The needs of fields of a `GPTConfig`, to have an effect, beside its own checks."""


@dataclass(frozen=True)
class Named(Mapping[str, Config]):
    """Named configs; an unknown name is an error that suggests the nearest.

    Attributes:
        configs: by name.
        schemes: what makes a config of a name that begins with the scheme and a colon.
    """

    configs: Mapping[str, Config]
    schemes: Mapping[str, Callable[[str], Config]] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<{len(self.configs)} configs: {', '.join(self.configs)}>"

    def __getitem__(self, name: str) -> Config:
        if (make := self._find_scheme(name)) is not None:
            return make(name)
        if name not in self.configs:
            fix = on_hub(name).replace(
                "give that folder", "functron convert hf:FOLDER run:RUN, which --resume trains"
            )
            if str(name).startswith(("hf:", "megatron:")):
                fix = f"functron convert {name} run:RUN, which --resume --out RUN trains"
            raise ValueError(f"model: got {name!r}; {fix or nearest(name, self.configs)}")
        return self.configs[name]

    def __contains__(self, name: object) -> bool:
        return name in self.configs or self._find_scheme(name) is not None

    def _find_scheme(self, name: object) -> Callable[[str], Config] | None:
        scheme, colon, rest = str(name).partition(":")
        return self.schemes.get(scheme) if colon and rest else None

    def __iter__(self) -> Iterator[str]:
        return iter(self.configs)

    def __len__(self) -> int:
        return len(self.configs)


@shows_differences
@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """The options that all text models have.

    Attributes:
        vocab_size: token ids are 0 to ``vocab_size - 1``.
        vocab_multiple: the vocabulary is padded to a multiple of it; every tensor-parallel size
            that divides it fits, and the padding takes no part in the loss.
        dropout: rate on the embedding and on what each sublayer adds. Attention probabilities are
            not dropped.
        dtype: of parameters and activations: ``float32``, ``float64``, ``bfloat16`` or ``float16``.
    """

    vocab_size: int = 256
    vocab_multiple: int = 384
    dropout: float = 0.0
    dtype: Dtype = setting("float32", box="precision")

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding: `vocab_size` rounded up to a multiple of `vocab_multiple`."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch's."""
        return getattr(torch, self.dtype)


@shows_differences
@dataclass(frozen=True, kw_only=True)
class GPTConfig(MLAConfig, TextConfig):
    """Architecture of a decoder: the options of its attention, and those of all else.

    `functron.nn.self_attention` and `functron.nn.mla` read it as it is.

    Attributes:
        num_layers: transformer blocks.
        mlp_dim: width of the feed-forward hidden layer.
        max_seq: longest sequence, in tokens.
        norm: ``"rms"``, ``"layer"``, ``"scaled_layer"``, which has no bias (Cohere), or
            ``"bare_layer"``, which has no parameters (OLMo 1); of sublayers and at the end.
        sublayer_norms: ``"before"`` each sublayer, of what it reads; ``"after"`` it, of what it
            adds to the stream (OLMo 2); ``"both"`` (Gemma 2 and 3); ``"shared"``: parallel
            sublayers read one norm (GPT-J; Cohere).
        parallel_residual: attention and the feed-forward layer both read the stream before the
            block, and are added to it together (GPT-J; GPT-NeoX).
        residual_scale: multiplies what sublayers add to the stream (Granite).
        activation: of feed-forward layers and experts; "clamped_swiglu" (GPT-OSS) of experts alone,
            "xielu", with two learned numbers a layer (Apertus), of layers without experts or gate.
        gated: multiply the activation by a second projection (SwiGLU with silu).
        mlp_bias: biases on feed-forward layers, also without `bias`.
        positions: ``"rope"``, ``"learned"`` or ``"none"``.
        rope_theta: base of the rotary frequencies.
        local_rope_theta: base of the rotary frequencies in layers with a window, which
            `rope_scaling` leaves as they are (Gemma 3); 0: `rope_theta`, with its scaling.
        rope_fraction: fraction of the dims of a head, the first ones, that are rotated
            (Nemotron-4).
        rope_sections: how many pairs of rotated dims each of a token's position ids turns: (16, 24,
            24) for time, height and width in Qwen2-VL. A batch's ``positions`` are then ``[batch,
            seq, sections]``, or ``[batch, seq]`` where all are equal, as they are of text. (): a
            token has one position.
        nope_every: every n-th layer, counted from 1, has no rotary positions (SmolLM3); 0: none.
        window: sliding window: a query attends to this many keys at most, its own among them
            (Beltagy et al. 2020); 0: to all before it.
        global_every: of layers with a window, every n-th one, counted from 1, attends to all keys
            (2 in GPT-OSS); 0: none.
        temperature: queries at position t are multiplied by 1 + temperature ln(1 + floor(t /
            temperature_seq)) (Llama 4; Ministral 3); 0: they are not.
        temperature_seq: after so many tokens that factor grows.
        score_cap: soft cap of attention scores: s becomes cap tanh(s / cap) (Gemma 2); 0: none. On
            CPUs it is computed by the formula, in chunks.
        logit_cap: soft cap of the logits, by the same formula; 0: none.
        moe: options of mixture-of-experts layers, in place of feed-forward layers; None: no
            experts.
        dense_layers: number of leading layers with a feed-forward layer, where the others have
            experts.
        dense_at: further layers with a feed-forward layer, where layers alternate, by their
            numbers, counted from 0, in order: (2, 4, 6) after one leading layer (Llama 4; ERNIE).
        mtp_depth: modules of multi-token prediction, each of which predicts one token further ahead
            (DeepSeek-V3, section 2.2); where layers differ, their blocks have rope and no window.
        mtp_weight: weight of the mean of their losses.
        mtp_repeated: all depths are one module with the same parameters, so that there is one, and
            it may predict further than it was trained to (Megatron's --mtp-use-repeated-layer).
        mtp_detached: gradients of their losses are those of their own parameters alone: the model
            before them, its embedding and its unembedding learn by the next token, as without them
            (Megatron's --mtp-detach-heads). From one depth to the next gradients do flow.
        fused_projections: queries, keys and values are one product of one matrix, and gate and up
            another, of experts too: fewer launches, and x is read once. Initial values, results,
            checkpoints and files of other formats are the same. "auto": in a run on GPUs, where
            nothing looks at single matrices, such as Adafactor, SOAP, LoRA and quantised products.
            Latent attention stays as it is.
        tied: one matrix for embedding and unembedding.
        unembed_bias: a bias on the logits, before `logit_cap` (Phi).
        embed_scale: multiplies token embeddings, not the unembedding; sqrt(embed_dim) in Gemma.
        logit_scale: multiplies the logits, before `logit_cap` (Granite; Cohere).
        z_loss: weight of the squared log-partition function of the logits in the loss.
        init_stddev: standard deviation of initial matrices; of those that write to the residual
            stream, divided by sqrt(2 num_layers) (Radford et al. 2019).
        mup_base_dim: the `embed_dim` at which learning rates were tuned (maximal update
            parametrization; see `functron.models.mup`); 0: the standard parametrization.
        mup_base_head_dim: the width of heads at `mup_base_dim`; 0: `head_dim`, where heads grow in
            number.
        fp32_residual: the residual stream is float32, where parameters are of 16 bits: results of
            sublayers are added without rounding, and norms read float32; sublayers compute in the
            parameters' dtype (Megatron's --fp32-residual-connection). Stages of a pipeline send
            twice the bytes, and sums are not computed in one pass with the norms after them.
    """

    num_layers: int = 4
    embed_dim: int = 256
    num_heads: int = 8
    mlp_dim: int = 1024
    max_seq: int = 1024
    norm: nn.NormKind = "rms"
    norm_eps: float = 1e-5
    sublayer_norms: Norms = "before"
    parallel_residual: bool = False
    residual_scale: float = 1.0
    activation: Literal[ExpertActivation, "xielu"] = "silu"
    gated: bool = True
    mlp_bias: bool = False
    positions: Positions = "rope"
    rope_theta: float = 10000.0
    local_rope_theta: float = 0.0
    rope_fraction: float = 1.0
    rope_sections: tuple[int, ...] = ()
    nope_every: int = 0
    window: int = 0
    global_every: int = 0
    temperature: float = 0.0
    temperature_seq: int = 8192
    score_cap: float = 0.0
    logit_cap: float = 0.0
    moe: MoEConfig | None = None
    dense_layers: int = 0
    dense_at: tuple[int, ...] = ()
    mtp_depth: int = 0
    mtp_weight: float = 0.3
    mtp_repeated: bool = False
    mtp_detached: bool = False
    tied: bool = False
    unembed_bias: bool = False
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    z_loss: float = 0.0
    init_stddev: float = 0.02
    mup_base_dim: int = 0
    mup_base_head_dim: int = 0
    fp32_residual: bool = False

    @property
    def stream_dtype(self) -> torch.dtype:
        """The dtype of the residual stream."""
        own = self.torch_dtype
        return torch.promote_types(own, torch.float32) if self.fp32_residual else own

    def __post_init__(self):
        raise_problems("invalid GPTConfig", self._problems())

    def _problems(self) -> list[Problem]:
        sizes = ("vocab_size", "num_layers", "embed_dim", "num_heads", "mlp_dim", "max_seq")
        sizes = (*sizes, "temperature_seq")
        found = [
            Problem(name, str(getattr(self, name)), "at least 1")
            for name in (*sizes, "vocab_multiple")
            if getattr(self, name) < 1
        ]
        if self.head_dim < 0 or self.num_kv_heads < 0:
            got = f"{self.head_dim} and {self.num_kv_heads}"
            found.append(Problem("head_dim and num_kv_heads", got, "at least 0 (0: derived)"))
        found += [
            Problem(name, str(getattr(self, name)), "at least 0")
            for name in _NOT_NEGATIVE
            if not 0 <= getattr(self, name) < math.inf
        ]
        misfits = [] if found else self._misfits()
        found += choice_problems(self)
        if not 0 <= self.dropout < 1:
            found.append(Problem("dropout", str(self.dropout), "at least 0 and below 1"))
        found += [
            Problem(name, str(value), "a positive number", "1 leaves all as it is")
            for name in ("embed_scale", "residual_scale", "logit_scale")
            if not 0 < (value := getattr(self, name)) < math.inf
        ]
        return found + misfits

    def _misfits(self) -> list[Problem]:
        """Sizes that are fine one by one and do not fit together."""
        found = []
        if not self.head_dim and self.embed_dim % self.num_heads:
            wanted, fix = f"a multiple of num_heads={self.num_heads}", "change one, or set head_dim"
            found.append(Problem("embed_dim", str(self.embed_dim), wanted, fix))
        if self.num_heads % self.kv_heads:
            wanted = f"a divisor of {self.num_heads}"
            found.append(Problem("num_kv_heads", str(self.kv_heads), wanted))
        if self.global_every and not self.window:
            got = f"{self.global_every} without a window"
            found.append(Problem("global_every", got, "0", "set window, or leave it out"))
        if self.dense_layers > (self.num_layers if self.moe else 0):
            got = f"{self.dense_layers} of {self.num_layers} layers"
            wanted = "at most num_layers, and 0 without moe: all layers are dense then"
            found.append(Problem("dense_layers", got, wanted, "lower it, or set moe"))
        found += self._alternating_misfits()
        if self.activation == "clamped_swiglu" and (self.moe is None or "dense" in self.stacks):
            fix = "use silu, or make all layers ones of experts"
            got = f"{self.activation!r} on layers without experts"
            found.append(Problem("activation", got, "one of feed-forward layers", fix))
        if self.activation == "xielu" and (self.moe is not None or self.gated):
            got, wanted = "'xielu' with a gate or experts", "one that gates or experts have"
            found.append(Problem("activation", got, wanted, "use silu, or set gated=False"))
        found += self._latent_misfits() + self._rope_misfits()
        found += [] if found else self._mup_misfits()
        norms = self.sublayer_norms
        if norms not in ("before", "shared") if self.parallel_residual else norms == "shared":
            got = f"{norms!r} with parallel_residual={self.parallel_residual}"
            wanted = "'before' or 'shared' of parallel sublayers, 'shared' of no others"
            found.append(Problem("sublayer_norms", got, wanted, "change one of them"))
        found += [
            Problem(name, "True without qk_norm", "False", "set qk_norm, or leave it out")
            for name in ("qk_norm_across", "qk_norm_last")
            if getattr(self, name) and not self.qk_norm
        ]
        if self.qk_norm_kind != "rms" and (not self.qk_norm or self.qk_norm_across):
            got = f"{self.qk_norm_kind!r} with qk_norm={self.qk_norm}"
            fix = "set qk_norm, not qk_norm_across, or leave it out"
            found.append(Problem("qk_norm_kind", got, "'rms', or norms of single heads", fix))
        if self.fused_projections is True and self.kv_rank and not self.gated:
            got, wanted = "True", "False: latent attention and layers without a gate join nothing"
            found.append(Problem("fused_projections", got, wanted, "leave it out"))
        if self.norm == "bare_layer" and self.zero_centered_norm and not self.qk_norm:
            got = "True of norms without a scale"
            found.append(Problem("zero_centered_norm", got, "False", "leave it out"))
        return found

    def _alternating_misfits(self) -> list[Problem]:
        """Numbers of dense layers that name none, or one that is dense already."""
        given, first = self.dense_at, self.dense_layers
        if not given:
            return []
        if self.moe is None:
            fix = "set moe, or leave it out: all layers are dense"
            return [Problem("dense_at", str(given), "() without moe", fix)]
        rising = all(a < b for a, b in itertools.pairwise(given))
        if rising and given[0] > first and given[-1] < self.num_layers:
            return []
        fix = "count leading dense layers by dense_layers"
        wanted = f"rising numbers from {first + 1} to {self.num_layers - 1}"
        return [Problem("dense_at", str(given), f"{wanted}: layer {first} has experts", fix)]

    def _rope_misfits(self) -> list[Problem]:
        """Rotary options that fit neither each other nor the heads."""
        found, turns = [], self.positions == "rope" and not self.kv_rank
        if self.temperature and self.rope_sections:
            got, wanted = str(self.temperature), "0 where tokens have several positions"
            found.append(Problem("temperature", got, wanted, "leave it out"))
        found += [
            Problem(name, str(getattr(self, name)), f"{default} without rope over a head's dims")
            for name, default in _ROPE_DEFAULTS
            if not turns and getattr(self, name) != default
        ]
        if not turns:
            return found
        if self.local_rope_theta and not self.window:
            got = f"{self.local_rope_theta} without a window"
            found.append(Problem("local_rope_theta", got, "0", "set window, or leave it out"))
        if not 0 < self.rope_fraction <= 1 or self.rotated_dims < 2:
            got, wanted = str(self.rope_fraction), "above 0, for 2 dims at least, and at most 1"
            found.append(Problem("rope_fraction", got, wanted))
        elif self.rotated_dims % 2:
            got = f"{self.rotated_dims} rotated dims"
            found.append(Problem("head_dim", got, "an even number, for rope"))
        elif factors := self._missing_factors():
            found.append(factors)
        elif sections := self.rope_sections:
            pairs = self.rotated_dims // 2
            if min(sections) < 1 or sum(sections) != pairs or len(sections) < 2:
                wanted = (
                    f"two numbers or more, each at least 1, that sum to the {pairs} rotated pairs"
                )
                found.append(Problem("rope_sections", str(tuple(sections)), wanted))
        return found

    def _missing_factors(self) -> Problem | None:
        """Whether the factors of longrope are not one for each rotated pair."""
        scaling, size = self.rope_scaling, self.rope_head_dim if self.kv_rank else self.rotated_dims
        given = () if scaling is None else scaling.factors
        wanted = size // 2 if scaling is not None and scaling.kind == "longrope" else 0
        if len(given) == wanted and all(0 < each < math.inf for each in given):
            return None
        words = f"{wanted} positive numbers, one for each rotated pair" if wanted else "none"
        return Problem("rope_scaling.factors", f"{len(given)} of them", words, "change its kind")

    def _mup_misfits(self) -> list[Problem]:
        """Options that do not fit a base width."""
        base, head = self.mup_base_dim, self.mup_base_head_dim
        if not base:
            wanted, fix = "0 without mup_base_dim", "set mup_base_dim, or leave it out"
            return [Problem("mup_base_head_dim", str(head), wanted, fix)] if head else []
        found = []
        for name in ("kv_rank", "attention_scale"):
            value = getattr(self, name)
            if head and value:
                wanted, fix = f"0 with {name}={value}", "leave it out: let heads grow in number"
                if name != "kv_rank":
                    fix += ", or give attention_scale as sqrt(base) / head_dim"
                found.append(Problem("mup_base_head_dim", str(head), wanted, fix))
        found += self._mup_head_misfits()
        grown = math.sqrt(self.embed_dim)
        if self.mup_width != 1 and math.isclose(self.embed_scale, grown, rel_tol=1e-6):
            got, wanted = f"{self.embed_scale:g}, sqrt(embed_dim)", "the same at every width"
            fix = f"set it to {math.sqrt(base):g}, that of the base"
            found.append(Problem("embed_scale", got, wanted, fix))
        return found

    def _mup_head_misfits(self) -> list[Problem]:
        """Problems if the heads of the base are ambiguous."""
        base, head = self.mup_base_dim, self.mup_base_head_dim
        told = head or self.head_dim or self.attention_scale  # or scores do not ask
        if self.mup_width != 1 and not told:
            # the number or the width of heads may have been left, and all would differ
            got = f"0 with head_dim = embed_dim / num_heads = {self.head_size}"
            narrow = f", or to {base // self.num_heads} if they were narrower"
            fix = f"set it to {self.head_size} if there were fewer heads" + narrow
            if self.kv_rank:
                fix = "set head_dim, the same at every width"
            return [Problem("mup_base_head_dim", got, "the width of heads at mup_base_dim", fix)]
        heads = self.num_heads * self.head_size * base
        each = self.embed_dim * (head or self.head_size)
        if heads % each and not self.kv_rank:
            got = f"{base}: {heads / each:g} heads of {head or self.head_size} dims at that width"
            wanted = "a whole number of heads, as all of them together grow as embed_dim does"
            fix = "set mup_base_head_dim to the width of heads there, or change num_heads"
            return [Problem("mup_base_dim", got, wanted, fix)]
        return []

    def _latent_misfits(self) -> list[Problem]:
        """Options that do not fit latent attention, or need it."""
        wrong = {"positions": self.positions != "rope", "window": bool(self.window)}
        wrong |= {"temperature": self.temperature > 0, "qk_norm_last": self.qk_norm_last}
        found = [
            Problem(name, repr(getattr(self, name)), "its default with kv_rank", "leave it out")
            for name, bad in wrong.items()
            if bad and self.kv_rank
        ]
        return found + latent_problems(self)

    @property
    def has_details(self) -> bool:
        """Whether the loss is more than that of the next token."""
        return self.moe is not None or self.mtp_depth > 0

    @property
    def random(self) -> bool:
        """Whether training draws random numbers."""
        return self.dropout > 0 or (self.moe is not None and self.moe.jitter > 0)

    @property
    def stacks(self) -> dict[str, range | tuple[int, ...]]:
        """The layers of each stack of equal ones, by its name in the parameters."""
        first = self.dense_layers if self.moe else 0
        dense, rest = (*range(first), *self.dense_at), range(first, self.num_layers)
        if not self.dense_at:
            found = {"dense": range(first), "blocks": rest}
        else:
            found = {"dense": dense, "blocks": tuple(i for i in rest if i not in {*dense})}
        return {name: layers for name, layers in found.items() if layers}

    def runs(self, layers: range) -> list[tuple[str, range]]:
        """These layers in order, as runs of consecutive ones of the same stack of `stacks`."""
        dense = {*self.stacks.get("dense", ())}
        kinds = itertools.groupby(layers, lambda layer: "dense" if layer in dense else "blocks")
        found = [(name, list(run)) for name, run in kinds]
        return [(name, range(run[0], run[-1] + 1)) for name, run in found]

    @property
    def mtp_modules(self) -> int:
        """How many modules of multi-token prediction have parameters: 1 where it is repeated."""
        return min(self.mtp_depth, 1) if self.mtp_repeated else self.mtp_depth

    @property
    def num_routers(self) -> int:
        """How many layers of experts there are, those of `mtp_depth` last."""
        return len(self.stacks.get("blocks", ())) + self.mtp_depth if self.moe else 0

    @property
    def windows(self) -> tuple[int, ...]:
        """The window of each layer; 0: none."""
        every = self.global_every
        wide = (every and (layer + 1) % every == 0 for layer in range(self.num_layers))
        return tuple(0 if each else self.window for each in wide)

    @property
    def rotated_dims(self) -> int:
        """How many of a head's dims are rotated."""
        return int(self.head_size * self.rope_fraction)

    @property
    def unrotated(self) -> tuple[bool, ...]:
        """Whether each layer has no rotary positions, where others have them."""
        every = self.nope_every
        return tuple(bool(every) and (i + 1) % every == 0 for i in range(self.num_layers))

    @property
    def mup_width(self) -> float:
        """m = embed_dim / mup_base_dim; 1 in the standard parametrization."""
        return self.embed_dim / self.mup_base_dim if self.mup_base_dim else 1.0

    @property
    def mup_score_scale(self) -> float:
        """sqrt(base head_dim) / head_dim, what scores are multiplied by; 0: as without muP."""
        base, size = self.mup_base_head_dim, self.head_size
        return math.sqrt(base) / size if base not in (0, size) else 0.0

    @property
    def score_scale(self) -> float:
        """The factor of attention scores: `attention_scale`, or muP's; 0: 1 / sqrt(head_size)."""
        return self.attention_scale or self.mup_score_scale


_SIZES = ("num_layers", "embed_dim", "num_heads", "mlp_dim")
_GROUPED = ("num_layers", "embed_dim", "num_heads", "num_kv_heads", "mlp_dim")
_EXPERTS = ("num_layers", "embed_dim", "num_heads", "moe")


def _family(names: Sequence[str], **settings: Any) -> Callable[..., GPTConfig]:
    """``(*sizes, **changes) -> GPTConfig`` of a family with these settings.

    `names` are the fields that differ from model to model, in the order of `sizes`.
    """

    def config(*sizes: Any, **changes: Any) -> GPTConfig:
        return GPTConfig(**{**settings, **dict(zip(names, sizes, strict=True)), **changes})

    return config


_plain = _family(_SIZES)
_qwen25 = _family(
    _GROUPED, vocab_size=152064, max_seq=131072, rope_theta=1e6, norm_eps=1e-6, qkv_bias=True,
)  # fmt: skip
_qwen3 = _family(
    _SIZES, vocab_size=151936, num_kv_heads=8, head_dim=128, max_seq=40960, rope_theta=1e6,
    norm_eps=1e-6, qk_norm=True,
)  # fmt: skip
_olmo = _family(_SIZES, vocab_size=50304, max_seq=2048, norm="bare_layer")
_olmo2 = _family(
    _SIZES, vocab_size=100352, max_seq=4096, rope_theta=500000.0, norm_eps=1e-6,
    sublayer_norms="after", qk_norm=True, qk_norm_across=True,
)  # fmt: skip
_glm = _family(
    _SIZES, vocab_size=151552, num_kv_heads=2, head_dim=128, max_seq=131072, norm_eps=1.5625e-7,
    qkv_bias=True, rope_pairs="neighbours", rope_fraction=0.5,
)  # fmt: skip
_nemotron = _family(
    _SIZES, vocab_size=256000, num_kv_heads=8, max_seq=4096, norm="layer", zero_centered_norm=True,
    activation="relu2", gated=False, rope_fraction=0.5,
)  # fmt: skip


def _gemma(num_layers: int, embed_dim: int, *sizes: int, **changes: Any) -> GPTConfig:
    family = _family(
        _GROUPED, vocab_size=256000, head_dim=256, max_seq=8192, norm_eps=1e-6,
        activation="gelu_tanh", zero_centered_norm=True, embed_scale=embed_dim**0.5, tied=True,
    )  # fmt: skip
    return family(num_layers, embed_dim, *sizes, **changes)


def _gemma2(*sizes: int, scalar: int = 256, **changes: Any) -> GPTConfig:
    options: dict[str, Any] = {
        "sublayer_norms": "both", "attention_scale": scalar**-0.5, "score_cap": 50.0,
        "logit_cap": 30.0, "window": 4096, "global_every": 2,
    }  # fmt: skip
    return _gemma(*sizes, **options, **changes)


def _gemma3(*sizes: int, scalar: int = 256, **changes: Any) -> GPTConfig:
    options: dict[str, Any] = {
        "vocab_size": 262208, "max_seq": 131072, "sublayer_norms": "both", "qk_norm": True,
        "attention_scale": scalar**-0.5, "window": 1024, "global_every": 6, "rope_theta": 1e6,
        "local_rope_theta": 1e4, "rope_scaling": nn.RopeScaling(8.0, kind="linear"),
    }  # fmt: skip
    return _gemma(*sizes, **{**options, **changes})


_MISTRAL: Mapping[str, Any] = MappingProxyType(
    {"vocab_size": 32000, "num_kv_heads": 8, "max_seq": 32768, "window": 4096}
)
_SMALL: Mapping[str, Any] = MappingProxyType({"vocab_size": 151936, "tied": True, "max_seq": 32768})
_TINY: Mapping[str, Any] = MappingProxyType({"vocab_size": 256, "max_seq": 256})

DENSE_PRESETS: Mapping[str, GPTConfig] = MappingProxyType(
    {
        "mistral-7b": _plain(32, 4096, 32, 14336, **_MISTRAL),
        "qwen2.5-0.5b": _qwen25(24, 896, 14, 2, 4864, **_SMALL),
        "qwen2.5-1.5b": _qwen25(28, 1536, 12, 2, 8960, **{**_SMALL, "max_seq": 131072}),
        "qwen2.5-3b": _qwen25(36, 2048, 16, 2, 11008, **_SMALL),
        "qwen2.5-7b": _qwen25(28, 3584, 28, 4, 18944),
        "qwen2.5-14b": _qwen25(48, 5120, 40, 8, 13824, norm_eps=1e-5),
        "qwen2.5-32b": _qwen25(64, 5120, 40, 8, 27648, norm_eps=1e-5),
        "qwen2.5-72b": _qwen25(80, 8192, 64, 8, 29568, norm_eps=1e-5),
        "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, tied=True),
        "qwen3-1.7b": _qwen3(28, 2048, 16, 6144, tied=True),
        "qwen3-4b": _qwen3(36, 2560, 32, 9728, tied=True),
        "qwen3-8b": _qwen3(36, 4096, 32, 12288),
        "qwen3-14b": _qwen3(40, 5120, 40, 17408),
        "qwen3-32b": _qwen3(64, 5120, 64, 25600),
        "gemma-2b": _gemma(18, 2048, 8, 1, 16384),
        "gemma-7b": _gemma(28, 3072, 16, 16, 24576),
        "gemma2-tiny": _gemma2(2, 64, 4, 2, 192, scalar=16, head_dim=16, **_TINY),
        "gemma2-2b": _gemma2(26, 2304, 8, 4, 9216),
        "gemma2-9b": _gemma2(42, 3584, 16, 8, 14336),
        "gemma2-27b": _gemma2(46, 4608, 32, 16, 36864, scalar=144, head_dim=128),
        "gemma3-1b": _gemma3(26, 1152, 4, 1, 6912, vocab_size=262144, max_seq=32768, window=512,
                             rope_scaling=None),
        "gemma3-4b": _gemma3(34, 2560, 8, 4, 10240),
        "gemma3-12b": _gemma3(48, 3840, 16, 8, 15360),
        "gemma3-27b": _gemma3(62, 5376, 32, 16, 21504, scalar=168, head_dim=128),
        "olmo-tiny": _olmo(2, 64, 4, 192, qkv_clip=8.0, **_TINY),
        "olmo-1b": _olmo(16, 2048, 16, 8192, tied=True),
        "olmo-7b": _olmo(32, 4096, 32, 11008),
        "olmo2-7b": _olmo2(32, 4096, 32, 11008),
        "olmo2-13b": _olmo2(40, 5120, 40, 13824),
        "olmo2-32b": _olmo2(64, 5120, 40, 27648, num_kv_heads=8),
        "phi3-mini": _plain(32, 3072, 32, 8192, vocab_size=32064, max_seq=4096, window=2047),
        "glm-tiny": _glm(2, 64, 4, 192, head_dim=16, **_TINY),
        "glm4-9b": _glm(40, 4096, 32, 13696),
        "nemotron-tiny": _nemotron(2, 64, 4, 192, num_kv_heads=2, **_TINY),
        "nemotron-4-15b": _nemotron(32, 6144, 48, 24576),
        "nemotron-4-340b": _nemotron(96, 18432, 96, 73728),
    }
)  # fmt: skip
"""Named architectures, with their papers' and files' sizes; "tiny" ones to try."""


def _gpt2(num_layers: int, embed_dim: int, num_heads: int, **changes: Any) -> GPTConfig:
    family = _family(
        _SIZES, vocab_size=50257, max_seq=1024, norm="layer", activation="gelu_tanh", gated=False,
        bias=True, positions="learned", tied=True,
    )  # fmt: skip
    return family(num_layers, embed_dim, num_heads, 4 * embed_dim, **changes)


_llama3 = _family(_SIZES, vocab_size=128256, num_kv_heads=8, max_seq=8192, rope_theta=500000.0)


def _mixtral(*sizes: int, **changes: Any) -> GPTConfig:
    # transformers' coefficient 0.02 counts the load of both experts of a token: twice ours
    moe = MoEConfig(8, 2, sizes[3], renormalise=True, aux_loss=0.04, aux="batch")
    family = _family(
        _SIZES, vocab_size=32000, num_kv_heads=8, max_seq=32768, rope_theta=1e6, moe=moe
    )
    return family(*sizes, **changes)


def _qwen3_moe(num_layers: int, embed_dim: int, *sizes: Any, **changes: Any) -> GPTConfig:
    family = _family(
        _EXPERTS, vocab_size=151936, num_kv_heads=4, head_dim=128, mlp_dim=3 * embed_dim,
        max_seq=40960, rope_theta=1e6, norm_eps=1e-6, qk_norm=True,
    )  # fmt: skip
    return family(num_layers, embed_dim, *sizes, **changes)


_gpt_oss = _family(
    ("num_layers", "moe"), vocab_size=201088, embed_dim=2880, num_heads=64, num_kv_heads=8,
    head_dim=64, mlp_dim=2880, max_seq=131072, activation="clamped_swiglu", bias=True,
    rope_theta=150000.0, window=128, global_every=2, sinks=True,
    rope_scaling=nn.RopeScaling(32.0, original_max_seq=4096, kind="yarn", truncate=False),
)  # fmt: skip
_deepseek = _family(
    _EXPERTS, vocab_size=129280, head_dim=128, q_rank=1536, kv_rank=512, rope_head_dim=64,
    v_head_dim=128, mlp_dim=18432, max_seq=163840, norm_eps=1e-6, dense_layers=3, mtp_depth=1,
    rope_scaling=nn.RopeScaling(
        40.0, original_max_seq=4096, kind="yarn", mscale=1.0, mscale_all_dim=1.0
    ),
)  # fmt: skip
_V3 = MoEConfig(
    256, 8, 2048, score="sigmoid", renormalise=True, scale=2.5, num_groups=8, top_groups=4,
    balance_bias=True, aux_loss=1e-4, shared_dim=2048,
)  # fmt: skip
_OSS = MoEConfig(32, 4, 2880, normalise="after", router_bias=True, expert_bias=True, aux_loss=4e-2)
_QWEN3 = MoEConfig(128, 8, 768, renormalise=True, aux_loss=8e-3, aux="batch")
_LONG = {"rope_scaling": nn.RopeScaling(), "max_seq": 131072}

PRESETS: Mapping[str, GPTConfig] = Named(
    {
        "tiny": GPTConfig(),
        "gpt2-tiny": _gpt2(2, 64, 4, vocab_size=256, max_seq=256),
        "gpt2": _gpt2(12, 768, 12),
        "gpt2-medium": _gpt2(24, 1024, 16),
        "gpt2-large": _gpt2(36, 1280, 20),
        "gpt2-xl": _gpt2(48, 1600, 25),
        "gpt3-175b": _gpt2(96, 12288, 96, max_seq=2048),
        # Narayanan et al. 2021 (SC21), table 1, last row
        "gpt-1t": _gpt2(128, 25600, 160, vocab_size=51200, vocab_multiple=1024, max_seq=2048),
        "llama3-tiny": _llama3(2, 64, 8, 192, num_kv_heads=4, vocab_size=256, max_seq=256),
        "llama-tiny": _llama3(2, 64, 4, 192, num_kv_heads=2, vocab_size=256, max_seq=131072),
        "llama3-1b": _llama3(16, 2048, 32, 8192, tied=True, max_seq=131072,
                             rope_scaling=nn.RopeScaling(factor=32.0)),
        "llama3-8b": _llama3(32, 4096, 32, 14336),
        "llama3-70b": _llama3(80, 8192, 64, 28672),
        "llama3-405b": _llama3(126, 16384, 128, 53248, **_LONG),
        "mixtral-tiny": _mixtral(2, 64, 8, 96, num_kv_heads=4, **_TINY),
        "mixtral-8x7b": _mixtral(32, 4096, 32, 14336),
        "mixtral-8x22b": _mixtral(56, 6144, 48, 16384, max_seq=65536),
        "qwen3-moe-tiny": _qwen3_moe(
            2, 64, 8, replace(_QWEN3, num_experts=8, top_k=2, expert_dim=48), head_dim=8, **_TINY
        ),
        "qwen3-30b-a3b": _qwen3_moe(48, 2048, 32, _QWEN3),
        "qwen3-235b-a22b": _qwen3_moe(94, 4096, 64, replace(_QWEN3, expert_dim=1536)),
        "gpt-oss-tiny": _gpt_oss(
            2, replace(_OSS, num_experts=8, top_k=2, expert_dim=64), embed_dim=64, num_heads=8,
            num_kv_heads=2, head_dim=8, mlp_dim=64, window=16, **_TINY,
        ),
        "gpt-oss-20b": _gpt_oss(24, _OSS),
        "gpt-oss-120b": _gpt_oss(36, replace(_OSS, num_experts=128)),
        "deepseek-v3-tiny": _deepseek(
            3, 64, 8, replace(_V3, num_experts=8, top_k=2, expert_dim=32, shared_dim=32,
                              num_groups=4, top_groups=2),
            dense_layers=1, head_dim=8, q_rank=32, kv_rank=16, rope_head_dim=8, v_head_dim=8,
            mlp_dim=192, **_TINY,
        ),
        "deepseek-v3": _deepseek(61, 7168, 128, _V3),
        **DENSE_PRESETS,
    }
)  # fmt: skip
"""Named architectures: "tiny" trains on a laptop; the others have their papers' sizes."""
