"""The structures of csrc_cpu/include/octavo_cpu.h that describe matrices, layers, decoders and steps."""

from ctypes import CFUNCTYPE, POINTER, Structure, c_float, c_int32, c_int64, c_void_p

__all__ = [
    "ON_LAYER",
    "AttentionGeometry",
    "DecoderStruct",
    "LatentStruct",
    "LayerStruct",
    "MatrixStruct",
    "MoeStruct",
    "NormStruct",
    "StepStruct",
]


ON_LAYER = CFUNCTYPE(None)


class AttentionGeometry(Structure):
    """`octavo_attention`: a KV group and one step's rows of it."""

    _fields_ = [
        *((name, c_int32) for name in ("num_heads", "num_kv_heads", "head_size", "value_size", "block_size")),
        *((name, c_int32) for name in ("dtype", "kv_dtype", "latent")),
        ("scale", c_float),
        ("softcap", c_float),
        *((name, c_int32) for name in ("window", "num_blocks", "num_rows", "num_tokens")),
        *((name, c_void_p) for name in ("query_start_loc", "seq_lens", "block_table")),
        ("block_table_stride", c_int64),
        ("slots", c_void_p),
    ]


class MatrixStruct(Structure):
    """`octavo_matrix`."""

    _fields_ = [
        ("data", c_void_p),
        ("bias", c_void_p),
        ("rows", c_int64),
        ("cols", c_int64),
        ("format", c_int32),
        ("gated", c_int32),
    ]


class NormStruct(Structure):
    """`octavo_norm`; all zero where there is none."""

    _fields_ = [("kind", c_int32), ("eps", c_float), ("weight", c_void_p), ("bias", c_void_p)]


class LatentStruct(Structure):
    """`octavo_latent`."""

    _fields_ = [
        ("q_a", MatrixStruct),
        ("q_a_norm", NormStruct),
        *((name, MatrixStruct) for name in ("q", "kv_a")),
        ("kv_a_norm", NormStruct),
        *((name, MatrixStruct) for name in ("to_latent", "from_latent")),
        *((name, c_int64) for name in ("to_latent_bytes", "from_latent_bytes")),
        *((name, c_int32) for name in ("num_heads", "rank", "nope_size", "rope_size")),
    ]


class MoeStruct(Structure):
    """`octavo_moe`."""

    _fields_ = [
        ("router", MatrixStruct),
        ("correction", c_void_p),
        *((name, MatrixStruct) for name in ("up", "down")),
        *((name, c_int64) for name in ("up_bytes", "down_bytes")),
        *((name, MatrixStruct) for name in ("shared_up", "shared_down", "shared_gate")),
        *((name, c_int32) for name in ("num_experts", "top_k", "score", "renormalize")),
        ("scale", c_float),
        *((name, c_int32) for name in ("num_groups", "top_per_group", "num_kept_groups")),
        *((name, c_int32) for name in ("activation", "shared_activation")),
    ]


class LayerStruct(Structure):
    """`octavo_layer`."""

    _fields_ = [
        *((name, NormStruct) for name in ("attn_pre", "attn_post", "mlp_pre", "mlp_post", "q_norm", "k_norm")),
        *((name, MatrixStruct) for name in ("qkv", "o", "up", "down")),
        ("latent", POINTER(LatentStruct)),
        ("moe", POINTER(MoeStruct)),
        *((name, c_void_p) for name in ("cos_sin", "sinks", "cache")),
        ("num_positions", c_int64),
        *((name, c_int32) for name in ("rotary_dim", "interleaved", "group", "qk_norm_over")),
        ("qkv_clip", c_float),
        ("activation", c_int32),
        ("residual", c_int32),
        ("residual_scale", c_float),
    ]


class DecoderStruct(Structure):
    """`octavo_decoder`."""

    _fields_ = [
        ("embedding", MatrixStruct),
        ("head", MatrixStruct),
        ("positions", c_void_p),
        ("num_positions", c_int64),
        ("position_offset", c_int64),
        ("embedding_norm", NormStruct),
        ("final_norm", NormStruct),
        ("layers", POINTER(LayerStruct)),
        ("num_layers", c_int64),
        ("hidden", c_int64),
        ("embedding_scale", c_float),
        ("logit_scale", c_float),
        ("logit_softcap", c_float),
        ("dtype", c_int32),
    ]


class StepStruct(Structure):
    """`octavo_step`."""

    _fields_ = [
        ("groups", POINTER(AttentionGeometry)),
        *((name, c_void_p) for name in ("token_ids", "positions", "embeds")),
        ("num_tokens", c_int64),
        ("rows", c_void_p),
        ("num_rows", c_int64),
        *((name, c_void_p) for name in ("hidden", "greedy_ids", "workspace")),
        ("on_layer", ON_LAYER),
    ]
