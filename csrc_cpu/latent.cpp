#include "latent.h"

#include <algorithm>
#include <new>
#include <vector>

#include "attend.h"
#include "isa.h"
#include "linear.h"
#include "pack.h"
#include "pool.h"

namespace octavo {
namespace {

constexpr int64_t kTokenGrain = 8;  // tokens that are worth handing out

// Rows of keys and queries as attention reads them: padded to whole groups, as the conversion to bfloat16 leaves them.
int64_t row_stride(const octavo_latent& l) { return (l.rank + l.rope_size + kGroup - 1) / kGroup * kGroup; }

// What a step keeps of a layer. By head: all tokens of the first head, then of the next.
struct Buffers {
    float *q_latent, *q, *query, *kv, *attended;
    void *q_input, *by_head, *narrow_query, *narrow_kv;

    Buffers(Space& space, const octavo_latent& l, int64_t num_tokens) {
        const int64_t by_heads = num_tokens * l.num_heads, row = row_stride(l);
        const auto operand = [&](int64_t rows, const octavo_matrix& weight) {
            return space.take(operand_bytes(rows, weight.cols, operand_format(weight)));
        };
        q_latent = space.take<float>(num_tokens * l.q.cols * 4);
        q_input = operand(num_tokens, l.q);
        q = space.take<float>(by_heads * (l.nope_size + l.rope_size) * 4);
        by_head = space.take(std::max(operand_bytes(by_heads, l.nope_size, operand_format(l.to_latent)),
                                      operand_bytes(by_heads, l.rank, operand_format(l.from_latent))));
        query = space.take<float>(by_heads * row * 4);
        kv = space.take<float>(num_tokens * row * 4);
        narrow_query = space.take(by_heads * row * 2);
        narrow_kv = space.take(num_tokens * row * 2);
        attended = space.take<float>(by_heads * l.rank * 4);
    }
};

class Layer {
public:
    Layer(const octavo_layer& layer, const octavo_attention& geometry, const int64_t* positions, const Buffers& buffers)
        : layer_(layer), l_(*layer.latent), g_(geometry), positions_(positions), num_tokens_(geometry.num_tokens),
          b_(buffers) {}

    int run(const LatentInputs& x, float* out) {
        if (!project_queries(x.query) || !project_kv(x.kv) || !absorb_keys()) return OCTAVO_NO_MEMORY;
        const int status = attend_rows();
        if (status != OCTAVO_OK) return status;
        return project_values(out) ? OCTAVO_OK : OCTAVO_NO_MEMORY;
    }

private:
    // q[tokens][heads][nope | rope], the latter rotated.
    bool project_queries(const Operand& x) {
        Operand input = x;
        if (l_.q_a.data) {
            if (!store(l_.q_a, x, num_tokens_, b_.q_latent, l_.q_a.rows)) return false;
            input = make_operand(b_.q_input, num_tokens_, l_.q);
            prepare({b_.q_latent, l_.q_a.rows, l_.q_a.rows, l_.q_a_norm, input, nullptr, 0, false, 1.0f}, num_tokens_);
        }
        if (!store(l_.q, input, num_tokens_, b_.q, l_.q.rows)) return false;
        rotate(b_.q + l_.nope_size, l_.num_heads, l_.nope_size + l_.rope_size, l_.q.rows);
        return true;
    }

    // kv[tokens][latent, normed | rope, rotated]
    bool project_kv(const Operand& x) {
        const int64_t row = row_stride(l_);
        if (!store(l_.kv_a, x, num_tokens_, b_.kv, row)) return false;
        prepare({b_.kv, row, l_.rank, l_.kv_a_norm, {}, b_.kv, row, false, 1.0f}, num_tokens_);
        rotate(b_.kv + l_.rank, 1, l_.rope_size, row);
        return true;
    }

    // query[tokens][heads][nope through the head's key projection | rope]
    bool absorb_keys() {
        const int64_t size = l_.nope_size + l_.rope_size, row = row_stride(l_);
        const int64_t by_heads = num_tokens_ * l_.num_heads;
        const Operand x = make_operand(b_.by_head, by_heads, l_.to_latent);
        for (int64_t h = 0; h < l_.num_heads; ++h) {
            convert({b_.q + h * size, l_.q.rows, l_.nope_size, OCTAVO_FLOAT32, rows_from(x, h * num_tokens_)},
                    num_tokens_);
        }
        if (!by_head(l_.to_latent, l_.to_latent_bytes, x, b_.query, row)) return false;
        parallel_for(by_heads, kTokenGrain, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) {
                std::copy_n(b_.q + i * size + l_.nope_size, l_.rope_size, b_.query + i * row + l_.rank);
            }
        });
        return true;
    }

