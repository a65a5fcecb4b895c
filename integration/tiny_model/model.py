"""The tiny `glm4_moe` model with MTP layers, written for training and measuring.

The same function as `transformers` computes from the exported weights, in a form that is quick
to train: the experts of a layer are one dense product whose columns are weighted by the router.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

KeyValue = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class ModelShape:
    """The sizes of the model; names follow the checkpoint's configuration."""

    vocab_size: int = 2048
    hidden_size: int = 192
    intermediate_size: int = 480
    num_hidden_layers: int = 12
    num_nextn_predict_layers: int = 3
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    n_routed_experts: int = 4
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 128
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 0.5

    @property
    def rotary_dim(self) -> int:
        """How many leading entries of a head are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    def to_hf_config(self) -> dict[str, Any]:
        """The content of `config.json`."""
        return {
            "architectures": ["Glm4MoeForCausalLM"],
            "model_type": "glm4_moe",
            **asdict(self),
            "first_k_dense_replace": self.num_hidden_layers - 1,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "use_qk_norm": True,
            "hidden_act": "silu",
            "rope_scaling": None,
            "initializer_range": 0.02,
            "tie_word_embeddings": False,
            "use_cache": True,
            "eos_token_id": 0,
            "pad_token_id": 0,
            "torch_dtype": "bfloat16",
        }

    @classmethod
    def from_hf_config(cls, config: dict[str, Any]) -> "ModelShape":
        """Read the sizes back from the content of `config.json`."""
        return cls(**{name: config[name] for name in cls.__dataclass_fields__})


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention over this call's rows and, in front of them, `earlier` ones."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.rotary_dim = shape.rotary_dim
        width = shape.num_attention_heads * shape.head_dim
        kv_width = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        rotary: Tensor,
        mask: Tensor | BlockMask | None = None,
        earlier: KeyValue | None = None,
    ) -> tuple[Tensor, KeyValue]:
        """Attend causally, or as `mask` says; returns the output and all keys and values."""
        q = _rotate(self.q_norm(self._heads(self.q_proj(x))), rotary, self.rotary_dim)
        k = _rotate(self.k_norm(self._heads(self.k_proj(x))), rotary, self.rotary_dim)
        v = self._heads(self.v_proj(x))
        if earlier is not None:
            k = torch.cat([earlier[0], k], dim=2)
            v = torch.cat([earlier[1], v], dim=2)
        if isinstance(mask, BlockMask):
            out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
        else:
            out = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
            )
        # [B, heads, S, head_dim] -> [B, S, heads * head_dim]
        return self.o_proj(out.transpose(1, 2).flatten(2)), (k, v)

    def _heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (-1, self.head_dim))
        return heads.transpose(1, 2)


def _rotate(x: Tensor, rotary: Tensor, rotary_dim: int) -> Tensor:
    cos, sin = rotary.unbind(0)
    turned, kept = x[..., :rotary_dim].float(), x[..., rotary_dim:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([turned.to(x.dtype), kept], dim=-1)


class DenseMlp(nn.Module):
    """The gated feed-forward block of a dense layer."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block to the last dimension."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class ExpertMlp(nn.Module):
    """Routed experts and one shared expert, computed densely.

    The three projections hold the routed experts side by side and the shared one last. The router
    scores by sigmoid, picks by score plus correction bias and normalises the picked scores.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.num_experts = shape.n_routed_experts
        self.top_k = shape.num_experts_per_tok
        width = (shape.n_routed_experts + 1) * shape.moe_intermediate_size
        self.gate = nn.Linear(shape.hidden_size, shape.n_routed_experts, bias=False)
        self.gate_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, shape.hidden_size, bias=False)
        self.e_score_correction_bias: Tensor
        self.register_buffer("e_score_correction_bias", torch.zeros(shape.n_routed_experts))
        self.load: Tensor
        self.register_buffer("load", torch.zeros(shape.n_routed_experts), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the routed and the shared experts to the last dimension."""
        weights = self._route(x)
        h = functional.silu(self.gate_proj(x)) * self.up_proj(x)
        h = h.unflatten(-1, (self.num_experts + 1, -1)) * weights.unsqueeze(-1).to(h.dtype)
        out: Tensor = self.down_proj(h.flatten(-2))
        return out

    def _route(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            scores = (x.float() @ self.gate.weight.float().T).sigmoid()
        choice = (scores + self.e_score_correction_bias).detach()
        # the rank of an expert is the number of better ones; cheaper than a top-k when fused
        rank = (choice.unsqueeze(-2) > choice.unsqueeze(-1)).sum(-1)
        picked = (rank < self.top_k).to(scores.dtype)
        if self.training:
            self.load += picked.flatten(0, -2).sum(0)
        weights = scores * picked
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return torch.cat([weights, torch.ones_like(weights[..., :1])], dim=-1)

    @torch.no_grad()
    def balance(self, rate: float) -> Tensor:
        """Move the correction bias against the load since the last call; returns the shares."""
        share = self.load / self.load.sum()
        self.e_score_correction_bias -= rate * torch.sign(share - share.mean())
        self.load.zero_()
        return share


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward block."""

    def __init__(self, shape: ModelShape, *, routed: bool, dropout: float) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = ExpertMlp(shape) if routed else DenseMlp(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.dropout = dropout

    def forward(
        self,
        x: Tensor,
        rotary: Tensor,
        mask: Tensor | BlockMask | None = None,
        earlier: KeyValue | None = None,
    ) -> tuple[Tensor, KeyValue]:
        """Returns the new residual stream and the keys and values attended to."""
        attended, key_value = self.self_attn(self.input_layernorm(x), rotary, mask, earlier)
        x = x + functional.dropout(attended, self.dropout, self.training)
        h = self.mlp(self.post_attention_layernorm(x))
        return x + functional.dropout(h, self.dropout, self.training), key_value


class MtpLayer(nn.Module):
    """One MTP layer: joins a token's embedding with a state and predicts one token further."""

    def __init__(self, shape: ModelShape, dropout: float) -> None:
        super().__init__()
        self.enorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.hnorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=False)
        self.block = DecoderLayer(shape, routed=True, dropout=dropout)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(
        self,
        embedding: Tensor,
        state: Tensor,
        rotary: Tensor,
        mask: Tensor | BlockMask | None = None,
        earlier: KeyValue | None = None,
    ) -> tuple[Tensor, KeyValue]:
        """Returns the normed output state and the keys and values attended to."""
        joined = torch.cat([self.enorm(embedding), self.hnorm(state)], dim=-1)
        x, key_value = self.block(self.eh_proj(joined), rotary, mask, earlier)
        return self.norm(x), key_value


