// Packed matrices: products of every format against float64, rows alone and together, rows taken back.
#pragma once

#include "support.h"

class MatrixCheck {
public:
    MatrixCheck(int format, int64_t rows, int64_t cols) : num_groups_((cols + 31) / 32) {
        matrix_.rows = rows;
        matrix_.cols = cols;
        matrix_.format = format;
        what_ = "matrix, format " + std::to_string(format) + ", " + std::to_string(rows) + " by " + std::to_string(cols);
    }

    void run() {
        pack();
        const int64_t width = matrix_.rows;  // of a row of results
        std::vector<float> alone(size_t(kRows * width)), x(size_t(kRows * matrix_.cols)), y(size_t(kRows * width));
        for (float& value : x) value = normal();
        check(multiply(y, x.data(), kRows), what_, "a product failed");
        for (int64_t r = 0; r < kRows; ++r) check_row(x.data() + r * matrix_.cols, y.data() + r * width);
        for (const int64_t r : {0, 1, 5, 13, 15, 16, 31, 32, 40, 49}) {
            check(multiply(alone, x.data() + r * matrix_.cols, 1), what_, "a row failed");
            check(std::equal(alone.begin(), alone.begin() + width, y.begin() + r * width), what_, "a row differs alone");
        }
        for (const int64_t rows : {2, 15, 17, 33, 48}) {
            check(multiply(alone, x.data(), rows), what_, "some rows failed");
            check(std::equal(alone.begin(), alone.begin() + rows * width, y.begin()), what_, "some rows differ");
        }
        take_back();
    }

private:
    static constexpr int64_t kRows = 50;
    using Packed = std::unique_ptr<char, decltype(&std::free)>;

    bool grouped() const { return matrix_.format >= OCTAVO_FORMAT_INT8; }
    bool wide() const { return matrix_.format == OCTAVO_FORMAT_INT8; }
    float normal() { return std::normal_distribution<float>()(generator); }

    void pack() {
        const int64_t rows = matrix_.rows, cols = matrix_.cols;
        weights_.assign(size_t(rows * cols), 0.0);
        const int64_t bytes = (CALL(octavo_packed_bytes)(&matrix_) + 63) / 64 * 64;
        memory_.reset(static_cast<char*>(std::aligned_alloc(64, size_t(bytes))));
        matrix_.data = memory_.get();
        if (!grouped()) {
            Buffer values(matrix_.format, rows * cols);
            for (int64_t i = 0; i < rows * cols; ++i) {
                values.put(i, normal());
                weights_[size_t(i)] = values.get(i);
            }
            const int status = CALL(octavo_pack_dense)(memory_.get(), &matrix_, values.data(), matrix_.format);
            check(status == OCTAVO_OK, what_, "packing failed");
            return;
        }
        const int64_t padded = num_groups_ * 32;
        const int offset = matrix_.format == OCTAVO_FORMAT_INT4_MIN ? 0 : wide() ? 128 : 8;
        std::vector<uint8_t> codes(size_t(rows * padded / (wide() ? 1 : 2)));
        Buffer scales(OCTAVO_FLOAT16, rows * num_groups_), minima(OCTAVO_FLOAT16, rows * num_groups_);
        for (int64_t i = 0; i < rows * num_groups_; ++i) {
            scales.put(i, normal() / 16);
            minima.put(i, offset ? 0.0f : normal());
        }
        for (int64_t i = 0; i < rows * padded; ++i) {
            const int64_t row = i / padded, col = i % padded;
            const int code = col < cols ? int(generator() % (wide() ? 256 : 16)) : offset;
            if (wide()) {
                codes[size_t(i)] = uint8_t(code);
            } else {
                codes[size_t(i / 2)] |= uint8_t(i % 2 ? code << 4 : code);
            }
            if (col >= cols) continue;
            const int64_t group = row * num_groups_ + col / 32;
            weights_[size_t(row * cols + col)] = double(scales.get(group)) * (code - offset) + minima.get(group);
        }
        octavo_matrix whole = matrix_;
        whole.cols = padded;
        const int status = CALL(octavo_pack_groups)(memory_.get(), &whole, codes.data(), scales.data(),
                                                    offset ? nullptr : minima.data());
        check(status == OCTAVO_OK, what_, "packing failed");
    }

    bool multiply(std::vector<float>& y, const float* x, int64_t rows) {
        return CALL(octavo_linear)(y.data(), &matrix_, x, rows, matrix_.cols, OCTAVO_FLOAT32) == OCTAVO_OK;
    }

    // What the product sees of its inputs: bfloat16, or codes of a group of 32.
    std::vector<double> seen(const float* x) const {
        std::vector<double> values(x, x + matrix_.cols);
        if (matrix_.format == OCTAVO_FORMAT_BFLOAT16) {
            Buffer narrow(OCTAVO_BFLOAT16, matrix_.cols);
            for (int64_t i = 0; i < matrix_.cols; ++i) {
                narrow.put(i, x[i]);
                values[size_t(i)] = narrow.get(i);
            }
        }
        for (int64_t g = 0; grouped() && g < num_groups_; ++g) {
            const int64_t first = g * 32, last = std::min(matrix_.cols, first + 32);
            float largest = 0.0f;
            for (int64_t i = first; i < last; ++i) largest = std::max(largest, std::fabs(x[i]));
            const float inverse = largest > 1e-30f ? 127.0f / largest : 0.0f, scale = largest * (1.0f / 127.0f);
            for (int64_t i = first; i < last; ++i) values[size_t(i)] = double(scale) * std::nearbyint(x[i] * inverse);
        }
        return values;
    }

    void check_row(const float* x, const float* y) {
        const std::vector<double> input = seen(x);
        for (int64_t n = 0; n < matrix_.rows; ++n) {
            double sum = 0, size = 0;
            for (int64_t k = 0; k < matrix_.cols; ++k) {
                const double product = input[size_t(k)] * weights_[size_t(n * matrix_.cols + k)];
                sum += product;
                size += std::fabs(product);
            }
            check(std::fabs(y[n] - sum) <= 1e-5 * size + 1e-6, what_, "a result is wrong");
        }
    }

    void take_back() {
        const std::vector<int64_t> ids = {matrix_.rows - 1, 0};
        std::vector<float> out(size_t(2 * matrix_.cols));
        check(CALL(octavo_unpack_rows)(out.data(), &matrix_, ids.data(), 2) == OCTAVO_OK, what_, "unpacking failed");
        for (int64_t i = 0; i < 2 * matrix_.cols; ++i) {
            const double want = weights_[size_t(ids[size_t(i / matrix_.cols)] * matrix_.cols + i % matrix_.cols)];
            check(std::fabs(out[size_t(i)] - want) <= 1e-6 * (1 + std::fabs(want)), what_, "a weight came back as another");
        }
        const int64_t wrong = matrix_.rows;
        check(CALL(octavo_unpack_rows)(out.data(), &matrix_, &wrong, 1) == OCTAVO_OUT_OF_RANGE, what_, "took a row");
    }

    octavo_matrix matrix_ = {};
    int64_t num_groups_;
    std::string what_;
    std::vector<double> weights_;
    Packed memory_{nullptr, &std::free};
};
