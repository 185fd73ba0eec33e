"""Ops on the native library. Each row is computed by itself, in an order that its length alone fixes."""

import ctypes
from collections.abc import Callable

import torch

from octavo.contract import (
    API_VERSION,
    ActAndMul,
    Activation,
    FusedAddRMSNorm,
    LayerNorm,
    Linear,
    OpImpl,
    OpSignature,
    RMSNorm,
    RotaryEmbedding,
    Sample,
    Support,
    Weight,
)
from octavo.contract.drawing import MAX_VOCAB
from octavo_cpu.matrix import WEIGHT_FORMATS, PackedMatrix, pack
from octavo_cpu.native import DTYPES, NativeLibrary

__all__ = ["PROVIDER", "native_ops"]

PROVIDER = "cpu"
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4}
GATED_ACTIVATIONS = {**ACTIVATIONS, "swiglu_clamped": 5}


def native_ops(library: NativeLibrary) -> list[OpImpl]:
    """Every op that the library has a kernel for."""
    by_row = Support.yes("a row is reduced in an order that its length fixes")

    def impl(
        op: str,
        fn: Callable[..., object],
        supports: Callable[[OpSignature], Support] = _supports,
        prepare: Callable[..., object] | None = None,
    ) -> OpImpl:
        return OpImpl(op, PROVIDER, "native", fn, supports, prepare, row_invariant=by_row, api_version=API_VERSION)

    return [
        impl("linear", _linear(library), _supports_linear, _prepare(library)),
        impl("rms_norm", _rms_norm(library)),
        impl("fused_add_rms_norm", _fused_add_rms_norm(library)),
        impl("layer_norm", _layer_norm(library)),
        impl("rotary_embedding", _rotary_embedding(library), _supports_rotary),
        impl("activation", _activation(library), _supports_activation(ACTIVATIONS)),
        impl("act_and_mul", _act_and_mul(library), _supports_activation(GATED_ACTIVATIONS)),
        impl("sample", _sample(library), _supports_sample),
    ]


def _supports(signature: OpSignature) -> Support:
    if signature.device_type != "cpu":
        return Support.no(f"device {signature.device_type}, these kernels run on cpu")
    if signature.dtype not in DTYPES:
        return Support.no(f"dtype {signature.dtype}, built for float32, bfloat16, float16")
    return Support.yes()


def _supports_linear(signature: OpSignature) -> Support:
    if signature.device_type == "cpu" and signature.dtype not in (torch.float32, torch.bfloat16):
        return Support.no(f"dtype {signature.dtype}, built for float32, bfloat16")
    form = signature.trait("weight_format", "dense")
    known = ("dense", *WEIGHT_FORMATS)
    built = Support.yes() if form in known else Support.no(f"weight format {form}, built for {', '.join(known)}")
    return _supports(signature) & built


def _supports_sample(signature: OpSignature) -> Support:
    if signature.device_type == "cpu" and signature.dtype != torch.float32:
        return Support.no(f"dtype {signature.dtype}, built for float32")
    size = signature.trait("vocab_size", 1)
    fits = Support.yes() if size <= MAX_VOCAB else Support.no(f"vocab_size {size}, at most {MAX_VOCAB}")
    return _supports(signature) & fits


def _supports_rotary(signature: OpSignature) -> Support:
    rotary_dim = signature.trait("rotary_dim", 0)
    even = Support.no(f"rotary_dim {rotary_dim} is odd") if rotary_dim % 2 else Support.yes()
    return _supports(signature) & even


def _supports_activation(known: dict[str, int]) -> Callable[[OpSignature], Support]:
    def supports(signature: OpSignature) -> Support:
        name = signature.trait("activation")
        named = Support.yes() if name in known else Support.no(f"activation {name}, built for {', '.join(known)}")
        return _supports(signature) & named

    return supports


def _rows(x: torch.Tensor) -> tuple[torch.Tensor, int, int, int, int]:
    """X [..., H] as two axes of rows: (x, n0, n1, stride 0, stride 1), without a copy up to three axes."""
    if x.dim() > 3 or x.stride(-1) != 1:
        x = x.reshape(-1, x.shape[-1]).contiguous()
    shape, strides = x.shape, x.stride()
    if len(shape) == 2:
        return x, shape[0], 1, strides[0], 0
    if len(shape) == 3:
        return x, shape[0], shape[1], strides[0], strides[1]
    return x, 1, 1, 0, 0


def _prepare(library: NativeLibrary) -> Callable[[Weight], PackedMatrix]:
    """Packs a weight [N, K] in the dtype that it has; a quantised one as it is."""

    def prepare(weight: Weight) -> PackedMatrix:
        return pack(library, weight, weight.dtype if isinstance(weight, torch.Tensor) else torch.float32)

    return prepare


def _linear(library: NativeLibrary) -> Callable[[Linear], torch.Tensor]:
    call = library.linear

    def linear(args: Linear) -> torch.Tensor:
        x, matrix = args.x, args.weight
        if x.dim() != 2 or x.stride(1) != 1:
            x = x.reshape(-1, x.shape[-1]).contiguous()
        out = torch.empty((*args.x.shape[:-1], matrix.struct.rows), dtype=x.dtype)
        status = call(
            out.data_ptr(), ctypes.addressof(matrix.struct), x.data_ptr(), len(x), x.stride(0), DTYPES[x.dtype]
        )
        if status:
            library.check(status, "linear")
        return out if args.bias is None else out.add_(args.bias)

    return linear


