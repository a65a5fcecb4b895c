"""Schemas of a checkpoint's config files: types, ranges and relations, per model family.

Defaults are those of transformers' config classes. Sizes have bounds far above every released
model, so that values computed from them do not overflow.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationError
from typing_extensions import override

from mtp_plugin.config.frozen import thaw
from mtp_plugin.config.messages import got, join
from mtp_plugin.hosts.embedded.models.rope_schema import (
    ROPE_MODELS,
    ROPE_TYPES,
    CheckpointModel,
    Positions,
    Problem,
    Rope,
    Share,
    problems_of,
)

MAX_LAYERS = 10_000
MAX_MTP_LAYERS = 1_000

Width = Annotated[int, Field(ge=1, le=2**20)]
Heads = Annotated[int, Field(ge=1, le=2**14)]
Experts = Annotated[int, Field(ge=1, le=2**16)]
TokenId = Annotated[int, Field(ge=0)]
Activation = Literal[
    "silu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2",
    "mish", "tanh", "sigmoid",
]  # fmt: skip
Dtype = Literal["float32", "float16", "bfloat16"]


def _tuple_from_list(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _none_below_zero(value: Any) -> Any:
    # released configs write -1 where there is no padding
    return None if type(value) is int and value == -1 else value


TokenIds = Annotated[
    tuple[TokenId, ...],
    BeforeValidator(lambda value: (value,) if type(value) is int else _tuple_from_list(value)),
]
EndIds = Annotated[TokenIds | None, Field(description="a token id, a list of them or null")]
Mapped = Annotated[dict[str, Any] | None, Field(description="a mapping or null")]
Names = Annotated[tuple[str, ...], BeforeValidator(_tuple_from_list)]


class DecoderConfig(CheckpointModel):
    """`config.json` of any family."""

    model_type: str
    architectures: Names | None = None
    vocab_size: Annotated[int, Field(ge=1, le=2**24)]
    hidden_size: Width
    intermediate_size: Width
    num_hidden_layers: Annotated[int, Field(ge=1, le=MAX_LAYERS)]
    num_attention_heads: Heads
    num_key_value_heads: Heads | None = None
    hidden_act: Activation = "silu"
    max_position_embeddings: Positions
    rms_norm_eps: Share = 1e-6
    rope_theta: Annotated[float, Field(gt=1, le=1e15)] | None = None
    rope_scaling: Mapped = None
    rope_parameters: Mapped = None
    partial_rotary_factor: Share | None = None
    tie_word_embeddings: bool = False
    attention_dropout: Annotated[float, Field(ge=0, le=1)] | None = 0.0
    initializer_range: Annotated[float, Field(ge=0, le=100)] = 0.02
    use_cache: bool = True
    bos_token_id: Annotated[TokenId | None, BeforeValidator(_none_below_zero)] = None
    eos_token_id: EndIds = None
    pad_token_id: Annotated[TokenId | None, BeforeValidator(_none_below_zero)] = None
    dtype: Dtype | None = None
    torch_dtype: Dtype | None = None

    rotary_share: ClassVar[float | None] = None
    """Share of a head that is rotated where the file does not say; None: always all of it."""
    read_here: ClassVar[frozenset[str]] = frozenset(
        {"dtype", "torch_dtype", "rope_theta", "rope_scaling", "partial_rotary_factor"}
    )
    """Keys that are not passed to transformers unchanged."""

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def rotated_width(self) -> int | None:
        """Width of a head to which rotary positions apply; None: heads have no single width."""
        return None

    def rope(self) -> Rope:
        """Return the rotary parameters, from the newer key or the older one.

        Raises:
            KeyError: the rope type is not supported.
            ValidationError: invalid parameters.
        """
        given = dict(self.rope_parameters or self.rope_scaling or {})
        older = given.pop("type", None)
        kind = given.setdefault("rope_type", older)
        if kind is None:
            kind = given["rope_type"] = "default"
        for key in ("rope_theta", "partial_rotary_factor"):
            if given.get(key) is None:
                given[key] = getattr(self, key)
        if not isinstance(kind, str) or kind not in ROPE_TYPES:
            raise KeyError(kind)
        return ROPE_TYPES[kind].model_validate(given)

    def for_transformers(self) -> dict[str, Any]:
        """Return exactly the values that are passed to transformers."""
        values = self.model_dump(exclude_unset=True, exclude=set(self.read_here))
        rope = self.rope()
        rotary = rope.model_dump(exclude_none=True)
        rotary.setdefault("rope_theta", 10000.0)
        rotary.pop("partial_rotary_factor", None)
        if self.rotary_share is not None:
            share = rope.partial_rotary_factor or self.rotary_share
            values["partial_rotary_factor"] = rotary["partial_rotary_factor"] = share
        values["rope_parameters"] = rotary
        values["num_key_value_heads"] = self.kv_heads
        for key in ("num_nextn_predict_layers", "attention_dropout"):
            if values.get(key, 0) is None:
                del values[key]
        return thaw(values)  # type: ignore[no-any-return]

    @override
    def problems(self) -> Iterator[Problem]:
        if self.num_attention_heads % self.kv_heads:
            yield (
                "num_key_value_heads",
                f"expected a divisor of num_attention_heads, which is {self.num_attention_heads}, "
                f"got {self.kv_heads}",
            )
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            yield from beyond(key, getattr(self, key), self.vocab_size)
        yield from self._rope_problems()

    def _rope_problems(self) -> Iterator[Problem]:
        if self.rope_parameters and self.rope_scaling:
            yield "rope_scaling", "expected either it or rope_parameters, got both"
        key = "rope_parameters" if self.rope_parameters else "rope_scaling"
        try:
            rope = self.rope()
        except KeyError as error:
            kind = error.args[0]
            yield f"{key}.rope_type", f"expected one of {join(ROPE_TYPES)}, got {got(kind)}"
            return
        except ValidationError as error:
            for path, reason in problems_of(ROPE_MODELS[error.title], error):
                yield f"{key}.{path}", reason
            return
        for path, reason in rope.problems():
            yield f"{key}.{path}", reason
        share = rope.partial_rotary_factor
        if self.rotary_share is None and share not in (None, 1.0):
            yield "partial_rotary_factor", f"expected 1 in family {self.model_type}, got {share}"
            return
        if self.rotated_width is None:
            return
        share = 1.0 if self.rotary_share is None else share or self.rotary_share
        rotated = int(self.rotated_width * share)
        if rotated < 2 or rotated % 2:
            yield (
                "partial_rotary_factor",
                f"expected an even number of at least 2 rotated of the {self.rotated_width} "
                f"values of a head, got {rotated}",
            )


class HeadedConfig(DecoderConfig):
    """Families whose heads have one width."""

    head_dim: Width | None = None

    @property
    def head_width(self) -> int | None:
        if self.head_dim is not None:
            return self.head_dim
        width, rest = divmod(self.hidden_size, self.num_attention_heads)
        return None if rest else width

    @property
    @override
    def rotated_width(self) -> int | None:
        return self.head_width

    @override
    def for_transformers(self) -> dict[str, Any]:
        return {**super().for_transformers(), "head_dim": self.head_width}

    @override
    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.head_width is None:
            yield (
                "num_attention_heads",
                f"expected a divisor of hidden_size, which is {self.hidden_size}, as there is no "
                f"head_dim, got {self.num_attention_heads}",
            )


class GroupedExperts(DecoderConfig):
    """Families that choose groups of experts first."""

    n_routed_experts: Experts
    n_shared_experts: Annotated[int, Field(ge=1, le=2**10)] = 1
    num_experts_per_tok: Experts = 8
    moe_intermediate_size: Width
    n_group: Experts
    topk_group: Experts
    norm_topk_prob: bool = True
    routed_scaling_factor: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    first_k_dense_replace: Annotated[int, Field(ge=0, le=MAX_LAYERS)]
    attention_bias: bool = False
    num_nextn_predict_layers: Annotated[int, Field(ge=0, le=MAX_MTP_LAYERS)] | None = None
    scoring_func: Literal["sigmoid"] = "sigmoid"
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    moe_layer_freq: Annotated[int, Field(ge=1, le=1)] = 1

    read_here: ClassVar[frozenset[str]] = DecoderConfig.read_here | {
        "scoring_func",
        "topk_method",
        "moe_layer_freq",
    }

    @override
    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        experts, groups = self.n_routed_experts, self.n_group
        size, rest = divmod(experts, groups)
        if rest:
            yield "n_group", f"expected a divisor of n_routed_experts, {experts}, got {groups}"
            return
        if size < 2:
            yield (
                "n_group",
                f"expected groups of at least 2 experts, got {groups} of {experts} experts",
            )
        if self.topk_group > groups:
            yield "topk_group", f"expected at most n_group, {groups}, got {self.topk_group}"
            return
        eligible = self.topk_group * size
        if self.num_experts_per_tok > eligible:
            yield (
                "num_experts_per_tok",
                f"expected at most the {eligible} of {experts} n_routed_experts that topk_group "
                f"leaves, got {self.num_experts_per_tok}",
            )


class Glm4MoeConfig(GroupedExperts, HeadedConfig):
    rms_norm_eps: Share = 1e-5
    n_routed_experts: Experts = 128
    moe_intermediate_size: Width = 1408
    n_group: Experts = 1
    topk_group: Experts = 1
    first_k_dense_replace: Annotated[int, Field(ge=0, le=MAX_LAYERS)] = 1
    use_qk_norm: bool = False

    rotary_share: ClassVar[float | None] = 0.5


class DeepseekV3Config(GroupedExperts):
    n_routed_experts: Experts = 256
    moe_intermediate_size: Width = 2048
    n_group: Experts = 8
    topk_group: Experts = 4
    routed_scaling_factor: Annotated[float, Field(gt=0, le=1e6)] = 2.5
    first_k_dense_replace: Annotated[int, Field(ge=0, le=MAX_LAYERS)] = 3
    q_lora_rank: Width | None = 1536
    kv_lora_rank: Width = 512
    qk_rope_head_dim: Width = 64
    qk_nope_head_dim: Width = 128
    v_head_dim: Width = 128
    rope_interleave: bool = True

    @property
    @override
    def rotated_width(self) -> int | None:
        return self.qk_rope_head_dim

    @override
    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.kv_heads != self.num_attention_heads:
            yield (
                "num_key_value_heads",
                f"expected as many as num_attention_heads, {self.num_attention_heads}, "
                f"got {self.kv_heads}",
            )


class LayerKinds(DecoderConfig):
    """Families whose config lists the kind of every layer."""

    layer_types: Names | None = None

    @override
    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            yield (
                "layer_types",
                f"expected one for each of the {self.num_hidden_layers} num_hidden_layers, got "
                f"{len(self.layer_types)}",
            )


class Qwen3NextConfig(LayerKinds, HeadedConfig):
    head_dim: Width | None = 256
    attention_bias: bool = False
    full_attention_interval: Annotated[int, Field(ge=1, le=MAX_LAYERS)] = 4
    decoder_sparse_step: Annotated[int, Field(ge=1, le=MAX_LAYERS)] = 1
    mlp_only_layers: (
        Annotated[
            tuple[Annotated[int, Field(ge=0, le=MAX_LAYERS)], ...],
            BeforeValidator(_tuple_from_list),
        ]
        | None
    ) = None
    moe_intermediate_size: Width = 512
    shared_expert_intermediate_size: Width = 512
    num_experts: Experts = 512
    num_experts_per_tok: Experts = 10
    norm_topk_prob: bool = True
    linear_conv_kernel_dim: Width = 4
    linear_key_head_dim: Width = 128
    linear_value_head_dim: Width = 128
    linear_num_key_heads: Heads = 16
    linear_num_value_heads: Heads = 32

    rotary_share: ClassVar[float | None] = 0.25

    @override
    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.num_experts_per_tok > self.num_experts:
            yield (
                "num_experts_per_tok",
                f"expected at most num_experts, {self.num_experts}, got {self.num_experts_per_tok}",
            )


class MiMoConfig(LayerKinds, HeadedConfig):
    num_nextn_predict_layers: Annotated[int, Field(ge=0, le=MAX_MTP_LAYERS)] | None = None
    use_sliding_window: bool = False
    sliding_window: Positions | None = 4096
    max_window_layers: Annotated[int, Field(ge=0, le=MAX_LAYERS)] = 28


class GenerationConfig(CheckpointModel):
    """`generation_config.json`: ids that begin, end and pad a text."""

    bos_token_id: Annotated[TokenId | None, BeforeValidator(_none_below_zero)] = None
    eos_token_id: EndIds = None
    pad_token_id: Annotated[TokenId | None, BeforeValidator(_none_below_zero)] = None


SCHEMAS: dict[str, type[DecoderConfig]] = {
    "deepseek_v3": DeepseekV3Config,
    "glm4_moe": Glm4MoeConfig,
    "mimo": MiMoConfig,
    "qwen3_next": Qwen3NextConfig,
}
"""What `config.json` may say, by `model_type`."""


def beyond(key: str, ids: int | tuple[int, ...] | None, vocab_size: int) -> Iterator[Problem]:
    """Ids that a vocabulary does not have."""
    if ids is None:
        return
    out = [one for one in (ids if isinstance(ids, tuple) else (ids,)) if one >= vocab_size]
    if out:
        yield key, f"expected ids below vocab_size, {vocab_size}, got {got(out[0])}"
