// Checks the library by itself: octavo_selfcheck LIBRARY CASES [ISA,... [EVERY]]. No Python, so that it runs in an
// emulator of an older processor, and under sanitizers. Each kernel, in each instruction set that the processor has,
// against float64; drawing tokens against whole numbers.

#include <fstream>
#include <sstream>

#include "attention.h"
#include "matrix.h"
#include "sample.h"
#include "support.h"

namespace {

void check_norms(int dtype, int weight_dtype, int64_t rows, int64_t width) {
    const std::string what = "norm, dtype " + std::to_string(dtype) + ", " + std::to_string(width);
    const int64_t stride = width + kGap;
    const Buffer input = random_rows(dtype, rows, width, 3.0f), second = random_rows(dtype, rows, width);
    Buffer weight = random_rows(weight_dtype, 1, width), bias = random_rows(weight_dtype, 1, width);
    Buffer x = input, residual = second, rms(dtype, rows * width), layer(dtype, rows * width);
    CALL(octavo_rms_norm)
    (rms.data(), x.data(), weight.data(), rows, 1, stride, 0, width, 1e-5f, 1.0f, dtype, weight_dtype);
    CALL(octavo_layer_norm)
    (layer.data(), x.data(), weight.data(), bias.data(), rows, 1, stride, 0, width, 1e-5f, 0.0f, dtype, weight_dtype);
    check(x == input, what, "the input changed");
    CALL(octavo_fused_add_rms_norm)
    (x.data(), residual.data(), weight.data(), rows, stride, stride, width, 1e-5f, 0.0f, dtype, weight_dtype);
    check(x.guarded() && residual.guarded() && rms.guarded() && layer.guarded(), what, "a guard was overwritten");
    for (int64_t r = 0; r < rows; ++r) {
        double mean = 0, squares = 0, spread = 0, sum_squares = 0;
        for (int64_t i = 0; i < width; ++i) mean += input.get(r * stride + i) / double(width);
        for (int64_t i = 0; i < width; ++i) {
            squares += square(input.get(r * stride + i)) / double(width);
            spread += square(input.get(r * stride + i) - mean) / double(width);
            sum_squares += square(residual.get(r * stride + i)) / double(width);
        }
        for (int64_t i = 0; i < width; ++i) {
            const double value = input.get(r * stride + i), w = weight.get(i);
            check_close(rms, r * width + i, value / std::sqrt(squares + 1e-5) * (w + 1), 2, what, "rms");
            check_close(layer, r * width + i, (value - mean) / std::sqrt(spread + 1e-5) * w + bias.get(i),
                        width == 1 ? 50 : 2, what, "layer");
            check_close(residual, r * stride + i, value + second.get(r * stride + i), 1, what, "sum");
            check_close(x, r * stride + i, residual.get(r * stride + i) / std::sqrt(sum_squares + 1e-5) * w, 2, what,
                        "fused");
        }
        for (int i = 0; i < kGap; ++i) check(x.untouched(r * stride + width + i), what, "wrote between rows");
    }
}

double activated(int kind, double x) {
    switch (kind) {
        case OCTAVO_SILU: return x / (1 + std::exp(-x));
        case OCTAVO_GELU: return x * 0.5 * std::erfc(-x / std::sqrt(2.0));
        case OCTAVO_GELU_TANH: return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
        case OCTAVO_RELU: return std::max(x, 0.0);
        default: return square(std::max(x, 0.0));
    }
}

void check_activations(int dtype, int64_t rows, int64_t width) {
    const int64_t stride = 2 * width + kGap;
    Buffer x = random_rows(dtype, rows, 2 * width, 4.0f);
    for (int kind = OCTAVO_SILU; kind <= OCTAVO_SWIGLU_CLAMPED; ++kind) {
        const std::string what = "activation " + std::to_string(kind) + ", dtype " + std::to_string(dtype);
        Buffer gated(dtype, rows * width), plain(dtype, width);
        CALL(octavo_act_and_mul)(gated.data(), x.data(), rows, width, stride, kind, dtype);
        if (kind != OCTAVO_SWIGLU_CLAMPED) CALL(octavo_activation_apply)(plain.data(), x.data(), width, kind, dtype);
        check(gated.guarded() && plain.guarded(), what, "a guard was overwritten");
        for (int64_t r = 0; r < rows; ++r) {
            for (int64_t i = 0; i < width; ++i) {
                double gate = x.get(r * stride + i), up = x.get(r * stride + width + i);
                double want = activated(kind, gate) * up;
                if (kind == OCTAVO_SWIGLU_CLAMPED) {
                    gate = std::min(gate, 7.0);
                    up = std::clamp(up, -7.0, 7.0);
                    want = gate / (1 + std::exp(-1.702 * gate)) * (up + 1);
                } else if (r == 0) {
                    check_close(plain, i, activated(kind, gate), 1 + std::fabs(gate), what, "plain");
                }
                check_close(gated, r * width + i, want, 1 + std::fabs(want), what, "gated");
            }
        }
    }
}

void check_rotary(int dtype, bool interleaved, int64_t tokens, int64_t head_size, int64_t rotary_dim) {
    const std::string what = "rotary_embedding, dtype " + std::to_string(dtype) + ", " + std::to_string(rotary_dim) +
                             " of " + std::to_string(head_size);
    const int64_t heads[2] = {3, 1}, token_stride = 4 * head_size + kGap, half = rotary_dim / 2;
    const int64_t num_positions = 40;
    const Buffer input = random_rows(dtype, tokens, 4 * head_size);
    Buffer x = input, table(OCTAVO_FLOAT32, num_positions * rotary_dim);
    for (int64_t p = 0; p < num_positions; ++p) {
        for (int64_t i = 0; i < half; ++i) {
            const float angle = float(p) * std::pow(100.0f, -float(i) / float(half));
            table.put(p * rotary_dim + i, std::cos(angle));
            table.put(p * rotary_dim + half + i, std::sin(angle));
        }
    }
    std::vector<int64_t> positions(static_cast<size_t>(tokens));
    for (int64_t t = 0; t < tokens; ++t) positions[size_t(t)] = t * 7 % num_positions;
    char* query = static_cast<char*>(x.data());
    CALL(octavo_rotary_embedding)
    (query, query + 3 * head_size * item_bytes(dtype), positions.data(), static_cast<float*>(table.data()), tokens,
     heads[0], heads[1], token_stride, head_size, token_stride, head_size, rotary_dim, num_positions, interleaved,
     dtype);
    check(x.guarded(), what, "a guard was overwritten");
    for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t h = 0; h < 4; ++h) {
            const int64_t at = t * token_stride + h * head_size, angles = positions[size_t(t)] * rotary_dim;
            for (int64_t i = 0; i < half; ++i) {
                const int64_t first = at + (interleaved ? 2 * i : i),
                              second = at + (interleaved ? 2 * i + 1 : half + i);
                const double a = input.get(first), b = input.get(second), c = table.get(angles + i),
                             s = table.get(angles + half + i);
                check_close(x, first, a * c - b * s, 1, what, "first half");
                check_close(x, second, b * c + a * s, 1, what, "second half");
            }
            for (int64_t d = rotary_dim; d < head_size; ++d)
                check(x.get(at + d) == input.get(at + d), what, "a dim past rotary_dim changed");
        }
    }
    positions.assign(positions.size(), num_positions);
    const int status = CALL(octavo_rotary_embedding)(query, query, positions.data(), static_cast<float*>(table.data()),
                                                     tokens, 1, 1, token_stride, head_size, token_stride, head_size,
                                                     rotary_dim, num_positions, interleaved, dtype);
    check(status == OCTAVO_OUT_OF_RANGE, what, "a position past the table was taken");
}

