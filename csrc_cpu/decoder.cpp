// A decoder's step in one call: what core's generic program does op by op, on packed matrices and with the residual
// stream in float. Everything works row by row, so a row has the same bits whatever the other rows.

#include <algorithm>
#include <cstring>

#include "attend.h"
#include "isa.h"
#include "latent.h"
#include "linear.h"
#include "moe.h"
#include "pack.h"
#include "pool.h"
#include "space.h"

namespace octavo {
namespace {

constexpr int64_t kTokenGrain = 8;  // tokens that are worth handing out, of work by token

int64_t dtype_bytes(int dtype) { return dtype == OCTAVO_FLOAT32 ? 4 : 2; }

// The widest part of any layer, which buffers are made for.
struct Widths {
    int64_t qkv = 0, attended = 0, middle = 0;

    explicit Widths(const octavo_decoder& d) {
        for (int64_t i = 0; i < d.num_layers; ++i) {
            const octavo_layer& layer = d.layers[i];
            qkv = std::max(qkv, layer.qkv.rows);
            attended = std::max(attended, layer.o.cols);
            middle = std::max(middle, layer.down.cols);
        }
    }
};

// Of the largest mixture of experts.
int64_t mixture_bytes(const octavo_decoder& d, int64_t tokens) {
    int64_t bytes = 0;
    for (int64_t i = 0; i < d.num_layers; ++i) {
        if (d.layers[i].moe) bytes = std::max(bytes, moe_bytes(*d.layers[i].moe, tokens, d.hidden));
    }
    return bytes;
}

// Of the largest latent attention.
int64_t latent_bytes_of(const octavo_decoder& d, int64_t tokens) {
    int64_t bytes = 0;
    for (int64_t i = 0; i < d.num_layers; ++i) {
        if (d.layers[i].latent) bytes = std::max(bytes, latent_bytes(*d.layers[i].latent, tokens));
    }
    return bytes;
}

// What the MLP of a layer reads: `up` alone, or what a mixture does.
struct MlpInputs {
    Operand up;
    MoeInputs moe;
};

// What a step keeps of its tokens. Operands take the widest of their formats.
struct Buffers {
    float *stream, *branch, *qkv, *kept;
    void *normed, *normed_mlp, *normed_router, *normed_shared, *normed_query, *narrow, *attended, *middle, *last, *moe, *latent;
    float* best_values;
    int32_t* best_ids;

    Buffers(Space& space, const octavo_decoder& d, int64_t tokens, int64_t rows) {
        const Widths widths(d);
        const auto operand = [&](int64_t n, int64_t size) {
            return space.take(std::max(operand_bytes(n, size, OCTAVO_FORMAT_FLOAT32),
                                       operand_bytes(n, size, OCTAVO_FORMAT_INT8)));
        };
        stream = space.take<float>(tokens * d.hidden * 4);
        branch = space.take<float>(tokens * d.hidden * 4);
        qkv = space.take<float>(tokens * widths.qkv * 4);
        narrow = space.take(tokens * widths.qkv * dtype_bytes(d.dtype));
        normed = operand(tokens, d.hidden);
        normed_mlp = operand(tokens, d.hidden);
        attended = space.take(tokens * widths.attended * 4);
        middle = operand(tokens, std::max(widths.middle, widths.attended));
        const int64_t mixed = mixture_bytes(d, tokens);
        normed_router = mixed ? operand(tokens, d.hidden) : nullptr;
        normed_shared = mixed ? operand(tokens, d.hidden) : nullptr;
        moe = space.take(mixed);
        const int64_t latent_space = latent_bytes_of(d, tokens);
        normed_query = latent_space ? operand(tokens, d.hidden) : nullptr;
        latent = space.take(latent_space);
        kept = space.take<float>(rows * d.hidden * 4);
        last = operand(rows, d.hidden);
        const int64_t units = (num_panels(d.head) + 1) / 2;
        best_values = space.take<float>(rows * units * 4);
        best_ids = space.take<int32_t>(rows * units * 4);
    }
};

class Decoder {
public:
    Decoder(const octavo_decoder& decoder, const octavo_step& step, const Buffers& buffers)
        : d_(decoder), s_(step), b_(buffers) {}

