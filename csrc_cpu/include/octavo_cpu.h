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

#define OCTAVO_ABI_VERSION 1

enum octavo_status {
    OCTAVO_OK = 0,
    OCTAVO_BAD_DTYPE = 1,     // a dtype that the kernel was not built for
    OCTAVO_OUT_OF_RANGE = 2,  // a size, slot, block or position out of its range
    OCTAVO_NO_MEMORY = 3,
    OCTAVO_UNKNOWN_NAME = 4,  // of an activation or an instruction set
};

enum octavo_dtype { OCTAVO_FLOAT32 = 0, OCTAVO_BFLOAT16 = 1, OCTAVO_FLOAT16 = 2 };

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

// Geometry of a group of layers and of one step. A layer's cache is [num_blocks][num_kv_heads][K | V], of
// kv_dtype: K is [head_size][block_size], V is [block_size][value_size rounded up to 16]. A latent cache
// holds [num_blocks][block_size][head_size rounded up to 16] and nothing else.
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

#ifdef __cplusplus
}
#endif
