// Chooses tokens from rows of logits, as core's sampler does, wherever rounding cannot matter.
//
// Another exp in float32 and another order of sums give weights that differ in the last bits. So every sum here has
// bounds that hold for any of them; where these leave two tokens possible, the row is left to who asked.

#include <algorithm>
#include <bit>
#include <cmath>
#include <iterator>

#include "include/octavo_cpu.h"
#include "isa.h"
#include "pool.h"

namespace octavo {
namespace {

// Relative, between two weights of one value: ours are within 3 units in the last place, numpy's within 2.6.
constexpr double kWeightError = 0x1p-20;
// Of a sum over a whole row besides: up to 17 additions in float32 make the sum of a block.
constexpr double kRowError = kWeightError + 17 * 0x1p-24 + 0x1p-40;
// Below the best, where a search for the likeliest looks first, and then further. What lies deeper than the last
// weighs nothing, or so little that it is within every bound.
constexpr float kDepths[] = {4, 6, 8, 10, 13, 16, 24, 40, 88};
constexpr double kFlat = 2.5;  // who wants more, in weights of the best, finds it deeper than the first

constexpr int64_t kMany = 8192;  // of so even a row top_p keeps thousands, and rounding often decides: left to core

constexpr int64_t kUndecided = -1;

struct Candidate {
    uint64_t key;  // by value from the highest, then by id
    float weight;

    bool operator<(const Candidate& other) const { return key < other.key; }
};

// Values are at most 0, so that the bits of their negatives are in order. The difference has no negative zero.
uint64_t key_of(float value, int32_t id) {
    return uint64_t(std::bit_cast<uint32_t>(0.0f - value)) << 32 | uint32_t(id);
}

struct Cut {
    uint64_t last;   // key of the last that is kept
    double running;  // weights up to it
};

// The fewest of the likeliest that weigh `wanted` together, or all. Reorders them.
Cut cut(Candidate* begin, Candidate* end, double wanted) {
    double before = 0;
    while (end - begin > 1) {
        Candidate* middle = begin + (end - begin) / 2;
        std::nth_element(begin, middle, end);
        double half = 0;
        for (const Candidate* c = begin; c < middle; ++c) half += c->weight;
        if (before + half >= wanted) {
            end = middle;
        } else {
            before += half;
            begin = middle;
        }
    }
    return {begin->key, before + begin->weight};
}

// What is wanted of a row.
struct Wish {
    int64_t top_k;  // 0: all
    double top_p, uniform;
};

// Memory of a row at work, all of vocabulary size.
struct Buffers {
    Candidate* candidates;
    float *sums, *values, *weights;
    int32_t* ids;

    static size_t bytes(int64_t size) { return size_t(size) * (sizeof(Candidate) + 4 * sizeof(float)); }

    Buffers(void* memory, int64_t size) {
        candidates = static_cast<Candidate*>(memory);
        sums = reinterpret_cast<float*>(candidates + size);
        values = sums + size;
        weights = values + size;
        ids = reinterpret_cast<int32_t*>(weights + size);
    }
};

class Chooser {
public:
    Chooser(const Kernels& kernels, const Buffers& buffers, const LogitRow& row, const Wish& wish)
        : k_(kernels), b_(buffers), row_(row), wish_(wish) {}

    int64_t choose() {
        const double total = k_.weigh_row(row_, b_.sums);
        if (!(total >= 0.5) || wish_.uniform <= 0) return kUndecided;  // not numbers; any weight above 0, however small
        const bool cuts = wish_.top_p < 1;
        if (!cuts && !wish_.top_k && row_.floor == -INFINITY) return from_all(total);
        gather(total);
        if (cuts && !wish_.top_k && count_ > kMany) return kUndecided;
        Cut first = {UINT64_MAX, 0}, last = first;
        if (cuts || wish_.top_k) {
            for (int64_t i = 0; i < count_; ++i) b_.candidates[i] = {key_of(b_.values[i], b_.ids[i]), b_.weights[i]};
        }
        int64_t count = count_;
        if (wish_.top_k && wish_.top_k < count) {
            count = wish_.top_k;
            std::nth_element(b_.candidates, b_.candidates + count - 1, b_.candidates + count_);
            first.last = last.last = b_.candidates[count - 1].key;
        }
        if (cuts) {
            double whole = total, error = kRowError;
            if (wish_.top_k) {
                whole = 0, error = kWeightError;
                for (int64_t i = 0; i < count; ++i) whole += b_.candidates[i].weight;
            }
            const double low = wish_.top_p * whole * (1 - error - kWeightError);
            const double high = wish_.top_p * whole * (1 + error + 2 * kWeightError);
            first = last = cut(b_.candidates, b_.candidates + count, low);
            if (first.running < high) last = cut(b_.candidates, b_.candidates + count, high);
        }
        return from_gathered(first.last, last.last);
    }

private:
    // A set of the likeliest in which all lie that top_k or top_p keep, not below the floor.
    void gather(double total) {
        const double wanted = wish_.top_p * total * (1 + kRowError + 2 * kWeightError);
        size_t step = !wish_.top_k && wanted >= kFlat ? 1 : 0;
        for (; (wish_.top_k || wish_.top_p < 1) && step < std::size(kDepths); ++step) {
            if (-kDepths[step] <= row_.floor) break;
            count_ = gather_from(-kDepths[step]);
            if (wish_.top_k ? count_ >= wish_.top_k : gathered_weight() >= wanted) return;
        }
        if (step < std::size(kDepths)) count_ = gather_from(std::max(row_.floor, -kDepths[std::size(kDepths) - 1]));
    }

