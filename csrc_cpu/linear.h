// Products, cut into units and handed to the threads.
#pragma once

#include <vector>

#include "kernels/table.h"

namespace octavo {

// The format of the inputs that a matrix is multiplied with.
int operand_format(const octavo_matrix& weight);
// Bytes of an operand of so many rows and a format, and one laid out in that memory, which is aligned to 64 bytes:
// the inputs of a matrix.
int64_t operand_bytes(int64_t rows, int64_t size, int format);
Operand make_operand(void* memory, int64_t rows, const octavo_matrix& weight);
// Its rows from one on.
Operand rows_from(const Operand& x, int64_t row);

// Runs a product whose x, weight, num_rows, finish and outputs are set. False where there is no memory.
bool multiply(Product& p);

// Rows [begin, end) of a product, times a matrix of their own.
struct Segment {
    octavo_matrix weight;
    int64_t begin, end;
    float* out = nullptr;  // of the first of them; null: where the product's row `begin` is
};
// The same, of segments whose matrices have one shape and format.
bool multiply_each(Product& p, const std::vector<Segment>& segments);
void prepare(const Prepare& p, int64_t num_rows);
void convert(const Convert& p, int64_t num_rows);
// Row i of `to` = row rows[i] of `from`; both are inputs of one matrix.
void gather(const Operand& from, const int32_t* rows, int64_t num_rows, const Operand& to);

}  // namespace octavo
