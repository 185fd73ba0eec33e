// The C ABI of Octavo's CPU kernels: raw pointers, sizes in elements, a status for every call.
//
// Strides count elements; the last axis of every tensor is contiguous. Calls may come from any thread. Each
// runs on the caller and, where there is enough to do, on the library's own threads.
#pragma once

#include <stdint.h>

#if defined(__GNUC__)
#define OCTAVO_API __attribute__((visibility("default")))
#else
#define OCTAVO_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define OCTAVO_ABI_VERSION 3

enum octavo_status {
    OCTAVO_OK = 0,
    OCTAVO_BAD_DTYPE = 1,     // a dtype that the kernel was not built for
    OCTAVO_OUT_OF_RANGE = 2,  // a size, slot, block or position out of its range
    OCTAVO_NO_MEMORY = 3,
    OCTAVO_UNKNOWN_NAME = 4,  // of an activation or an instruction set
};

enum octavo_dtype { OCTAVO_FLOAT32 = 0, OCTAVO_BFLOAT16 = 1, OCTAVO_FLOAT16 = 2, OCTAVO_INT8 = 3 };  // int8: of KV

enum octavo_activation {
    OCTAVO_SILU = 0,
    OCTAVO_GELU = 1,
    OCTAVO_GELU_TANH = 2,
    OCTAVO_RELU = 3,
    OCTAVO_RELU2 = 4,
    OCTAVO_SWIGLU_CLAMPED = 5,  // act_and_mul only
};

OCTAVO_API int octavo_abi_version(void);
OCTAVO_API const char* octavo_status_text(int status);

// Instruction sets. `built` lists, comma separated, those in this library; `usable` those that this processor
// runs; `isa` is the one in use, "" where none can be. OCTAVO_CPU_ISA caps the first choice; `set_isa` picks
// the best one up to `cap` from then on, and is not meant for use while kernels run.
OCTAVO_API const char* octavo_isas_built(void);
OCTAVO_API const char* octavo_isas_usable(void);
OCTAVO_API const char* octavo_isa(void);
OCTAVO_API int octavo_set_isa(const char* cap);

// Threads of a call, the caller included. 1 until set.
OCTAVO_API int octavo_set_num_threads(int num_threads);
OCTAVO_API int octavo_num_threads(void);

// out[n0, n1, hidden] = norm of x[n0, n1, hidden], x with strides s0 and s1, out contiguous. weight may be null.
OCTAVO_API int octavo_rms_norm(void* out, const void* x, const void* weight, int64_t n0, int64_t n1, int64_t s0,
                               int64_t s1, int64_t hidden, float eps, float weight_offset, int dtype, int weight_dtype);
// bias may be null; it has weight_dtype.
OCTAVO_API int octavo_layer_norm(void* out, const void* x, const void* weight, const void* bias, int64_t n0, int64_t n1,
                                 int64_t s0, int64_t s1, int64_t hidden, float eps, float weight_offset, int dtype,
                                 int weight_dtype);
// residual[rows, hidden] += x, and x = norm of it, both in place.
OCTAVO_API int octavo_fused_add_rms_norm(void* x, void* residual, const void* weight, int64_t rows, int64_t x_stride,
                                         int64_t residual_stride, int64_t hidden, float eps, float weight_offset,
                                         int dtype, int weight_dtype);

// Rotates query[tokens, num_heads, >= rotary_dim] and key[tokens, num_kv_heads, ...] in place. cos_sin is
// [num_positions, rotary_dim] float32: cosines, then sines.
OCTAVO_API int octavo_rotary_embedding(void* query, void* key, const int64_t* positions, const float* cos_sin,
                                       int64_t tokens, int64_t num_heads, int64_t num_kv_heads,
                                       int64_t query_token_stride, int64_t query_head_stride, int64_t key_token_stride,
                                       int64_t key_head_stride, int64_t rotary_dim, int64_t num_positions,
                                       int interleaved, int dtype);

