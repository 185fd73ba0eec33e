// Measures what benchmarks give shares of.

#include <algorithm>
#include <chrono>
#include <vector>

#include "isa.h"
#include "pool.h"

namespace octavo {
namespace {

constexpr int kRepeats = 5;

double seconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// The shortest of some runs of body(thread) on every thread.
template <class Body>
double best_time(const Body& body) {
    const Together together;
    double best = 1e30;
    for (int i = 0; i < kRepeats; ++i) {
        const auto start = std::chrono::steady_clock::now();
        parallel_for(num_threads(), 1, [&](int64_t begin, int64_t end) {
            for (int64_t t = begin; t < end; ++t) body(t);
        });
        best = std::min(best, seconds_since(start));
    }
    return best;
}

}  // namespace
}  // namespace octavo

using namespace octavo;

extern "C" {

double octavo_probe_bandwidth(const void* memory, int64_t bytes) {
    const auto read = kernels()->probe_read;
    const int64_t threads = num_threads();
    std::vector<uint32_t> kept(static_cast<size_t>(threads));
    const int64_t share = bytes / threads / 4096 * 4096;
    const double time = best_time([&](int64_t t) {
        kept[size_t(t)] = read(static_cast<const char*>(memory) + t * share, share);
    });
    return double(share * threads) / time;
}

double octavo_probe_operations(int format) {
    if (format < OCTAVO_FORMAT_FLOAT32 || format > OCTAVO_FORMAT_INT8) return 0.0;
    const auto multiply = kernels()->probe_products;
    constexpr int64_t kRounds = 1 << 20;
    std::vector<float> kept(static_cast<size_t>(num_threads()));
    std::vector<int64_t> operations(kept.size());
    const double time = best_time([&](int64_t t) { operations[size_t(t)] = multiply(format, kRounds, &kept[size_t(t)]); });
    return double(operations[0]) * double(kRounds) * double(kept.size()) / time;
}

}  // extern "C"
