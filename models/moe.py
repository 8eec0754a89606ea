"""The decoder of gpt.py with mixtures of experts: Mixtral, OLMoE, Qwen3-MoE and DeepSeek-V3, as the config says."""

from collections.abc import Iterable, Sequence
import math
from typing import ClassVar, Literal

from forge_mlx.models.block import Block, attention_of, mlp_of
from forge_mlx.models.decoder_config import DecoderConfig
from forge_mlx.models.gpt import GPT
from forge_mlx.models.latent_config import LatentConfig, latent_attention_of
from forge_mlx.nn.moe import Experts, MoELayer, routers, update_selection_bias
from forge_mlx.nn.router import Router, impossible_choice
from forge_mlx.nn.routing_record import RoutingRecord, routing_penalty
import mlx.core as mx
from pydantic import Field, model_validator


class MoEConfig(LatentConfig):
    """The shape of an MoE. `models/README.md` gives the settings of the published families."""

    arch: Literal["moe"] = Field("moe", description="Architecture: the mixture of experts of models/moe.py.")
    num_experts: int = Field(8, ge=1, le=1024, description="Number of routed experts E of each MoE layer.")
    experts_per_token: int = Field(2, ge=1, description="How many of them each token goes to, k.")
    expert_intermediate_size: int | None = Field(
        None,
        ge=1,
        description="Width inside an expert; null: that of a dense layer, which is intermediate_size or its default.",
    )
    router_scores: Literal["softmax", "sigmoid"] = Field(
        "softmax",
        description="What makes scores of the router's logits: softmax over the experts, or each its sigmoid.",
    )
    normalize_gates: bool = Field(
        True,
        description="Whether a token's gates are divided by their sum (norm_topk_prob in Hugging Face's configs). With "
        "experts_per_token: 1 the gate is then always 1 and teaches the router nothing: a new model needs false.",
    )
    routed_scaling: float = Field(1.0, gt=0, description="Factor on the gates behind that.")
    shared_experts: int = Field(
        0, ge=0, description="How many experts every token passes beside its own, as one MLP of their joint width."
    )
    dense_layers: int = Field(
        0, ge=0, description="How many of the first blocks have a dense MLP of intermediate_size."
    )
    expert_groups: int = Field(1, ge=1, description="Groups of neighbouring experts, a divisor of num_experts.")
    groups_per_token: int = Field(
        1,
        ge=1,
        description="From how many groups a token chooses: those with the largest sum of their best two experts.",
    )
    selection_bias: bool = Field(
        False,
        description="Whether each expert has a bias that takes part in the choice alone and evens out the loads, as in "
        "DeepSeek-V3.",
    )
    bias_rate: float = Field(
        0.0, ge=0, description="How far a training step moves each selection bias, 0.001 in DeepSeek-V3; 0: not at all."
    )
    aux_loss_weight: float = Field(
        0.0,
        ge=0,
        description="Factor of the load-balancing loss of the Switch Transformer, summed over the MoE layers.",
    )
    router_z_loss_weight: float = Field(
        0.0, ge=0, description="Factor of the router z-loss of ST-MoE, summed over the MoE layers."
    )

    @property
    def expert_size(self) -> int:
        """Width inside an expert, the default filled in."""
        return self.mlp_size if self.expert_intermediate_size is None else self.expert_intermediate_size

    @model_validator(mode="after")
    def _check_choice(self) -> "MoEConfig":
        problem = impossible_choice(
            self.num_experts,
            self.experts_per_token,
            self.expert_groups,
            self.groups_per_token,
            groups_name="expert_groups",
        )
        if problem is not None:
            raise ValueError(problem)
        if self.bias_rate > 0 and not self.selection_bias:
            raise ValueError(
                f"bias_rate must be 0 without selection_bias but got {self.bias_rate}: there is no bias to move. "
                "Set selection_bias: true."
            )
        return self

    @model_validator(mode="after")
    def _check_layers(self) -> "MoEConfig":
        if self.dense_layers >= self.num_layers:
            raise ValueError(
                f"dense_layers must be less than num_layers, {self.num_layers}, but got {self.dense_layers}: no layer "
                "would have experts. Lower it, or use arch: gpt."
            )
        for name in ("bias", "mlp_bias"):
            if getattr(self, name):
                raise ValueError(
                    f"{name} must be false with arch: moe but got true: experts have none. Set it to false."
                )
        if not self.dense_layers and None not in (self.intermediate_size, self.expert_intermediate_size):
            raise ValueError(
                f"intermediate_size must be null with expert_intermediate_size and no dense_layers but got "
                f"{self.intermediate_size}: nothing would have that width. Remove it."
            )
        return self


