// Chooses tokens from rows of logits, as the contract's op `sample` defines it: what it does not say is that only what
// can matter is sorted. Weights are whole numbers, so that every order of summing them gives the same tokens.

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <functional>
#include <iterator>

#include "include/octavo_cpu.h"
#include "isa.h"
#include "pool.h"

namespace octavo {
namespace {

constexpr int64_t kUndrawn = -1;
constexpr int64_t kOne = int64_t(1) << 40;    // the weight of the best
constexpr int64_t kMaxSize = int64_t(1) << 22;  // of a row: the sum of its weights is below 2^63
constexpr int kShareBits = 53;                // of top_p and of the random number count so many binary places
constexpr double kLog2E = 0x1.71547652b82fep0;

// How far below the best a search for the likeliest looks first, and then further; the last holds all that weigh.
constexpr float kDepths[] = {6, 9, 12, 15, 19, 24, 32, 64};
constexpr int64_t kFlat[] = {kOne * 5 / 4, kOne * 5 / 2};  // who wants more finds it deeper than the first, the second

constexpr int kBuckets = 1024;  // of a sixteenth each, by score

__extension__ typedef unsigned __int128 Wide;

// Of numbers in [0, 1].
uint64_t share_of(double x) { return uint64_t(std::ldexp(x, kShareBits)); }
int64_t floor_share(int64_t whole, uint64_t share) { return int64_t(Wide(uint64_t(whole)) * share >> kShareBits); }
int64_t ceil_share(int64_t whole, uint64_t share) {
    return int64_t((Wide(uint64_t(whole)) * share + ((uint64_t(1) << kShareBits) - 1)) >> kShareBits);
}

struct Candidate {
    uint64_t key;  // by score from the highest, then by id
    int64_t weight;

