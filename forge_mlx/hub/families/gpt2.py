"""GPT-2. Its dropout is not taken over: that is a setting of training."""

from typing import Any, Final

from forge_mlx.hub.families.family import Family
from forge_mlx.hub.families.gpt2_layout import GPT2Layout
from forge_mlx.models.gpt import GPTConfig


def _write(config: GPTConfig) -> dict[str, Any]:
    dropout = {"resid_pdrop": config.dropout, "embd_pdrop": config.dropout, "attn_pdrop": 0.0}
    # mlx-lm asks for n_ctx.
    return {"n_ctx": config.max_seq_len, **dropout}


GPT2: Final = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    config_type=GPTConfig,
    fields={
        "vocab_size": "vocab_size",
        "n_embd": "hidden_size",
        "n_layer": "num_layers",
        "n_head": "num_heads",
        "n_positions": "max_seq_len",
        "n_inner": "intermediate_size",
        "layer_norm_epsilon": "norm_eps",
        "initializer_range": "init_std",
        "tie_word_embeddings": "tie_embeddings",
    },
    layout=GPT2Layout(),
    defaults={
        **{"n_positions": 1024, "n_inner": None, "layer_norm_epsilon": 1e-5, "initializer_range": 0.02},
        "tie_word_embeddings": True,
    },
    implied={"norm": "layer_norm", "position": "learned", "mlp": "gelu_tanh", "bias": True},
    only={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    constants={"activation_function": "gelu_new"},
    irrelevant=(
        *("n_ctx", "resid_pdrop", "embd_pdrop", "attn_pdrop", "reorder_and_upcast_attn", "summary_activation"),
        *("summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj", "n_special"),
        *("predict_special_tokens", "output_past"),
    ),
    write=_write,
    fixed_in_mlx_lm={"tie_embeddings": True, "intermediate_size": None},
)