// out[size] = activation(x[size])
OCTAVO_API int octavo_activation_apply(void* out, const void* x, int64_t size, int activation, int dtype);
// out[rows, width] = activation(x[:, :width]) * x[:, width:], out contiguous
OCTAVO_API int octavo_act_and_mul(void* out, const void* x, int64_t rows, int64_t width, int64_t x_stride,
                                  int activation, int dtype);

// Geometry of a group of layers and of one step. A layer's cache is [num_blocks][num_kv_heads][keys | values | scales],
// as kernels/layout.h says; int8 (not where latent) has a float scale a token and KV head, of keys and of values.
typedef struct octavo_attention {
    int32_t num_heads, num_kv_heads, head_size, value_size, block_size;
    int32_t dtype, kv_dtype, latent;
    float scale;
    float softcap;   // 0: none
    int32_t window;  // 0: none
    int32_t num_blocks;
    int32_t num_rows;
    int32_t num_tokens;              // of the step; query_start_loc[num_rows] at most
    const int32_t* query_start_loc;  // [num_rows + 1]
    const int32_t* seq_lens;         // [num_rows]
    const int32_t* block_table;      // [num_rows][block_table_stride]
    int64_t block_table_stride;
    const int64_t* slots;  // [num_tokens], -1: write nowhere
} octavo_attention;

// Elements of one block of one layer.
OCTAVO_API int64_t octavo_block_elements(const octavo_attention* a);
// Whether the batch is consistent: every block, slot and length in range. Once a step, so that calls need not.
OCTAVO_API int octavo_check_batch(const octavo_attention* a);
// Stores key[num_tokens, num_kv_heads, head_size] and value at their slots. value is ignored where latent.
OCTAVO_API int octavo_write_kv(const octavo_attention* a, void* cache, const void* key, int64_t key_token_stride,
                               int64_t key_head_stride, const void* value, int64_t value_token_stride,
                               int64_t value_head_stride);
// out[num_tokens, num_heads, value_size] = causal attention of query to the cache. sinks [num_heads] or null.
OCTAVO_API int octavo_attend(const octavo_attention* a, void* out, int64_t out_token_stride, int64_t out_head_stride,
                             const void* query, int64_t query_token_stride, int64_t query_head_stride,
                             const void* cache, const float* sinks);

// For each of num_layers: block pairs[i][1] of target = block pairs[i][0] of source, block_bytes each.
OCTAVO_API int octavo_copy_blocks(void* const* targets, const void* const* sources, int64_t num_layers,
                                  const int64_t* pairs, int64_t num_pairs, int64_t block_bytes,
                                  int64_t num_target_blocks, int64_t num_source_blocks);

// Packed matrices. A matrix [rows, cols] (outputs by inputs) is cut into panels of 32 outputs, so that a vector holds
// neighbouring outputs and no sum crosses lanes. Inputs are padded to a multiple of 32 and outputs to whole panels,
// with weights that add nothing. A panel holds, by format, for ascending inputs:
//   float32   [inputs][32 outputs]
//   bfloat16  [inputs / 2][32 outputs][2 inputs]
//   int8      [inputs / 32] groups of [8][32 outputs][4 inputs] codes, then [32 outputs] scales (float16)
//   int4      [inputs / 32] groups of [4][32 outputs][4 inputs] bytes, then scales; the low four bits of byte row r
//             are inputs 4 r .. 4 r + 3 of the group, the high ones inputs 16 + 4 r ..
//   int4_min  as int4, with [32 outputs] minima (float16) after the scales
// A weight is scale * (code - 128), scale * (code - 8), or scale * code + minimum.
enum octavo_format {
    OCTAVO_FORMAT_FLOAT32 = 0,
    OCTAVO_FORMAT_BFLOAT16 = 1,
    OCTAVO_FORMAT_INT8 = 2,
    OCTAVO_FORMAT_INT4 = 3,
    OCTAVO_FORMAT_INT4_MIN = 4,
};