def _rms_norm(library: NativeLibrary) -> Callable[[RMSNorm], torch.Tensor]:
    call = library.rms_norm

    def rms_norm(args: RMSNorm) -> torch.Tensor:
        out = torch.empty(args.x.shape, dtype=args.x.dtype)
        x, n0, n1, s0, s1 = _rows(args.x)
        weight = args.weight
        status = call(
            out.data_ptr(),
            x.data_ptr(),
            None if weight is None else weight.data_ptr(),
            n0,
            n1,
            s0,
            s1,
            x.shape[-1],
            args.eps,
            args.weight_offset,
            DTYPES[x.dtype],
            0 if weight is None else DTYPES[weight.dtype],
        )
        if status:
            library.check(status, "rms_norm")
        return out

    return rms_norm


def _layer_norm(library: NativeLibrary) -> Callable[[LayerNorm], torch.Tensor]:
    call = library.layer_norm

    def layer_norm(args: LayerNorm) -> torch.Tensor:
        out = torch.empty(args.x.shape, dtype=args.x.dtype)
        x, n0, n1, s0, s1 = _rows(args.x)
        weight, bias = args.weight, args.bias
        if weight is not None and bias is not None and weight.dtype != bias.dtype:
            weight, bias = weight.float(), bias.float()
        dtype = next((t.dtype for t in (weight, bias) if t is not None), torch.float32)
        status = call(
            out.data_ptr(),
            x.data_ptr(),
            None if weight is None else weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            n0,
            n1,
            s0,
            s1,
            x.shape[-1],
            args.eps,
            args.weight_offset,
            DTYPES[x.dtype],
            DTYPES[dtype],
        )
        if status:
            library.check(status, "layer_norm")
        return out

    return layer_norm


def _fused_add_rms_norm(library: NativeLibrary) -> Callable[[FusedAddRMSNorm], tuple[torch.Tensor, torch.Tensor]]:
    call = library.fused_add_rms_norm

    def fused_add_rms_norm(args: FusedAddRMSNorm) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual, weight = args.x, args.residual, args.weight
        if x.dim() != 2 or x.stride(1) != 1:
            x = x.reshape(-1, x.shape[-1]).contiguous()
        if residual.dim() != 2 or residual.stride(1) != 1:
            residual = residual.reshape(-1, residual.shape[-1]).contiguous()
        status = call(
            x.data_ptr(),
            residual.data_ptr(),
            None if weight is None else weight.data_ptr(),
            x.shape[0],
            x.stride(0),
            residual.stride(0),
            x.shape[1],
            args.eps,
            args.weight_offset,
            DTYPES[x.dtype],
            0 if weight is None else DTYPES[weight.dtype],
        )
        if status:
            library.check(status, "fused_add_rms_norm")
        if x is args.x and residual is args.residual:
            return x, residual
        return x.view(args.x.shape), residual.view(args.x.shape)

    return fused_add_rms_norm


def _rotary_embedding(library: NativeLibrary) -> Callable[[RotaryEmbedding], tuple[torch.Tensor, torch.Tensor]]:
    call = library.rotary_embedding

    def rotary_embedding(args: RotaryEmbedding) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, cos_sin = args.query, args.key, args.cos_sin
        query_strides, key_strides = query.stride(), key.stride()
        status = call(
            query.data_ptr(),
            key.data_ptr(),
            args.positions.data_ptr(),
            cos_sin.data_ptr(),
            query.shape[0],
            query.shape[1],
            key.shape[1],
            query_strides[0],
            query_strides[1],
            key_strides[0],
            key_strides[1],
            cos_sin.shape[1],
            cos_sin.shape[0],
            args.interleaved,
            DTYPES[query.dtype],
        )
        if status:
            library.check(status, f"rotary_embedding with positions below {cos_sin.shape[0]}")
        return query, key

    return rotary_embedding


def _activation(library: NativeLibrary) -> Callable[[Activation], torch.Tensor]:
    call = library.activation_apply

    def activation(args: Activation) -> torch.Tensor:
        x = args.x.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype)
        status = call(out.data_ptr(), x.data_ptr(), x.numel(), ACTIVATIONS[args.activation], DTYPES[x.dtype])
        if status:
            library.check(status, "activation")
        return out

    return activation


def _act_and_mul(library: NativeLibrary) -> Callable[[ActAndMul], torch.Tensor]:
    call = library.act_and_mul

    def act_and_mul(args: ActAndMul) -> torch.Tensor:
        x = args.x
        width = x.shape[-1] // 2
        out = torch.empty((*x.shape[:-1], width), dtype=x.dtype)
        if x.dim() != 2 or x.stride(1) != 1:
            x = x.reshape(-1, 2 * width).contiguous()
        kind = GATED_ACTIVATIONS[args.activation]
        status = call(out.data_ptr(), x.data_ptr(), x.shape[0], width, x.stride(0), kind, DTYPES[x.dtype])
        if status:
            library.check(status, "act_and_mul")
        return out

    return act_and_mul


def _sample(library: NativeLibrary) -> Callable[[Sample], torch.Tensor]:
    call = library.sample

    def sample(args: Sample) -> torch.Tensor:
        logits = args.logits
        size, num_rows = logits.shape[1], len(args.rows)
        ids = torch.empty(num_rows, dtype=torch.int64)
        wishes = args.rows, args.temperature, args.top_k, args.top_p, args.min_p, args.uniform
        pointers = [wish.data_ptr() for wish in wishes]
        stride = logits.stride(0)
        status = call(ids.data_ptr(), logits.data_ptr(), len(logits), stride, size, *pointers, num_rows)
        if status:
            library.check(status, f"sampling from {num_rows} rows of {size} logits")
        return ids

    return sample