    int run() {
        embed();
        for (int64_t i = 0; i < d_.num_layers; ++i) {
            if (s_.on_layer) s_.on_layer();
            const int status = layer(d_.layers[i]);
            if (status != OCTAVO_OK) return status;
        }
        if (s_.num_rows == 0) return OCTAVO_OK;
        for (int64_t i = 0; i < s_.num_rows; ++i) {
            std::memcpy(b_.kept + i * d_.hidden, b_.stream + s_.rows[i] * d_.hidden, size_t(d_.hidden) * 4);
        }
        norm_to(b_.kept, d_.final_norm, s_.hidden, false, 1.0f, s_.num_rows);
        return s_.greedy_ids ? choose() : OCTAVO_OK;
    }

private:
    void embed() {
        const auto& k = *kernels();
        const int64_t bytes = panel_bytes(d_.embedding), hidden = d_.hidden;
        parallel_for(s_.num_tokens, kTokenGrain, [&](int64_t begin, int64_t end) {
            if (s_.embeds) {
                std::memcpy(b_.stream + begin * hidden, s_.embeds + begin * hidden, size_t((end - begin) * hidden) * 4);
            } else {
                k.unpack(b_.stream, d_.embedding, bytes, s_.token_ids, begin, end);
            }
            for (int64_t t = begin; t < end; ++t) {
                float* x = b_.stream + t * hidden;
                const float* table = d_.positions ? d_.positions + (s_.positions[t] + d_.position_offset) * hidden : nullptr;
                for (int64_t i = 0; i < hidden; ++i) {
                    x[i] *= d_.embedding_scale;
                    if (table) x[i] += table[i];
                }
            }
        });
        if (d_.embedding_norm.kind) norm_to(b_.stream, d_.embedding_norm, b_.stream, false, 1.0f, s_.num_tokens);
    }

    int layer(const octavo_layer& l) {
        const bool parallel = l.residual != OCTAVO_SEQUENTIAL;
        // In a parallel layer the MLP reads the stream as attention did, before anything is added.
        MlpInputs inputs = {};
        if (parallel) inputs = mlp_inputs(l, l.residual == OCTAVO_PARALLEL_SHARED_NORM ? l.attn_pre : l.mlp_pre);
        const int status = l.latent ? latent_attention(l) : attention(l, normed(l.attn_pre, l.qkv, b_.normed));
        if (status != OCTAVO_OK) return status;
        if (!parallel) inputs = mlp_inputs(l, l.mlp_pre);
        return l.moe ? mixture(l, inputs.moe) : mlp(l, inputs.up);
    }

    MlpInputs mlp_inputs(const octavo_layer& l, const octavo_norm& norm) const {
        MlpInputs inputs = {};
        if (!l.moe) {
            inputs.up = normed(norm, l.up, b_.normed_mlp);
            return inputs;
        }
        inputs.moe.router = normed(norm, l.moe->router, b_.normed_router);
        inputs.moe.experts = normed(norm, l.moe->up, b_.normed_mlp);
        if (l.moe->shared_up.data) inputs.moe.shared = normed(norm, l.moe->shared_up, b_.normed_shared);
        return inputs;
    }

