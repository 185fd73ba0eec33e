// Products, cut into units and handed to the threads.
#pragma once

#include "kernels/table.h"

namespace octavo {

// The format of the inputs that a matrix is multiplied with.
int operand_format(const octavo_matrix& weight);
// Bytes of an operand of so many rows and a format, and one laid out in that memory, which is aligned to 64 bytes:
// the inputs of a matrix.
int64_t operand_bytes(int64_t rows, int64_t size, int format);
Operand make_operand(void* memory, int64_t rows, const octavo_matrix& weight);

// Runs a product whose x, weight, num_rows, finish and outputs are set. False where there is no memory.
bool multiply(Product& p);
void prepare(const Prepare& p, int64_t num_rows);
void convert(const Convert& p, int64_t num_rows);

}  // namespace octavo