    int64_t gather_from(float lowest) {
        const int64_t count = k_.gather_row(row_, 0, row_.size, lowest, b_.values, b_.ids);
        k_.weigh_values(b_.values, b_.weights, count);
        return count;
    }

    double gathered_weight() const {
        double weight = 0;
        for (int64_t i = 0; i < count_; ++i) weight += b_.weights[i];
        return weight;
    }

    // From those gathered whose keys are up to `first`; whether those up to `last` are kept is uncertain.
    int64_t from_gathered(uint64_t first, uint64_t last) const {
        double sure = 0, all = 0;
        for (int64_t i = 0; i < count_; ++i) {
            const uint64_t key = key_of(b_.values[i], b_.ids[i]);
            if (key <= last) all += b_.weights[i];
            if (key <= first) sure += b_.weights[i];
        }
        const double low = wish_.uniform * sure * (1 - kWeightError), high = wish_.uniform * all * (1 + kWeightError);
        sure = all = 0;
        for (int64_t i = 0; i < count_; ++i) {
            const uint64_t key = key_of(b_.values[i], b_.ids[i]);
            if (key > last) continue;
            const double before = all * (1 + kWeightError);
            all += b_.weights[i];
            if (key > first) continue;
            sure += b_.weights[i];
            if (sure * (1 - kWeightError) > high) return before <= low ? b_.ids[i] : kUndecided;
        }
        return kUndecided;
    }

    // From the whole row: the block first, then the token in it.
    int64_t from_all(double total) const {
        const double drawn = wish_.uniform * total, low = drawn * (1 - kRowError), high = drawn * (1 + kRowError);
        const int64_t blocks = (row_.size + kSampleBlock - 1) / kSampleBlock;
        double running = 0;
        int64_t block = 0;
        while (block < blocks && running + b_.sums[block] <= drawn) running += b_.sums[block++];
        const int64_t begin = block * kSampleBlock, end = std::min(row_.size, begin + kSampleBlock);
        if (begin >= end) return kUndecided;
        const int64_t count = k_.gather_row(row_, begin, end, -kDepths[std::size(kDepths) - 1], b_.values, b_.ids);
        k_.weigh_values(b_.values, b_.weights, count);
        for (int64_t i = 0; i < count; ++i) {
            const double before = running * (1 + kRowError);
            running += b_.weights[i];
            if (running * (1 - kRowError) > high) return before <= low ? b_.ids[i] : kUndecided;
        }
        return kUndecided;
    }

    const Kernels& k_;
    const Buffers& b_;
    const LogitRow& row_;
    const Wish& wish_;
    int64_t count_ = 0;
};

}  // namespace
}  // namespace octavo

using namespace octavo;

extern "C" int octavo_sample(int64_t* ids, const float* logits, int64_t num_logits, int64_t stride, int64_t size,
                             const int64_t* rows, const double* temperature, const int64_t* top_k, const double* top_p,
                             const double* min_p, const double* uniform, int64_t num_rows) {
    if (size < 1 || size > INT32_MAX || num_rows < 0) return OCTAVO_OUT_OF_RANGE;
    for (int64_t i = 0; i < num_rows; ++i) {
        if (rows[i] < 0 || rows[i] >= num_logits) return OCTAVO_OUT_OF_RANGE;
    }
    const Kernels& k = *kernels();
    parallel_for(num_rows, 1, [&](int64_t begin, int64_t end) {
        void* memory = thread_scratch(Buffers::bytes(size));
        for (int64_t i = begin; i < end; ++i) {
            ids[i] = kUndecided;
            if (!memory) continue;
            const float* data = logits + rows[i] * stride;
            const float factor = float(1 / std::max(temperature[i], 1e-30));
            const float floor = min_p[i] > 0 ? float(std::log(min_p[i])) : -INFINITY;
            const LogitRow row = {data, size, k.row_top(data, size), factor, floor};
            const Wish wish = {top_k[i] > 0 && top_k[i] < size ? top_k[i] : 0, top_p[i], uniform[i]};
            ids[i] = Chooser(k, Buffers(memory, size), row, wish).choose();
        }
    });
    return OCTAVO_OK;
}