void check_copies() {
    const int64_t block_bytes = 100, layers = 2;
    std::vector<std::vector<char>> from(layers, std::vector<char>(7 * block_bytes)), to = from;
    for (auto& layer : from) {
        for (char& byte : layer) byte = char(generator());
    }
    std::vector<void*> sources = {from[0].data(), from[1].data()}, targets = {to[0].data(), to[1].data()};
    const int64_t pairs[] = {1, 5, 6, 0}, wrong[] = {7, 0};
    CALL(octavo_copy_blocks)(targets.data(), sources.data(), layers, pairs, 2, block_bytes, 7, 7);
    for (int64_t l = 0; l < layers; ++l) {
        for (int64_t b = 0; b < 7; ++b) {
            const int64_t source = b == 5 ? 1 : b == 0 ? 6 : -1;
            const char* block = to[size_t(l)].data() + b * block_bytes;
            check(source < 0 ? std::all_of(block, block + block_bytes, [](char byte) { return byte == 0; })
                             : std::equal(block, block + block_bytes, from[size_t(l)].data() + source * block_bytes),
                  "copy_blocks", "a block is not what it should be");
        }
    }
    check(CALL(octavo_copy_blocks)(targets.data(), sources.data(), layers, wrong, 1, block_bytes, 7, 7) ==
              OCTAVO_OUT_OF_RANGE,
          "copy_blocks", "took a block that is not there");
}