    int attend_rows() {
        const int64_t row = row_stride(l_);
        const bool narrow = g_.dtype != OCTAVO_FLOAT32;
        if (narrow) {
            to_bfloat16(b_.query, b_.narrow_query, num_tokens_ * l_.num_heads);
            to_bfloat16(b_.kv, b_.narrow_kv, num_tokens_);
        }
        const void* const kv = narrow ? b_.narrow_kv : b_.kv;
        const int status = write_kv({&g_, layer_.cache, kv, kv, row, row, row, row});
        if (status != OCTAVO_OK) return status;
        Attend a = {};
        a.geometry = &g_;
        a.cache = layer_.cache;
        a.query = narrow ? b_.narrow_query : b_.query;
        a.out = b_.attended;
        a.query_token_stride = l_.num_heads * row;
        a.query_head_stride = row;
        a.out_token_stride = l_.num_heads * l_.rank;
        a.out_head_stride = l_.rank;
        return attend(a);
    }

    // out[tokens][heads][value] = what was attended to, through the head's value projection.
    bool project_values(float* out) {
        const int64_t element = g_.dtype == OCTAVO_FLOAT32 ? 4 : 2;
        const Operand x = make_operand(b_.by_head, num_tokens_ * l_.num_heads, l_.from_latent);
        for (int64_t h = 0; h < l_.num_heads; ++h) {
            convert({reinterpret_cast<const char*>(b_.attended) + h * l_.rank * element, l_.num_heads * l_.rank,
                     l_.rank, g_.dtype, rows_from(x, h * num_tokens_)},
                    num_tokens_);
        }
        return by_head(l_.from_latent, l_.from_latent_bytes, x, out, l_.from_latent.rows);
    }

    // out[tokens][heads][stride] = the rows of each head, [heads][tokens] of x, times the head's matrix.
    bool by_head(const octavo_matrix& first, int64_t bytes, const Operand& x, float* out, int64_t stride) {
        std::vector<Segment> segments;
        for (int64_t h = 0; h < l_.num_heads; ++h) {
            octavo_matrix weight = first;
            weight.data = static_cast<const char*>(first.data) + h * bytes;
            segments.push_back({weight, h * num_tokens_, (h + 1) * num_tokens_, out + h * stride});
        }
        Product p = {};
        p.x = x;
        p.finish = kStore;
        p.out_stride = l_.num_heads * stride;
        return multiply_each(p, segments);
    }

    void rotate(float* first, int64_t num_heads, int64_t size, int64_t stride) const {
        const Rotate a = {first, nullptr, stride, &layer_, positions_, int(num_heads), 0, int(size), OCTAVO_FLOAT32};
        const auto kernel = kernels()->rotate;
        parallel_for(num_tokens_, kTokenGrain, [&](int64_t begin, int64_t end) { kernel(a, begin, end); });
    }

    void to_bfloat16(const float* x, void* out, int64_t num_rows) const {
        const int64_t row = row_stride(l_);
        const Operand to = {out, row, nullptr, nullptr, row / kGroup, OCTAVO_FORMAT_BFLOAT16, 1};
        convert({x, row, l_.rank + l_.rope_size, OCTAVO_FLOAT32, to}, num_rows);
    }

    static bool store(const octavo_matrix& weight, const Operand& x, int64_t num_rows, float* out, int64_t stride) {
        Product p = {};
        p.x = x;
        p.weight = weight;
        p.num_rows = num_rows;
        p.finish = kStore;
        p.out = out;
        p.out_stride = stride;
        return multiply(p);
    }

    const octavo_layer& layer_;
    const octavo_latent& l_;
    const octavo_attention& g_;
    const int64_t* const positions_;
    const int64_t num_tokens_;
    const Buffers& b_;
};

}  // namespace

int attend_latent(const octavo_layer& layer, const octavo_attention& geometry, const int64_t* positions,
                  const LatentInputs& x, void* memory, float* out) {
    try {
        Space space = {static_cast<char*>(memory)};
        const Buffers buffers(space, *layer.latent, geometry.num_tokens);
        return Layer(layer, geometry, positions, buffers).run(x, out);
    } catch (const std::bad_alloc&) {
        return OCTAVO_NO_MEMORY;
    }
}

int64_t latent_bytes(const octavo_latent& latent, int64_t num_tokens) {
    Space space = {nullptr};
    Buffers(space, latent, num_tokens);
    return space.used;
}

}  // namespace octavo
