// Sizes of packed matrices.
#pragma once

#include "kernels/table.h"

namespace octavo {

int64_t padded_cols(const octavo_matrix& m);
int64_t num_panels(const octavo_matrix& m);
int64_t panel_bytes(const octavo_matrix& m);  // 0: the format is unknown

}  // namespace octavo
