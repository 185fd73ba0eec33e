#include "moe.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <new>
#include <numeric>
#include <vector>

#include "linear.h"
#include "pack.h"
#include "pool.h"

namespace octavo {
namespace {

constexpr int64_t kTokenGrain = 8;  // tokens that are worth handing out

// What a step keeps of a mixture. A pair is a token and one expert of it; pairs are numbered by expert, those of one
// expert by token.
struct Buffers {
    float *scores, *choice, *weights, *outs, *shared_gates, *shared_outs;
    int32_t *order, *ids, *tokens, *pairs;
    void *gathered, *middle, *shared_middle;

    Buffers(Space& space, const octavo_moe& m, int64_t num_tokens, int64_t hidden) {
        const int64_t num_pairs = num_tokens * m.top_k, num_scores = num_tokens * m.num_experts;
        const auto operand = [&](int64_t rows, const octavo_matrix& weight) {
            return space.take(operand_bytes(rows, weight.cols, operand_format(weight)));
        };
        scores = space.take<float>(num_scores * 4);
        choice = space.take<float>(num_scores * 4);
        order = space.take<int32_t>(num_scores * 4);
        weights = space.take<float>(num_pairs * 4);
        ids = space.take<int32_t>(num_pairs * 4);
        pairs = space.take<int32_t>(num_pairs * 4);
        tokens = space.take<int32_t>(num_pairs * 4);
        gathered = operand(num_pairs, m.up);
        middle = operand(num_pairs, m.down);
        outs = space.take<float>(num_pairs * hidden * 4);
        shared_middle = operand(num_tokens, m.shared_down);
        shared_outs = space.take<float>(num_tokens * hidden * 4);
        shared_gates = space.take<float>(num_tokens * 4);
    }
};

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

bool larger(float a, float b) { return a > b || (b != b && a == a); }

// The `count` largest of values, best first; among equals the lowest id. What is not a number comes last.
void choose_top(const float* values, int num_values, int count, int32_t* ids) {
    int kept = 0;
    for (int i = 0; i < num_values; ++i) {
        int at = kept;
        while (at > 0 && larger(values[i], values[ids[at - 1]])) --at;
        if (at == count) continue;
        kept = std::min(kept + 1, count);
        for (int j = kept - 1; j > at; --j) ids[j] = ids[j - 1];
        ids[at] = i;
    }
}

void softmax(float* x, int size) {
    const float top = *std::max_element(x, x + size);
    float sum = 0.0f;
    for (int i = 0; i < size; ++i) sum += x[i] = std::exp(x[i] - top);
    for (int i = 0; i < size; ++i) x[i] /= sum;
}

// Leaves the choice to the best groups of experts; `order` is memory, one an expert.
void drop_groups(const octavo_moe& m, float* choice, int32_t* order) {
    const int size = m.num_experts / m.num_groups;
    std::vector<float> worth(size_t(m.num_groups), 0.0f);
    for (int g = 0; g < m.num_groups; ++g) {
        const float* group = choice + g * size;
        choose_top(group, size, std::min(m.top_per_group, size), order);
        for (int i = 0; i < std::min(m.top_per_group, size); ++i) worth[size_t(g)] += group[order[i]];
    }
    choose_top(worth.data(), m.num_groups, m.num_kept_groups, order);
    for (int g = 0; g < m.num_groups; ++g) {
        if (std::find(order, order + m.num_kept_groups, g) != order + m.num_kept_groups) continue;
        std::fill(choice + g * size, choice + (g + 1) * size, -std::numeric_limits<float>::infinity());
    }
}

// A token's experts by ascending id, and what their outputs are multiplied by. `scores` become shares.
void route(const octavo_moe& m, float* scores, float* choice, int32_t* order, int32_t* ids, float* weights) {
    if (m.score == OCTAVO_SCORE_SOFTMAX) {
        softmax(scores, m.num_experts);
    } else {
        for (int e = 0; e < m.num_experts; ++e) scores[e] = sigmoid(scores[e]);
    }
    for (int e = 0; e < m.num_experts; ++e) choice[e] = scores[e] + (m.correction ? m.correction[e] : 0.0f);
    if (m.num_groups > 0) drop_groups(m, choice, order);
    choose_top(choice, m.num_experts, m.top_k, ids);
    std::sort(ids, ids + m.top_k);
    float sum = 0.0f;
    for (int i = 0; i < m.top_k; ++i) sum += weights[i] = scores[ids[i]];
    const float factor = m.renormalize ? m.scale / (sum + 1e-20f) : m.scale;
    for (int i = 0; i < m.top_k; ++i) weights[i] *= factor;
}

// An expert that some token chose, and its pairs.
struct Expert {
    int64_t id, begin, end;
};

class Mixture {
public:
    Mixture(const octavo_moe& moe, const MoeInputs& x, int64_t num_tokens, int64_t hidden, const Buffers& buffers)
        : m_(moe), x_(x), num_tokens_(num_tokens), hidden_(hidden), b_(buffers) {}

