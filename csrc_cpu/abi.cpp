// The C ABI: checks arguments, decides how a call is cut into ranges, and runs them.

#include <algorithm>

#include "attend.h"
#include "include/octavo_cpu.h"
#include "isa.h"
#include "pool.h"

namespace octavo {
namespace {

// Below so many elements of work a second thread is not worth waking.
constexpr int64_t kGrainElements = 32 * 1024;

bool known(int dtype) { return dtype >= OCTAVO_FLOAT32 && dtype <= OCTAVO_FLOAT16; }

// Rows a range, so that a range is worth handing out.
int64_t rows_for(int64_t elements_per_row) {
    return std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, elements_per_row));
}

int norm(void (*Kernels::*kernel)(const Norm&, int64_t, int64_t), const Norm& a, int64_t rows) {
    if (!known(a.dtype) || !known(a.weight_dtype)) return OCTAVO_BAD_DTYPE;
    if (rows < 0 || a.hidden < 1 || a.inner_rows < 1) return OCTAVO_OUT_OF_RANGE;
    const auto function = kernels()->*kernel;
    parallel_for(rows, rows_for(a.hidden), [&](int64_t begin, int64_t end) { function(a, begin, end); });
    return OCTAVO_OK;
}

}  // namespace
}  // namespace octavo

using namespace octavo;