    int attention(const octavo_layer& l, const Operand& input) {
        const octavo_attention& g = s_.groups[l.group];
        Product qkv = product(l.qkv, input);
        qkv.out = b_.qkv;
        qkv.out_stride = l.qkv.rows;
        if (!multiply(qkv)) return OCTAVO_NO_MEMORY;

        const bool narrow = g.dtype != OCTAVO_FLOAT32;
        void* const rotated = narrow ? b_.narrow : static_cast<void*>(b_.qkv);
        const Rotate rotate = {b_.qkv,         rotated,        l.qkv.rows,  &l,
                               s_.positions,   g.num_heads,    g.num_kv_heads,
                               g.head_size,    g.dtype};
        const int64_t head = g.head_size, stride = l.qkv.rows, bytes = dtype_bytes(g.dtype);
        const char* const query = static_cast<const char*>(rotated);
        const char* const key = query + g.num_heads * head * bytes;
        const char* const value = key + g.num_kv_heads * head * bytes;
        const WriteKv write = {&g, l.cache, key, value, stride, head, stride, head};
        const Kernels& k = *kernels();
        parallel_for(s_.num_tokens, kTokenGrain, [&](int64_t begin, int64_t end) {
            k.rotate(rotate, begin, end);
            k.write_kv(write, begin, end);
        });

        const int format = operand_format(l.o);
        const bool as_it_is = format == g.dtype && l.o.cols % kGroup == 0;
        const Operand attended = make_operand(b_.middle, s_.num_tokens, l.o);
        void* const out = as_it_is ? attended.data : b_.attended;
        const int64_t out_stride = as_it_is ? attended.stride : l.o.cols;
        Attend a = {};
        a.geometry = &g;
        a.cache = l.cache;
        a.query = query;
        a.out = out;
        a.sinks = l.sinks;
        a.query_token_stride = stride;
        a.query_head_stride = head;
        a.out_token_stride = out_stride;
        a.out_head_stride = head;
        const int status = attend(a);
        if (status != OCTAVO_OK) return status;
        if (!as_it_is) convert({b_.attended, l.o.cols, l.o.cols, g.dtype, attended}, s_.num_tokens);
        return add_branch(l.o, attended, l.attn_post, l.residual_scale);
    }

    int latent_attention(const octavo_layer& l) {
        const octavo_latent& latent = *l.latent;
        const octavo_matrix& first = latent.q_a.data ? latent.q_a : latent.q;
        const LatentInputs inputs = {normed(l.attn_pre, first, b_.normed_query),
                                     normed(l.attn_pre, latent.kv_a, b_.normed)};
        auto* const attended = static_cast<float*>(b_.attended);
        const int status = attend_latent(l, s_.groups[l.group], s_.positions, inputs, b_.latent, attended);
        if (status != OCTAVO_OK) return status;
        const Operand x = make_operand(b_.middle, s_.num_tokens, l.o);
        convert({attended, l.o.cols, l.o.cols, OCTAVO_FLOAT32, x}, s_.num_tokens);
        return add_branch(l.o, x, l.attn_post, l.residual_scale);
    }

    int mlp(const octavo_layer& l, const Operand& input) {
        Product up = product(l.up, input);
        up.finish = kOperand;
        up.activation = l.activation;
        up.to = make_operand(b_.middle, s_.num_tokens, l.down);
        if (!multiply(up)) return OCTAVO_NO_MEMORY;
        return add_branch(l.down, up.to, l.mlp_post, l.residual_scale);
    }

    int mixture(const octavo_layer& l, const MoeInputs& inputs) {
        const int status = run_moe(*l.moe, inputs, s_.num_tokens, d_.hidden, b_.moe, b_.branch);
        if (status != OCTAVO_OK) return status;
        norm_to(b_.branch, l.mlp_post, b_.stream, true, l.residual_scale, s_.num_tokens);
        return OCTAVO_OK;
    }

    // stream += scale * post(weight times x)
    int add_branch(const octavo_matrix& weight, const Operand& x, const octavo_norm& post, float scale) {
        Product p = product(weight, x);
        p.out = post.kind ? b_.branch : b_.stream;
        p.out_stride = d_.hidden;
        p.finish = post.kind ? kStore : kAdd;
        p.scale = scale;
        if (!multiply(p)) return OCTAVO_NO_MEMORY;
        if (post.kind) norm_to(b_.branch, post, b_.stream, true, scale, s_.num_tokens);
        return OCTAVO_OK;
    }

    int choose() {
        const Operand x = make_operand(b_.last, s_.num_rows, d_.head);
        convert({s_.hidden, d_.hidden, d_.hidden, OCTAVO_FLOAT32, x}, s_.num_rows);
        Product p = product(d_.head, x);
        p.num_rows = s_.num_rows;
        p.finish = kBest;
        p.scale = d_.logit_scale;
        p.softcap = d_.logit_softcap;
        p.best_values = b_.best_values;
        p.best_ids = b_.best_ids;
        if (!multiply(p)) return OCTAVO_NO_MEMORY;
        for (int64_t r = 0; r < s_.num_rows; ++r) {
            const float* values = b_.best_values + r * p.num_units;
            const int32_t* ids = b_.best_ids + r * p.num_units;
            int64_t best = 0;
            bool numbers = true;
            for (int64_t u = 0; u < p.num_units; ++u) {
                numbers = numbers && ids[u] >= 0;
                if (values[u] > values[best]) best = u;
            }
            s_.greedy_ids[r] = numbers ? ids[best] : -1;
        }
        return OCTAVO_OK;
    }

