// Threads of this library. The caller of a job works too, chunks are handed out one by one, and nobody waits for
// a worker that has not begun: a preempted or sleeping one costs nothing but its help.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo {

using RangeFunction = void (*)(const void* context, int64_t begin, int64_t end);

// Calls function on ranges of at most `grain` that cover [0, count). Where one range covers it, where one thread
// is allowed, or where another caller holds the workers, all of it runs on the caller.
void parallel_for(int64_t count, int64_t grain, RangeFunction function, const void* context);

template <class Body>
inline void parallel_for(int64_t count, int64_t grain, const Body& body) {
    parallel_for(
        count, grain,
        [](const void* context, int64_t begin, int64_t end) { (*static_cast<const Body*>(context))(begin, end); },
        &body);
}

// While one of these lives, the caller makes calls one right after another: its workers wait for them awake. Where
// another caller holds the workers, its calls run on itself alone.
class Together {
public:
    Together();
    ~Together();
    Together(const Together&) = delete;
    Together& operator=(const Together&) = delete;

private:
    bool holds_;
};

void set_num_threads(int num_threads);
int num_threads();

// Memory of the calling thread, aligned to 64 bytes, valid until its next call. Null when there is none.
void* thread_scratch(size_t bytes);

}  // namespace octavo
