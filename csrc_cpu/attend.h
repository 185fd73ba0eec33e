// A step's attention, for callers within the library: cuts it into tiles and shares them out among the threads.
#pragma once

#include <cstdint>

#include "kernels/table.h"

namespace octavo {

// Elements of one block of one layer.
int64_t block_elements(const octavo_attention& g);

// Whether the batch is consistent; once a step, so that the calls below need not look.
int check_batch(const octavo_attention& g);

// Stores a step's keys and values at their slots. Where latent, value and its strides are ignored.
int write_kv(const WriteKv& a);

// Attends a step's queries to the cache. Whatever `a` holds from `tiles` on is overwritten.
int attend(Attend& a);

}  // namespace octavo
