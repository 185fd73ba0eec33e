// Which instruction set serves.
#pragma once

#include "kernels/table.h"

namespace octavo {

// The kernels in use, or null where this processor runs none of those built.
const Kernels* kernels();
// Picks the best usable set up to `cap`; false where the name is unknown or nothing is usable.
bool set_isa(const char* cap);
const char* isas_built();
const char* isas_usable();

}  // namespace octavo