extern "C" {

int octavo_abi_version(void) { return OCTAVO_ABI_VERSION; }

const char* octavo_status_text(int status) {
    switch (status) {
        case OCTAVO_OK: return "ok";
        case OCTAVO_BAD_DTYPE: return "a dtype that the kernel was not built for";
        case OCTAVO_OUT_OF_RANGE: return "a size, slot, block or position is out of range";
        case OCTAVO_NO_MEMORY: return "out of memory";
        case OCTAVO_UNKNOWN_NAME: return "unknown name";
        default: return "unknown status";
    }
}

const char* octavo_isas_built(void) { return isas_built(); }
const char* octavo_isas_usable(void) { return isas_usable(); }
const char* octavo_isa(void) { return kernels() ? kernels()->name : ""; }
int octavo_set_isa(const char* cap) { return set_isa(cap) ? OCTAVO_OK : OCTAVO_UNKNOWN_NAME; }

int octavo_set_num_threads(int num_threads) {
    if (num_threads < 1) return OCTAVO_OUT_OF_RANGE;
    set_num_threads(num_threads);
    return OCTAVO_OK;
}
int octavo_num_threads(void) { return num_threads(); }

int octavo_rms_norm(void* out, const void* x, const void* weight, int64_t n0, int64_t n1, int64_t s0, int64_t s1,
                    int64_t hidden, float eps, float weight_offset, int dtype, int weight_dtype) {
    if (n0 <= 0 || n1 <= 0) return OCTAVO_OK;
    return norm(&Kernels::rms_norm,
                {out, x, nullptr, weight, nullptr, n1, s0, s1, 0, hidden, eps, weight_offset, dtype, weight_dtype},
                n0 * n1);
}

int octavo_layer_norm(void* out, const void* x, const void* weight, const void* bias, int64_t n0, int64_t n1,
                      int64_t s0, int64_t s1, int64_t hidden, float eps, float weight_offset, int dtype,
                      int weight_dtype) {
    if (n0 <= 0 || n1 <= 0) return OCTAVO_OK;
    return norm(&Kernels::layer_norm,
                {out, x, nullptr, weight, bias, n1, s0, s1, 0, hidden, eps, weight_offset, dtype, weight_dtype},
                n0 * n1);
}

int octavo_fused_add_rms_norm(void* x, void* residual, const void* weight, int64_t rows, int64_t x_stride,
                              int64_t residual_stride, int64_t hidden, float eps, float weight_offset, int dtype,
                              int weight_dtype) {
    return norm(&Kernels::fused_add_rms_norm,
                {x, x, residual, weight, nullptr, 1, x_stride, 0, residual_stride, hidden, eps, weight_offset, dtype,
                 weight_dtype},
                rows);
}

int octavo_rotary_embedding(void* query, void* key, const int64_t* positions, const float* cos_sin, int64_t tokens,
                            int64_t num_heads, int64_t num_kv_heads, int64_t query_token_stride,
                            int64_t query_head_stride, int64_t key_token_stride, int64_t key_head_stride,
                            int64_t rotary_dim, int64_t num_positions, int interleaved, int dtype) {
    if (!known(dtype)) return OCTAVO_BAD_DTYPE;
    if (rotary_dim < 0 || rotary_dim % 2 != 0) return OCTAVO_OUT_OF_RANGE;
    for (int64_t t = 0; t < tokens; ++t) {
        if (positions[t] < 0 || positions[t] >= num_positions) return OCTAVO_OUT_OF_RANGE;
    }
    const Rotary a = {{query, key},
                      {num_heads, num_kv_heads},
                      {query_token_stride, key_token_stride},
                      {query_head_stride, key_head_stride},
                      positions,
                      cos_sin,
                      rotary_dim,
                      interleaved != 0,
                      dtype};
    const auto function = kernels()->rotary_embedding;
    parallel_for(tokens, rows_for((num_heads + num_kv_heads) * rotary_dim),
                 [&](int64_t begin, int64_t end) { function(a, begin, end); });
    return OCTAVO_OK;
}

int octavo_activation_apply(void* out, const void* x, int64_t size, int activation, int dtype) {
    if (!known(dtype)) return OCTAVO_BAD_DTYPE;
    if (activation < OCTAVO_SILU || activation > OCTAVO_RELU2) return OCTAVO_UNKNOWN_NAME;
    const Activate a = {out, x, 0, 0, activation, dtype};
    const auto function = kernels()->activation;
    parallel_for(size, kGrainElements, [&](int64_t begin, int64_t end) { function(a, begin, end); });
    return OCTAVO_OK;
}

int octavo_act_and_mul(void* out, const void* x, int64_t rows, int64_t width, int64_t x_stride, int activation,
                       int dtype) {
    if (!known(dtype)) return OCTAVO_BAD_DTYPE;
    if (activation < OCTAVO_SILU || activation > OCTAVO_SWIGLU_CLAMPED) return OCTAVO_UNKNOWN_NAME;
    const Activate a = {out, x, width, x_stride, activation, dtype};
    const auto function = kernels()->act_and_mul;
    parallel_for(rows, rows_for(width), [&](int64_t begin, int64_t end) { function(a, begin, end); });
    return OCTAVO_OK;
}

int64_t octavo_block_elements(const octavo_attention* g) { return block_elements(*g); }

int octavo_check_batch(const octavo_attention* g) { return check_batch(*g); }

int octavo_write_kv(const octavo_attention* g, void* cache, const void* key, int64_t key_token_stride,
                    int64_t key_head_stride, const void* value, int64_t value_token_stride, int64_t value_head_stride) {
    return write_kv({g, cache, key, value, key_token_stride, key_head_stride, value_token_stride, value_head_stride});
}

int octavo_attend(const octavo_attention* g, void* out, int64_t out_token_stride, int64_t out_head_stride,
                  const void* query, int64_t query_token_stride, int64_t query_head_stride, const void* cache,
                  const float* sinks) {
    Attend a = {g,
                cache,
                query,
                out,
                sinks,
                query_token_stride,
                query_head_stride,
                out_token_stride,
                out_head_stride,
                nullptr,
                nullptr,
                nullptr,
                nullptr};
    return attend(a);
}

int octavo_copy_blocks(void* const* targets, const void* const* sources, int64_t num_layers, const int64_t* pairs,
                       int64_t num_pairs, int64_t block_bytes, int64_t num_target_blocks, int64_t num_source_blocks) {
    for (int64_t i = 0; i < num_pairs; ++i) {
        const int64_t from = pairs[2 * i], to = pairs[2 * i + 1];
        if (from < 0 || from >= num_source_blocks || to < 0 || to >= num_target_blocks) return OCTAVO_OUT_OF_RANGE;
    }
    const int64_t grain = std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, block_bytes));
    parallel_for(num_layers * num_pairs, grain, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const int64_t layer = i / num_pairs, pair = i % num_pairs;
            const char* from = static_cast<const char*>(sources[layer]) + pairs[2 * pair] * block_bytes;
            char* to = static_cast<char*>(targets[layer]) + pairs[2 * pair + 1] * block_bytes;
            std::copy(from, from + block_bytes, to);
        }
    });
    return OCTAVO_OK;
}

}  // extern "C"
