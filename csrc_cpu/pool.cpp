#include "pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <system_error>
#include <thread>

#include "isa.h"

namespace octavo {
namespace {

constexpr int kSpins = 1 << 16;       // about a millisecond: a step's other threads may be long at work
constexpr uint32_t kOpen = 1u << 31;  // of Pool::state: workers may enter

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");  // waits about as long; yield does nothing on most
#endif
}

void leave() {
    if (const Kernels* const k = kernels()) k->leave();
}

constexpr int kMaxParts = 64;

// The work is cut into as many parts as threads are wanted. A thread walks through its own part first, so that what
// it reads next lies where it reads, and then helps with those of others.
struct Job {
    RangeFunction function = nullptr;
    const void* context = nullptr;
    int64_t count = 0;
    int64_t grain = 1;
    int num_parts = 1;
    struct alignas(64) Part {
        std::atomic<int64_t> next{0};
        int64_t end = 0;
    } parts[kMaxParts];

    void open(int64_t ranges_count, int64_t ranges_grain, int threads) {
        count = ranges_count;
        grain = ranges_grain;
        num_parts = std::min(threads, kMaxParts);
        const int64_t num_ranges = (count + grain - 1) / grain;
        for (int i = 0; i < num_parts; ++i) {
            parts[i].next.store(num_ranges * i / num_parts * grain, std::memory_order_relaxed);
            parts[i].end = std::min(count, num_ranges * (i + 1) / num_parts * grain);
        }
    }

    void drain(int thread) {
        for (int i = 0; i < num_parts; ++i) {
            Part& part = parts[(thread + i) % num_parts];
            while (part.next.load(std::memory_order_relaxed) < part.end) {
                const int64_t begin = part.next.fetch_add(grain, std::memory_order_relaxed);
                if (begin >= part.end) break;
                function(context, begin, std::min(begin + grain, part.end));
            }
        }
    }
};

// The job's fields change only while `state` is 0, that is closed and with no worker inside.
class Pool {
public:
    std::mutex owner;  // held by the caller whose job it is
    std::atomic<int> limit{1};

    void run(int64_t count, int64_t grain, RangeFunction function, const void* context) {
        const int64_t num_ranges = (count + grain - 1) / grain;
        const int threads = static_cast<int>(std::min<int64_t>(limit.load(std::memory_order_relaxed), num_ranges));
        spawn(threads);
        job_.function = function;
        job_.context = context;
        job_.open(count, grain, threads);
        state_.store(kOpen, std::memory_order_release);
        ticket_.fetch_add(1, std::memory_order_seq_cst);
        if (asleep_.load(std::memory_order_seq_cst) > 0) ticket_.notify_all();
        job_.drain(0);
        state_.fetch_and(~kOpen, std::memory_order_acq_rel);
        for (int spins = 0;;) {
            const uint32_t inside = state_.load(std::memory_order_acquire);
            if (inside == 0) return;
            if (++spins < 4000) {
                relax();
            } else {
                state_.wait(inside, std::memory_order_acquire);
            }
        }
    }

    // Workers that finish a job look out for the next one, until `together` ends.
    void set_together(bool together) { together_.store(together, std::memory_order_release); }

    // A forked child has none of the workers, and may have copied a job half done.
    void forget_workers() {
        spawned_ = 1;
        state_.store(0);
        asleep_.store(0);
        together_.store(false);
        new (&owner) std::mutex();
    }

private:
    void spawn(int wanted) {
        for (; spawned_ < wanted; ++spawned_) {
            try {
                std::thread([this, index = spawned_] { work(index); }).detach();
            } catch (const std::system_error&) {
                return;  // the process may have no more threads: those that are there do the work
            }
        }
    }

    bool enter() {
        uint32_t seen = state_.load(std::memory_order_acquire);
        while (seen & kOpen) {
            if (state_.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) return true;
        }
        return false;
    }

    void work(int index) {
        for (;;) {
            const uint32_t seen = ticket_.load(std::memory_order_acquire);
            if (index < limit.load(std::memory_order_relaxed) && enter()) {
                job_.drain(index);
                if (state_.fetch_sub(1, std::memory_order_acq_rel) == 1) state_.notify_one();
            }
            wait(seen);
        }
    }

    // Until the ticket is another. Looks for a while where the next job comes soon, then sleeps.
    void wait(uint32_t seen) {
        for (int spins = 0; together_.load(std::memory_order_relaxed) && spins < kSpins; ++spins) {
            if (ticket_.load(std::memory_order_acquire) != seen) return;
            relax();
        }
        leave();
        asleep_.fetch_add(1, std::memory_order_seq_cst);
        ticket_.wait(seen, std::memory_order_seq_cst);
        asleep_.fetch_sub(1, std::memory_order_relaxed);
    }

    Job job_;
    int spawned_ = 1;  // threads that exist, the caller counted
    std::atomic<bool> together_{false};
    std::atomic<int> asleep_{0};  // workers that need a call to wake
    alignas(64) std::atomic<uint32_t> ticket_{0};
    alignas(64) std::atomic<uint32_t> state_{0};
};

// Never destroyed: workers sleep in it until the process ends.
Pool& pool() {
    static Pool* const instance = [] {
        auto* made = new Pool();
        pthread_atfork(nullptr, nullptr, [] { pool().forget_workers(); });
        return made;
    }();
    return *instance;
}

thread_local int t_together = 0;  // whether this thread holds the workers already

struct Scratch {
    void* memory = nullptr;
    size_t bytes = 0;
    ~Scratch() { std::free(memory); }
};

}  // namespace

void parallel_for(int64_t count, int64_t grain, RangeFunction function, const void* context) {
    if (count <= 0) return;
    Pool& workers = pool();
    if (count > grain && workers.limit.load(std::memory_order_relaxed) > 1) {
        if (t_together) return workers.run(count, grain, function, context);
        std::unique_lock<std::mutex> lock(workers.owner, std::try_to_lock);
        if (lock.owns_lock()) {
            workers.run(count, grain, function, context);
            return leave();
        }
    }
    for (int64_t begin = 0; begin < count; begin += grain) {
        function(context, begin, std::min(begin + grain, count));
    }
    if (!t_together) leave();
}

Together::Together() : holds_(pool().owner.try_lock()) {
    t_together += holds_;
    if (holds_) pool().set_together(true);
}

Together::~Together() {
    if (!holds_) return;
    t_together -= 1;
    leave();
    pool().set_together(false);
    pool().owner.unlock();
}

void set_num_threads(int num_threads) { pool().limit.store(num_threads); }

int num_threads() { return pool().limit.load(); }

void* thread_scratch(size_t bytes) {
    static thread_local Scratch scratch;
    if (bytes > scratch.bytes) {
        std::free(scratch.memory);
        bytes = (bytes + 4095) / 4096 * 4096;
        scratch.memory = std::aligned_alloc(64, bytes);
        scratch.bytes = scratch.memory ? bytes : 0;
    }
    return scratch.memory;
}

}  // namespace octavo