typedef struct octavo_matrix {
    const void* data;   // packed, aligned to 64 bytes; null: there is none
    const float* bias;  // [rows] or null
    int64_t rows, cols;
    int32_t format;
    int32_t gated;  // rows are those of a gate and as many of what it multiplies: panels of the two alternate
} octavo_matrix;

// Bytes of the packed form; 0 where the format is unknown.
OCTAVO_API int64_t octavo_packed_bytes(const octavo_matrix* m);
// Packs weights[rows, cols] of a dtype (float32, bfloat16, float16) into `packed`, of format float32 or bfloat16.
OCTAVO_API int octavo_pack_dense(void* packed, const octavo_matrix* m, const void* weights, int dtype);
// Packs codes, one a byte [rows, cols], or two a byte [rows, cols / 2], the low bits the even input; cols is a
// multiple of 32. scales and minima are [rows, cols / 32] float16.
OCTAVO_API int octavo_pack_groups(void* packed, const octavo_matrix* m, const uint8_t* codes, const void* scales,
                                  const void* minima);
// out[n, cols] float32 = rows ids[n] of the matrix.
OCTAVO_API int octavo_unpack_rows(float* out, const octavo_matrix* m, const int64_t* ids, int64_t n);
// out[n, rows] = x[n, cols] * matrix^T + bias, of one dtype (float32, bfloat16); x has row stride x_stride. Inputs of
// an int8 or int4 matrix are rounded to int8 with a scale a row and group of 32.
OCTAVO_API int octavo_linear(void* out, const octavo_matrix* m, const void* x, int64_t n, int64_t x_stride, int dtype);

// A whole decoder. Parts that a model lacks are zero.
typedef struct octavo_norm {
    int32_t kind;  // 0: none, 1: rms, 2: layer
    float eps;
    const float* weight;  // or null; an offset is added already
    const float* bias;    // or null
} octavo_norm;

enum octavo_residual { OCTAVO_SEQUENTIAL = 0, OCTAVO_PARALLEL = 1, OCTAVO_PARALLEL_SHARED_NORM = 2 };
enum octavo_qk_norm_over { OCTAVO_OVER_HEAD = 0, OCTAVO_OVER_EACH_HEAD = 1, OCTAVO_OVER_ALL_HEADS = 2 };

// Latent attention (MLA). The matrices of head h are those of the first, h * *_bytes further.
typedef struct octavo_latent {
    octavo_matrix q_a;  // [q_rank, hidden], or none: q reads the stream
    octavo_norm q_a_norm;
    octavo_matrix q;     // [num_heads * (nope_size + rope_size), q_rank or hidden]
    octavo_matrix kv_a;  // [rank + rope_size, hidden]
    octavo_norm kv_a_norm;
    octavo_matrix to_latent;    // [rank, nope_size]: a head's keys, to the side of the query
    octavo_matrix from_latent;  // [value_size, rank]: its values
    int64_t to_latent_bytes, from_latent_bytes;
    int32_t num_heads, rank, nope_size, rope_size;
} octavo_latent;

enum octavo_score { OCTAVO_SCORE_SOFTMAX = 0, OCTAVO_SCORE_SIGMOID = 1 };

// A mixture of experts. The matrices of expert e are those of the first, e * *_bytes further, and so are their biases,
// e * rows further.
typedef struct octavo_moe {
    octavo_matrix router;     // [num_experts, hidden] float32
    const float* correction;  // [num_experts] or null: added to the shares for the choice alone
    octavo_matrix up, down;   // of the first expert
    int64_t up_bytes, down_bytes;
    octavo_matrix shared_up, shared_down;  // of the expert of every token, or none
    octavo_matrix shared_gate;             // [1, hidden] float32, or none: its output is multiplied by the sigmoid
    int32_t num_experts, top_k;
    int32_t score;        // octavo_score: from the router's product to shares
    int32_t renormalize;  // the chosen shares sum to 1
    float scale;          // of the routed sum
    int32_t num_groups;   // of experts, of which the best num_kept_groups stay; 0: none
    int32_t top_per_group, num_kept_groups;
    int32_t activation, shared_activation;
} octavo_moe;