class SparseBlock(Block):
    """x + attention(norm(x)), then x + moe(norm(x))."""

    def feed_forward(self, normed: mx.array, segment_ids: mx.array | None) -> mx.array:
        """What the second half adds, before dropout: `[B, T, C]` of `[B, T, C]`.

        Args:
            normed: The normalised residual stream.
            segment_ids: Integers `[B, T]`: positions of a negative one are padding and do not count in the routing's
                record; None: no padding.
        """
        # As int32, like attention: ids above 2^31 - 1 are padding there.
        is_token = None if segment_ids is None else segment_ids.astype(mx.int32) >= 0
        out: mx.array = self.mlp(normed, is_token)
        return out


class MoE(GPT):
    """A GPT whose MLPs, but for those of the first `dense_layers` blocks, are `MoELayer`s.

    Documents in a row see nothing of each other, as in a GPT, but stay the same within rounding, not to the bit: on a
    CPU rows that go to the same expert are multiplied together. Where two experts are all but equally good for a token,
    rounding can decide between them.

    What GPT's table does not have starts as:

    | parameter of layers.N | shape | start |
    |---|---|---|
    | mlp.router.weight | `[E, C]` | N(0, init_std^2) |
    | mlp.router.selection_bias | `[E]` | 0; never trainable: `balance` moves it |
    | mlp.experts.gate_proj, .up_proj | `[E, I, C]` | N(0, init_std^2) |
    | mlp.experts.down_proj | `[E, C, I]` | as down_proj in GPT's table |
    | mlp.shared_experts.gate_proj, .up_proj, .down_proj | those of an MLP | as in GPT's table |
    | self_attn.q_a_proj, .q_b_proj, .kv_a_proj_with_mqa, .kv_b_proj | of `LatentAttention` | N(0, init_std^2) |

    Takes what `GPT` takes, with an `MoEConfig`.
    """

    config_type: ClassVar[type[DecoderConfig]] = MoEConfig
    config: MoEConfig

    @property
    def moe_layers(self) -> list[int]:
        """Indices of the blocks with experts."""
        return list(range(self.config.dense_layers, self.config.num_layers))

    @property
    def selection_biases(self) -> list[mx.array | None]:
        """The selection bias `[E]` of each MoE layer, None without."""
        return [router.get("selection_bias") for router in routers(self)]

    def routing_penalty(self, records: Sequence[RoutingRecord]) -> mx.array:
        """The auxiliary losses with the config's weights, summed over the MoE layers: what training adds to its loss.

        Args:
            records: One for each MoE layer, from `routing_records` around the forward pass.

        Returns:
            A float32 scalar, of the size of a mean over tokens.

        Raises:
            ValueError: When there is not one record for each MoE layer.
        """
        expected = len(self.moe_layers)
        if len(records) != expected:
            raise ValueError(
                f"[MoE] records must hold one for each of the {expected} MoE layers but got {len(records)}. Run the "
                "model once inside of routing_records()."
            )
        return routing_penalty(
            records,
            aux_loss_weight=self.config.aux_loss_weight,
            router_z_loss_weight=self.config.router_z_loss_weight,
        )

    def balance(self, loads: Iterable[mx.array]) -> None:
        """Move the selection biases by the config's bias_rate; with a rate of 0 nothing happens.

        Args:
            loads: Tokens of the last step that went to each expert, integers `[E]`, for each MoE layer.

        Raises:
            ValueError: When there are not as many loads as MoE layers.
        """
        if self.config.bias_rate:
            update_selection_bias(self, loads, self.config.bias_rate)

    def num_active_parameters(self, *, embeddings: bool = True) -> int:
        """Number of parameters that one token meets: of the experts' k / E, of all else everything.

        Of layers of codes the weight that they stand for counts.

        Args:
            embeddings: As `num_parameters` takes it.
        """
        idle = sum(math.prod(shape) - self._used_elements(name, shape) for name, shape in self._block_parameters())
        return self.num_parameters(embeddings=embeddings) - idle

    def _block(self, index: int) -> Block:
        config = self.config
        attention = attention_of(config, index) if config.kv_lora_rank is None else latent_attention_of(config)
        if index < config.dense_layers:
            return Block(config, attention, mlp_of(config, config.mlp_size))
        router = Router(
            config.hidden_size,
            config.num_experts,
            config.experts_per_token,
            scores=config.router_scores,
            normalize=config.normalize_gates,
            scaling=config.routed_scaling,
            groups=config.expert_groups,
            groups_per_token=config.groups_per_token,
            selection_bias=config.selection_bias,
        )
        experts = Experts(config.hidden_size, config.expert_size, config.num_experts, activation=config.mlp)
        shared = mlp_of(config, config.shared_experts * config.expert_size) if config.shared_experts else None
        return SparseBlock(config, attention, MoELayer(router, experts, shared))

    def _used_elements(self, name: str, shape: tuple[int, ...]) -> int:
        size = math.prod(shape)
        if ".mlp.experts." not in name:
            return size
        return size // self.config.num_experts * self.config.experts_per_token