class TinyMtpModel(nn.Module):
    """The main model and its MTP layers."""

    def __init__(self, shape: ModelShape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape = shape
        self.dropout = dropout
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        last = shape.num_hidden_layers - 1
        self.layers = nn.ModuleList(
            DecoderLayer(shape, routed=index == last, dropout=dropout)
            for index in range(shape.num_hidden_layers)
        )
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        self.mtp = nn.ModuleList(
            MtpLayer(shape, dropout) for _ in range(shape.num_nextn_predict_layers)
        )
        self.rotary_table: Tensor
        self.register_buffer("rotary_table", _rotary_table(shape), persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        residual_std = 0.02 / (2 * self.shape.num_hidden_layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                is_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=residual_std if is_residual else 0.02)

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings of `ids`, in the dtype the layers compute in."""
        x = functional.dropout(self.embed_tokens(ids), self.dropout, self.training)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return x

    def rotary(self, length: int, start: int = 0) -> Tensor:
        """Cosines and sines of the positions `start` .. `start + length - 1`."""
        return self.rotary_table[:, start : start + length]

    def states(self, ids: Tensor) -> Tensor:
        """The main model's states after the final norm, `[B, S] -> [B, S, H]`."""
        x = self.embed(ids)
        rotary = self.rotary(ids.shape[1])
        for layer in self.layers:
            x, _ = layer(x, rotary)
        states: Tensor = self.norm(x)
        return states

    def expert_blocks(self) -> list[ExpertMlp]:
        """Every routed block: the last main layer's and those of the MTP layers."""
        return [module for module in self.modules() if isinstance(module, ExpertMlp)]


def _rotary_table(shape: ModelShape) -> Tensor:
    exponent = torch.arange(0, shape.rotary_dim, 2, dtype=torch.float) / shape.rotary_dim
    # a few positions beyond the limit serve the reused layer's later passes
    positions = torch.arange(shape.max_position_embeddings + 16, dtype=torch.float)
    angles = torch.outer(positions, shape.rope_theta**-exponent)
    angles = torch.cat([angles, angles], dim=-1)
    return torch.stack([angles.cos(), angles.sin()])
