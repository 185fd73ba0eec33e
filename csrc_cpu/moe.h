// A mixture of experts: each token goes through the few experts that its router chooses.
#pragma once

#include "kernels/table.h"
#include "space.h"

namespace octavo {

// The normed stream, as each of a mixture's first matrices reads it.
struct MoeInputs {
    Operand router, experts, shared;
};

// out[num_tokens][hidden] = the sum of each token's experts, and the shared one. `memory`: of `moe_bytes`.
int run_moe(const octavo_moe& moe, const MoeInputs& x, int64_t num_tokens, int64_t hidden, void* memory, float* out);
int64_t moe_bytes(const octavo_moe& moe, int64_t num_tokens, int64_t hidden);

}  // namespace octavo