int dtype_of(const std::string& name) {
    if (name == "int8") return OCTAVO_INT8;
    return name == "float32" ? OCTAVO_FLOAT32 : name == "bfloat16" ? OCTAVO_BFLOAT16 : OCTAVO_FLOAT16;
}

bool read_cases(const char* path, std::vector<int64_t>& sizes, std::vector<AttentionCase>& cases) {
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);) {
        std::istringstream words(line);
        std::string kind;
        words >> kind;
        if (kind == "sizes") {
            for (int64_t size; words >> size;) sizes.push_back(size);
        } else if (kind == "attention") {
            AttentionCase c;
            octavo_attention& g = c.geometry;
            std::string dtype, kv_dtype, rows;
            words >> dtype >> kv_dtype >> g.block_size >> g.num_heads >> g.num_kv_heads >> g.head_size >>
                g.value_size >> g.window >> g.softcap >> c.sinks >> g.latent >> rows;
            if (!words) return false;
            g.dtype = dtype_of(dtype);
            g.kv_dtype = dtype_of(kv_dtype);
            g.scale = 1.0f / std::sqrt(float(g.head_size));
            std::istringstream parts(rows);
            char slash, comma;
            for (Row row; parts >> row.queries >> slash >> row.length; parts >> comma) c.rows.push_back(row);
            c.text = line;
            cases.push_back(c);
        }
    }
    return !sizes.empty() && !cases.empty();
}

}  // namespace

int main(int argc, char** argv) {
    std::vector<int64_t> sizes;
    std::vector<AttentionCase> cases;
    if (argc < 3 || argc > 5 || !read_cases(argv[2], sizes, cases)) {
        std::fprintf(stderr, "usage: octavo_selfcheck LIBRARY CASES [ISA,... [EVERY]]\n");
        return 2;
    }
    library = dlopen(argv[1], RTLD_NOW);
    if (library == nullptr) {
        std::fprintf(stderr, "%s\n", dlerror());
        return 2;
    }
    const size_t every = argc > 4 ? size_t(std::atoi(argv[4])) : 1;  // emulators are slow: every nth case
    // Those named, else all that this processor has.
    std::istringstream isas(argc > 3 ? argv[3] : CALL(octavo_isas_usable)());
    for (std::string isa; std::getline(isas, isa, ',');) {
        if (CALL(octavo_set_isa)(isa.c_str()) != OCTAVO_OK || isa != CALL(octavo_isa)()) {
            std::fprintf(stderr, "this processor or library has no %s\n", isa.c_str());
            return 2;
        }
        const long before = num_checks;
        CALL(octavo_set_num_threads)(2);
        for (const int64_t size : sizes) {
            for (int dtype = 0; dtype < 3; ++dtype) {
                check_norms(dtype, (dtype + int(size)) % 3, 3, size);
                check_activations(dtype, 2, size);
                check_rotary(dtype, false, 3, size + 1, (size + 1) / 2 * 2);
                check_rotary(dtype, true, 3, size + 3, std::min<int64_t>(size + 1, 64) / 2 * 2);
            }
        }
        check_copies();
        for (const int64_t size : sizes) SampleCheck(size).run();
        SampleCheck(5000).run();
        for (int format = OCTAVO_FORMAT_FLOAT32; format <= OCTAVO_FORMAT_INT4_MIN; ++format) {
            for (const int64_t size : sizes) MatrixCheck(format, size, sizes.back() - size + 1).run();
        }
        for (size_t i = 0; i < cases.size(); i += every) AttentionCheck(cases[i]).run();
        std::printf("%s: %ld checks\n", isa.c_str(), num_checks - before);
    }
    std::printf("%d of %ld checks failed\n", num_failures, num_checks);
    return num_failures == 0 ? 0 : 1;
}