    bool run(float* out) {
        if (!choose()) return false;
        sort_by_expert();
        if (!run_experts() || !run_shared()) return false;
        parallel_for(num_tokens_, kTokenGrain, [&](int64_t begin, int64_t end) {
            for (int64_t t = begin; t < end; ++t) sum_up(t, out + t * hidden_);
        });
        return true;
    }

private:
    bool choose() {
        if (!store(m_.router, x_.router, b_.scores)) return false;
        parallel_for(num_tokens_, kTokenGrain, [&](int64_t begin, int64_t end) {
            for (int64_t t = begin; t < end; ++t) {
                const int64_t scores = t * m_.num_experts, pairs = t * m_.top_k;
                route(m_, b_.scores + scores, b_.choice + scores, b_.order + scores, b_.ids + pairs,
                      b_.weights + pairs);
            }
        });
        return true;
    }

    void sort_by_expert() {
        const int64_t num_pairs = num_tokens_ * m_.top_k;
        std::vector<int64_t> next(size_t(m_.num_experts) + 1, 0);
        for (int64_t i = 0; i < num_pairs; ++i) ++next[size_t(b_.ids[i]) + 1];
        std::partial_sum(next.begin(), next.end(), next.begin());
        for (int e = 0; e < m_.num_experts; ++e) {
            const int64_t begin = next[size_t(e)], end = next[size_t(e) + 1];
            if (begin < end) chosen_.push_back({e, begin, end});
        }
        for (int64_t i = 0; i < num_pairs; ++i) {
            const int64_t pair = next[size_t(b_.ids[i])]++;
            b_.pairs[i] = int32_t(pair);
            b_.tokens[pair] = int32_t(i / m_.top_k);
        }
    }

    bool run_experts() {
        const int64_t num_pairs = num_tokens_ * m_.top_k;
        const Operand gathered = make_operand(b_.gathered, num_pairs, m_.up);
        gather(x_.experts, b_.tokens, num_pairs, gathered);
        Product up = {};
        up.x = gathered;
        up.finish = kOperand;
        up.activation = m_.activation;
        up.to = make_operand(b_.middle, num_pairs, m_.down);
        if (!multiply_each(up, segments(m_.up, m_.up_bytes))) return false;
        Product down = {};
        down.x = up.to;
        down.finish = kStore;
        down.out = b_.outs;
        down.out_stride = hidden_;
        return multiply_each(down, segments(m_.down, m_.down_bytes));
    }

    // The rows of each expert that was chosen, and its matrix.
    std::vector<Segment> segments(const octavo_matrix& first, int64_t bytes) const {
        std::vector<Segment> made;
        made.reserve(chosen_.size());
        for (const Expert& expert : chosen_) {
            octavo_matrix weight = first;
            weight.data = static_cast<const char*>(first.data) + expert.id * bytes;
            if (first.bias) weight.bias = first.bias + expert.id * first.rows;
            made.push_back({weight, expert.begin, expert.end});
        }
        return made;
    }

    bool run_shared() {
        if (!m_.shared_up.data) return true;
        Product up = product(m_.shared_up, x_.shared);
        up.finish = kOperand;
        up.activation = m_.shared_activation;
        up.to = make_operand(b_.shared_middle, num_tokens_, m_.shared_down);
        if (!multiply(up)) return false;
        if (!store(m_.shared_down, up.to, b_.shared_outs)) return false;
        return !m_.shared_gate.data || store(m_.shared_gate, x_.router, b_.shared_gates);
    }

    void sum_up(int64_t token, float* out) const {
        std::fill(out, out + hidden_, 0.0f);
        const auto add = [&](const float* x, float weight) {
            for (int64_t i = 0; i < hidden_; ++i) out[i] += weight * x[i];
        };
        for (int64_t i = token * m_.top_k; i < (token + 1) * m_.top_k; ++i) {
            add(b_.outs + b_.pairs[i] * hidden_, b_.weights[i]);
        }
        if (!m_.shared_up.data) return;
        add(b_.shared_outs + token * hidden_, m_.shared_gate.data ? sigmoid(b_.shared_gates[token]) : 1.0f);
    }

    bool store(const octavo_matrix& weight, const Operand& x, float* out) const {
        Product p = product(weight, x);
        p.finish = kStore;
        p.out = out;
        p.out_stride = weight.rows;
        return multiply(p);
    }

    Product product(const octavo_matrix& weight, const Operand& x) const {
        Product p = {};
        p.x = x;
        p.weight = weight;
        p.num_rows = num_tokens_;
        return p;
    }

    const octavo_moe& m_;
    const MoeInputs& x_;
    const int64_t num_tokens_, hidden_;
    const Buffers& b_;
    std::vector<Expert> chosen_;
};

}  // namespace

int run_moe(const octavo_moe& moe, const MoeInputs& x, int64_t num_tokens, int64_t hidden, void* memory, float* out) {
    try {
        Space space = {static_cast<char*>(memory)};
        const Buffers buffers(space, moe, num_tokens, hidden);
        return Mixture(moe, x, num_tokens, hidden, buffers).run(out) ? OCTAVO_OK : OCTAVO_NO_MEMORY;
    } catch (const std::bad_alloc&) {
        return OCTAVO_NO_MEMORY;
    }
}

int64_t moe_bytes(const octavo_moe& moe, int64_t num_tokens, int64_t hidden) {
    Space space = {nullptr};
    Buffers(space, moe, num_tokens, hidden);
    return space.used;
}

}  // namespace octavo