    bool operator<(const Candidate& other) const { return key < other.key; }
};

// Scores are at most 0, so that the bits of their negatives are in order. The difference has no negative zero.
uint64_t key_of(float score, int32_t id) {
    return uint64_t(std::bit_cast<uint32_t>(0.0f - score)) << 32 | uint32_t(id);
}

constexpr uint64_t kLastKey = uint64_t(0x7f800000) << 32 | UINT32_MAX;  // of score -inf

// Scores are above -64 where anything weighs.
int bucket_of(float score) { return std::min(kBuckets - 1, int(score * (-kBuckets / 64.0f))); }

int64_t weight_of(const Candidate* begin, const Candidate* end) {
    int64_t weight = 0;
    for (; begin < end; ++begin) weight += begin->weight;
    return weight;
}

// The likeliest up to a last one, and what they weigh.
struct Kept {
    uint64_t last;  // its key
    int64_t weight;
};

// The fewest of the likeliest that weigh `wanted` together; all weigh as much. Reorders them.
Kept cut(Candidate* begin, Candidate* end, int64_t wanted) {
    int64_t before = 0;
    while (end - begin > 1) {
        Candidate* const middle = begin + (end - begin) / 2;
        std::nth_element(begin, middle, end);
        const int64_t half = weight_of(begin, middle);
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
    bool cuts;      // whether top_p does
    uint64_t top_p, uniform;
};

// Memory of a row at work.
struct Buffers {
    Candidate* candidates;
    int64_t *weights, *sums;
    float *scores, *tops;
    int32_t* ids;

    static int64_t num_blocks(int64_t size) { return (size + kSampleBlock - 1) / kSampleBlock; }
    static size_t bytes(int64_t size) {
        const int64_t room = size + kSampleSlack;
        return size_t(room) * (sizeof(Candidate) + sizeof(int64_t) + 2 * sizeof(float)) +
               size_t(num_blocks(size)) * (sizeof(int64_t) + sizeof(float));
    }

    Buffers(void* memory, int64_t size) {
        const int64_t room = size + kSampleSlack, blocks = num_blocks(size);
        candidates = static_cast<Candidate*>(memory);
        weights = reinterpret_cast<int64_t*>(candidates + room);
        sums = weights + room;
        scores = reinterpret_cast<float*>(sums + blocks);
        ids = reinterpret_cast<int32_t*>(scores + room);
        tops = reinterpret_cast<float*>(ids + room);
    }
};

class Chooser {
public:
    Chooser(const Kernels& kernels, const Buffers& buffers, const LogitRow& row, const Wish& wish)
        : k_(kernels), b_(buffers), row_(row), wish_(wish) {}

    int64_t choose() {
        const int64_t total = k_.weigh_row(row_, b_.sums);
        if (!wish_.cuts && !wish_.top_k) return from_all(total);
        gather(total);
        return from_gathered(wish_.top_k ? best() : cut_gathered(ceil_share(total, wish_.top_p)));
    }

private:
    // A set of the likeliest in which all lie that top_k or top_p keep.
    void gather(int64_t total) {
        const int64_t wanted = ceil_share(total, wish_.top_p), blocks = Buffers::num_blocks(row_.size);
        if (wish_.top_k && wish_.top_k <= blocks) {  // as many blocks have one that is no worse
            std::copy(row_.tops, row_.tops + blocks, b_.scores);
            std::nth_element(b_.scores, b_.scores + wish_.top_k - 1, b_.scores + blocks, std::greater<float>());
            if (has_enough(wanted, (b_.scores[wish_.top_k - 1] - row_.top) * row_.factor)) return;
        }
        size_t step = 0;
        if (!wish_.top_k) step = size_t(wanted > kFlat[0]) + size_t(wanted > kFlat[1]);
        for (; step < std::size(kDepths); ++step) {
            if (has_enough(wanted, -kDepths[step])) return;
            if (std::ldexp(1.001, 40 - int(kDepths[step])) < double(row_.least)) return;  // no other weighs so much
        }
    }

    bool has_enough(int64_t wanted, float lowest) {
        count_ = gather_blocks(0, Buffers::num_blocks(row_.size), lowest);
        int64_t weight = 0, num = 0;
        for (int64_t i = 0; i < count_; ++i) {
            weight += b_.weights[i];
            num += b_.weights[i] != 0;
        }
        return wish_.top_k ? num >= wish_.top_k : weight >= wanted;
    }

    int64_t gather_blocks(int64_t begin, int64_t end, float lowest) {
        const int64_t count = k_.gather_row(row_, begin, end, lowest, b_.scores, b_.ids);
        k_.weigh_scores(b_.scores, count, row_.least, b_.weights);
        return count;
    }

    // The candidates among those gathered for which `counts(score)`; their end.
    template <class Counts>
    Candidate* list(const Counts& counts) {
        Candidate* end = b_.candidates;
        for (int64_t i = 0; i < count_; ++i) {
            if (b_.weights[i] && counts(b_.scores[i])) *end++ = {key_of(b_.scores[i], b_.ids[i]), b_.weights[i]};
        }
        return end;
    }

    // What top_k, then top_p keep.
    Kept best() {
        Candidate* end = list([](float) { return true; });
        uint64_t last = kLastKey;
        if (wish_.top_k < end - b_.candidates) {
            std::nth_element(b_.candidates, b_.candidates + wish_.top_k - 1, end);
            end = b_.candidates + wish_.top_k;
            last = end[-1].key;
        }
        const int64_t weight = weight_of(b_.candidates, end);
        return wish_.cuts ? cut(b_.candidates, end, ceil_share(weight, wish_.top_p)) : Kept{last, weight};
    }

    // What top_p keeps: found by sums of buckets first, so that little is sorted where thousands are kept.
    Kept cut_gathered(int64_t wanted) {
        int64_t sums[kBuckets] = {}, before = 0;
        for (int64_t i = 0; i < count_; ++i) sums[bucket_of(b_.scores[i])] += b_.weights[i];
        int bucket = 0;
        while (before + sums[bucket] < wanted) before += sums[bucket++];
        Candidate* const end = list([bucket](float score) { return bucket_of(score) == bucket; });
        const Kept kept = cut(b_.candidates, end, wanted - before);
        return {kept.last, before + kept.weight};
    }

    int64_t from_gathered(const Kept& kept) const {
        const float last = -std::bit_cast<float>(uint32_t(kept.last >> 32));
        const int64_t last_id = int64_t(kept.last & UINT32_MAX);
        int64_t drawn = floor_share(kept.weight, wish_.uniform);
        for (int64_t i = 0; i < count_; ++i) {
            const float score = b_.scores[i];
            const bool counts = (score > last) | ((score == last) & (b_.ids[i] <= last_id));
            drawn -= counts ? b_.weights[i] : 0;
            if (drawn < 0) return b_.ids[i];
        }
        return kUndrawn;  // not reached: the best weighs something
    }

    // From the whole row: the block first, then the token in it.
    int64_t from_all(int64_t total) {
        int64_t drawn = floor_share(total, wish_.uniform), block = 0;
        while (drawn >= b_.sums[block]) drawn -= b_.sums[block++];
        count_ = gather_blocks(block, block + 1, -kDepths[std::size(kDepths) - 1]);
        for (int64_t i = 0; i < count_; ++i) {
            drawn -= b_.weights[i];
            if (drawn < 0) return b_.ids[i];
        }
        return kUndrawn;  // not reached: the block weighs more
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
    if (size < 1 || size > kMaxSize || num_rows < 0) return OCTAVO_OUT_OF_RANGE;
    for (int64_t i = 0; i < num_rows; ++i) {
        if (rows[i] < 0 || rows[i] >= num_logits) return OCTAVO_OUT_OF_RANGE;
        if (!(uniform[i] >= 0 && uniform[i] < 1 && min_p[i] >= 0 && min_p[i] <= 1)) return OCTAVO_OUT_OF_RANGE;
    }
    const Kernels& k = *kernels();
    std::atomic<bool> starved{false};
    parallel_for(num_rows, 1, [&](int64_t begin, int64_t end) {
        void* memory = thread_scratch(Buffers::bytes(size));
        if (!memory) {
            starved.store(true, std::memory_order_relaxed);
            return;
        }
        const Buffers buffers(memory, size);
        for (int64_t i = begin; i < end; ++i) {
            ids[i] = kUndrawn;
            const float* data = logits + rows[i] * stride;
            const float top = k.survey_row(data, size, buffers.tops);
            if (!std::isfinite(top)) continue;
            const float factor = float(kLog2E / std::max(temperature[i], 1e-30));
            const int64_t least = std::max(int64_t(1), int64_t(std::ceil(min_p[i] * double(kOne))));
            const LogitRow row = {data, buffers.tops, size, top, factor, least};
            const int64_t best = top_k[i] > 0 && top_k[i] < size ? top_k[i] : 0;
            const Wish wish = {best, top_p[i] < 1, share_of(std::clamp(top_p[i], 0.0, 1.0)), share_of(uniform[i])};
            ids[i] = Chooser(k, buffers, row, wish).choose();
        }
    });
    return starved.load(std::memory_order_relaxed) ? OCTAVO_NO_MEMORY : OCTAVO_OK;
}