    Product product(const octavo_matrix& weight, const Operand& x) const {
        Product p = {};
        p.x = x;
        p.weight = weight;
        p.num_rows = s_.num_tokens;
        p.finish = kStore;
        p.scale = 1.0f;
        return p;
    }

    Operand normed(const octavo_norm& norm, const octavo_matrix& weight, void* memory) const {
        const Operand to = make_operand(memory, s_.num_tokens, weight);
        prepare({b_.stream, d_.hidden, d_.hidden, norm, to, nullptr, 0, false, 1.0f}, s_.num_tokens);
        return to;
    }

    void norm_to(const float* x, const octavo_norm& norm, float* out, bool add, float scale, int64_t rows) const {
        prepare({x, d_.hidden, d_.hidden, norm, {}, out, d_.hidden, add, scale}, rows);
    }

    const octavo_decoder& d_;
    const octavo_step& s_;
    const Buffers& b_;
};

bool in_range(const octavo_decoder& d, const octavo_step& s) {
    int num_groups = 0;  // in the order of their first layers
    int64_t num_positions = d.positions ? d.num_positions - d.position_offset : INT64_MAX;
    for (int64_t i = 0; i < d.num_layers; ++i) {
        const octavo_layer& layer = d.layers[i];
        if (layer.cos_sin) num_positions = std::min(num_positions, layer.num_positions);
        if (layer.group == num_groups) {
            const octavo_attention& g = s.groups[num_groups++];
            if (g.num_tokens != s.num_tokens || check_batch(g) != OCTAVO_OK) return false;
        }
        if (layer.group >= num_groups || !layer.cache) return false;
    }
    for (int64_t t = 0; t < s.num_tokens; ++t) {
        if (!s.embeds && (s.token_ids[t] < 0 || s.token_ids[t] >= d.embedding.rows)) return false;
        if (s.positions[t] < 0 || s.positions[t] >= num_positions) return false;
    }
    for (int64_t r = 0; r < s.num_rows; ++r) {
        if (s.rows[r] < 0 || s.rows[r] >= s.num_tokens) return false;
    }
    return true;
}

}  // namespace
}  // namespace octavo

using namespace octavo;

extern "C" {

int64_t octavo_decoder_workspace(const octavo_decoder* d, int64_t num_tokens, int64_t num_rows) {
    Space space = {nullptr};
    Buffers(space, *d, num_tokens, num_rows);
    return space.used;
}

int octavo_decoder_step(const octavo_decoder* d, const octavo_step* s) {
    if (d->dtype != OCTAVO_FLOAT32 && d->dtype != OCTAVO_BFLOAT16) return OCTAVO_BAD_DTYPE;
    if (!in_range(*d, *s)) return OCTAVO_OUT_OF_RANGE;
    if (s->num_tokens == 0) return OCTAVO_OK;
    Space space = {static_cast<char*>(s->workspace)};
    const Buffers buffers(space, *d, s->num_tokens, s->num_rows);
    const Together together;
    return Decoder(*d, *s, buffers).run();
}

int octavo_decoder_logits(const octavo_decoder* d, float* logits, const float* hidden, int64_t num_rows,
                          void* workspace) {
    const Operand x = make_operand(workspace, num_rows, d->head);
    const Together together;
    convert({hidden, d->hidden, d->hidden, OCTAVO_FLOAT32, x}, num_rows);
    Product p = {};
    p.x = x;
    p.weight = d->head;
    p.num_rows = num_rows;
    p.finish = kStoreLogits;
    p.out = logits;
    p.out_stride = d->head.rows;
    p.scale = d->logit_scale;
    p.softcap = d->logit_softcap;
    return multiply(p) ? OCTAVO_OK : OCTAVO_NO_MEMORY;
}

}  // extern "C"
