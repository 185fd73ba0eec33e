// Latent attention (MLA): keys and values are one latent row a token, shared by all heads, and each head's own
// projections of it are taken to the query before, and to the result after (the absorbed form of DeepSeek-V2).
#pragma once

#include "kernels/table.h"
#include "space.h"

namespace octavo {

// The normed stream, as each of the first matrices reads it: q_a where queries have a latent of their own, else q.
struct LatentInputs {
    Operand query, kv;
};

// out[num_tokens][num_heads * value_size] float = attention of the layer's tokens, which are written to its cache.
int attend_latent(const octavo_layer& layer, const octavo_attention& geometry, const int64_t* positions,
                  const LatentInputs& x, void* memory, float* out);
// Bytes of `memory` for tokens of activations of dtype float32 or bfloat16.
int64_t latent_bytes(const octavo_latent& latent, int64_t num_tokens);

}  // namespace octavo