typedef struct octavo_layer {
    octavo_norm attn_pre, attn_post, mlp_pre, mlp_post, q_norm, k_norm;
    octavo_matrix qkv, o, up, down;
    const octavo_latent* latent;  // in place of qkv, or null
    const octavo_moe* moe;        // in place of up and down, or null
    const float* cos_sin;  // [num_positions][rotary_dim]: cosines, then sines; null: no rotation
    const float* sinks;    // [num_heads] or null
    void* cache;           // of the layer, as octavo_write_kv has it
    int64_t num_positions;
    int32_t rotary_dim, interleaved;
    int32_t group;         // whose geometry the layer has
    int32_t qk_norm_over;  // octavo_qk_norm_over
    float qkv_clip;        // 0: none
    int32_t activation;
    int32_t residual;  // octavo_residual
    float residual_scale;
} octavo_layer;

typedef struct octavo_decoder {
    octavo_matrix embedding, head;
    const float* positions;  // [num_positions][hidden] or null
    int64_t num_positions, position_offset;
    octavo_norm embedding_norm, final_norm;
    const octavo_layer* layers;
    int64_t num_layers, hidden;
    float embedding_scale, logit_scale;
    float logit_softcap;  // 0: none
    int32_t dtype;        // of queries, keys and values: float32 or bfloat16
} octavo_decoder;

typedef struct octavo_step {
    const octavo_attention* groups;  // one geometry a KV group
    const int64_t* token_ids;        // [num_tokens]
    const int64_t* positions;        // [num_tokens]
    const float* embeds;             // [num_tokens][hidden] in place of token_ids, or null
    int64_t num_tokens;
    const int64_t* rows;  // [num_rows] ascending: the tokens whose normed hidden states are kept
    int64_t num_rows;
    float* hidden;        // [num_rows][hidden] out
    int64_t* greedy_ids;  // [num_rows] out, or null; -1 where logits are not numbers
    void* workspace;      // of octavo_decoder_workspace bytes, aligned to 64
    void (*on_layer)(void);  // called before each layer, or null
} octavo_step;

// Bytes of workspace for a step of at most so many tokens and rows.
OCTAVO_API int64_t octavo_decoder_workspace(const octavo_decoder* d, int64_t num_tokens, int64_t num_rows);
OCTAVO_API int octavo_decoder_step(const octavo_decoder* d, const octavo_step* s);
// logits[num_rows, vocabulary] float32 of hidden[num_rows, hidden] as a step left them.
OCTAVO_API int octavo_decoder_logits(const octavo_decoder* d, float* logits, const float* hidden, int64_t num_rows,
                                     void* workspace);

// ids[num_rows]: a token drawn from row rows[i] of logits[num_logits, stride], of which the first `size` count, 2^22 at
// most; bit by bit as the contract's op `sample` defines it. -1 where the row holds NaN or its highest is infinite.
// top_k 0, top_p 1 and min_p 0 keep all; uniform is in [0, 1).
OCTAVO_API int octavo_sample(int64_t* ids, const float* logits, int64_t num_logits, int64_t stride, int64_t size,
                             const int64_t* rows, const double* temperature, const int64_t* top_k, const double* top_p,
                             const double* min_p, const double* uniform, int64_t num_rows);

// Limits, on all threads: bytes a second of reading `memory` over and over, and multiplications and additions a second
// of products of a format (float32, bfloat16, int8) in registers.
OCTAVO_API double octavo_probe_bandwidth(const void* memory, int64_t bytes);
OCTAVO_API double octavo_probe_operations(int format);

#ifdef __cplusplus
}
#endif
