// Times attention, and beside it what the memory gives: bench_attention LIBRARY... Several libraries take turns,
// so that their figures compare. Links nothing of them:
//   c++ -std=c++20 -O2 -mavx2 csrc_cpu/bench/attention.cpp -o bench_attention -ldl -pthread

#include <dlfcn.h>
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../include/octavo_cpu.h"

namespace {

struct Library {
    std::string path;
    decltype(octavo_attend)* attend;
    decltype(octavo_write_kv)* write_kv;
    decltype(octavo_block_elements)* block_elements;
    decltype(octavo_set_num_threads)* set_num_threads;
    decltype(octavo_isa)* isa;
    decltype(octavo_check_batch)* check_batch;

    explicit Library(const char* file) : path(file) {
        void* handle = dlopen(file, RTLD_NOW | RTLD_LOCAL);
        if (handle == nullptr) {
            std::fprintf(stderr, "%s\n", dlerror());
            std::exit(2);
        }
        const auto find = [&](auto*& function, const char* name) {
            function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
        };
        find(attend, "octavo_attend");
        find(write_kv, "octavo_write_kv");
        find(block_elements, "octavo_block_elements");
        find(set_num_threads, "octavo_set_num_threads");
        find(isa, "octavo_isa");
        find(check_batch, "octavo_check_batch");
    }
};

// `rows` sequences of `length` tokens in the cache, of which `queries` are asked about.
struct Case {
    const char* name;
    int rows, queries, length, kv_dtype, num_heads, num_kv_heads, head_size, block_size;
    int64_t cache_bytes;  // of all layers together, so that a pass over them reads from memory; 0: one layer
};

constexpr int kInt8 = 3;
constexpr int64_t kFromMemory = int64_t(320) << 20;
const Case kCases[] = {
    {"decode 1 x 512 bf16", 1, 1, 512, OCTAVO_BFLOAT16, 9, 3, 64, 32, kFromMemory},
    {"decode 1 x 4096 bf16", 1, 1, 4096, OCTAVO_BFLOAT16, 9, 3, 64, 32, kFromMemory},
    {"decode 32 x 512 bf16", 32, 1, 512, OCTAVO_BFLOAT16, 9, 3, 64, 32, kFromMemory},
    {"decode 32 x 512 fp32", 32, 1, 512, OCTAVO_FLOAT32, 9, 3, 64, 32, kFromMemory},
    {"decode 1 x 512 int8", 1, 1, 512, kInt8, 9, 3, 64, 32, kFromMemory},
    {"decode 1 x 4096 int8", 1, 1, 4096, kInt8, 9, 3, 64, 32, kFromMemory},
    {"decode 32 x 512 int8", 32, 1, 512, kInt8, 9, 3, 64, 32, kFromMemory},
    {"decode 4 x 512 cached bf16", 4, 1, 512, OCTAVO_BFLOAT16, 9, 3, 64, 32, 0},
    {"decode 4 x 512 cached int8", 4, 1, 512, kInt8, 9, 3, 64, 32, 0},
    {"decode 8 x 1024, 32/8 x 128 bf16", 8, 1, 1024, OCTAVO_BFLOAT16, 32, 8, 128, 32, kFromMemory},
    {"prefill 512 of 2048 bf16", 1, 512, 2048, OCTAVO_BFLOAT16, 9, 3, 64, 32, 0},
    {"prefill 2048 bf16", 1, 2048, 2048, OCTAVO_BFLOAT16, 9, 3, 64, 32, 0},
    {"prefill 2048 int8", 1, 2048, 2048, kInt8, 9, 3, 64, 32, 0},
    {"prefill 2048 fp32", 1, 2048, 2048, OCTAVO_FLOAT32, 9, 3, 64, 32, 0},
    {"prefill 2048 bf16, blocks of 8", 1, 2048, 2048, OCTAVO_BFLOAT16, 9, 3, 64, 8, 0},
};

int num_threads = 1;

// With one thread its processor time, which others who use the machine disturb least.
double now() {
    if (num_threads == 1) {
        timespec t;
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
        return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
    }
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

char* huge(int64_t bytes) {
    constexpr int64_t page = 2 << 20;
    auto* memory = static_cast<char*>(
        mmap(nullptr, size_t(bytes + page), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    memory += -reinterpret_cast<intptr_t>(memory) & (page - 1);
    madvise(memory, size_t(bytes), MADV_HUGEPAGE);
    return memory;
}

uint64_t read_all(const char* memory, int64_t bytes) {
    typedef uint64_t Words __attribute__((vector_size(64)));
    Words sum = {};
    for (int64_t i = 0; i < bytes; i += 64) {
        __builtin_prefetch(memory + i + 4096);
        Words x;
        std::memcpy(&x, memory + i, 64);
        sum += x;
    }
    return sum[0] + sum[7];
}

double read_bandwidth(const char* memory, int64_t bytes) {
    double best = 0;
    for (int repeat = 0; repeat < 5; ++repeat) {
        const double begin = now();
        std::vector<std::thread> threads;
        const auto part = [=](int t) {
            volatile uint64_t sink = read_all(memory + bytes / num_threads * t, bytes / num_threads);
            (void)sink;
        };
        for (int t = 1; t < num_threads; ++t) threads.emplace_back(part, t);
        part(0);
        for (std::thread& thread : threads) thread.join();
        best = std::max(best, double(bytes) / (now() - begin));
    }
    return best;
}

// One case for one library: its caches, filled, and its times.
struct Run {
    const Library& library;
    const Case& c;
    octavo_attention g = {};
    int64_t layer_bytes = 0, num_layers = 1;
    char* memory = nullptr;
    std::vector<int32_t> starts, lengths, table;
    std::vector<int64_t> slots;
    std::vector<uint16_t> query, out;
    std::vector<double> times;

    Run(const Library& l, const Case& given) : library(l), c(given) {
        g.num_heads = c.num_heads;
        g.num_kv_heads = c.num_kv_heads;
        g.head_size = g.value_size = c.head_size;
        g.block_size = c.block_size;
        g.dtype = OCTAVO_BFLOAT16;
        g.kv_dtype = c.kv_dtype;
        g.scale = 1 / std::sqrt(float(c.head_size));
        const int per_row = (c.length + c.block_size - 1) / c.block_size;
        g.num_blocks = c.rows * per_row;
        g.num_rows = c.rows;
        g.num_tokens = c.rows * c.queries;
        g.block_table_stride = per_row;
        for (int b = 0; b < g.num_blocks; ++b) table.push_back(b);
        std::shuffle(table.begin(), table.end(), std::mt19937(1));
        for (int r = 0; r <= c.rows; ++r) starts.push_back(r * c.queries);
        lengths.assign(size_t(c.rows), c.length);
        slots.assign(size_t(g.num_tokens), -1);
        g.query_start_loc = starts.data();
        g.seq_lens = lengths.data();
        g.block_table = table.data();
        g.slots = slots.data();
        if (library.check_batch(&g) != OCTAVO_OK) return;
        const int item = c.kv_dtype == OCTAVO_FLOAT32 ? 4 : c.kv_dtype == kInt8 ? 1 : 2;
        layer_bytes = g.num_blocks * library.block_elements(&g) * item;
        num_layers = std::max<int64_t>(1, c.cache_bytes / layer_bytes);
        memory = huge(num_layers * layer_bytes);
        fill();
        query = noise(size_t(g.num_tokens) * size_t(c.num_heads * c.head_size));
        out.resize(query.size());
    }
    ~Run() {
        if (memory) munmap(memory, size_t(num_layers * layer_bytes));
    }
    Run(const Run&) = delete;

    static std::vector<uint16_t> noise(size_t size) {
        std::mt19937 generator(3);
        std::vector<uint16_t> x(size);
        for (uint16_t& bits : x) bits = uint16_t(0x3f00 | (generator() & 0x80ff));  // 0.5 to 2, either sign
        return x;
    }

    void fill() {
        octavo_attention all = g;
        std::vector<int64_t> every(size_t(g.num_blocks) * size_t(g.block_size));
        for (size_t i = 0; i < every.size(); ++i) every[i] = int64_t(i);
        all.num_tokens = int32_t(every.size());
        all.slots = every.data();
        const int64_t width = int64_t(c.num_kv_heads) * c.head_size;
        const std::vector<uint16_t> x = noise(every.size() * size_t(width));
        library.write_kv(&all, memory, x.data(), width, c.head_size, x.data(), width, c.head_size);
        for (int64_t l = 1; l < num_layers; ++l) std::memcpy(memory + l * layer_bytes, memory, size_t(layer_bytes));
    }

    // Seconds a layer, of one pass over all layers.
    void time() {
        const int64_t width = int64_t(c.num_heads) * c.head_size;
        const int passes = num_layers == 1 ? 5 : 1;
        const double begin = now();
        for (int pass = 0; pass < passes; ++pass) {
            for (int64_t l = 0; l < num_layers; ++l) {
                library.attend(&g, out.data(), width, c.head_size, query.data(), width, c.head_size,
                               memory + l * layer_bytes, nullptr);
            }
        }
        times.push_back((now() - begin) / double(passes * num_layers));
    }
};

double median(std::vector<double> x) {
    std::sort(x.begin(), x.end());
    return x[x.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
    std::vector<Library> libraries;
    const char* only = "";
    for (int i = 1; i < argc; ++i) {
        if (std::strncmp(argv[i], "--only=", 7) == 0) {
            only = argv[i] + 7;
        } else if (std::strncmp(argv[i], "--threads=", 10) == 0) {
            num_threads = std::max(1, std::atoi(argv[i] + 10));
        } else {
            libraries.emplace_back(argv[i]);
        }
    }
    if (libraries.empty()) {
        std::fprintf(stderr, "usage: bench_attention LIBRARY... [--only=PART OF A NAME] [--threads=N]\n");
        return 2;
    }
    for (const Library& library : libraries) {
        library.set_num_threads(num_threads);
        std::printf("%s: %s\n", library.path.c_str(), library.isa());
    }
    char* probe = huge(kFromMemory);
    std::memset(probe, 1, size_t(kFromMemory));
    const double bandwidth = read_bandwidth(probe, kFromMemory);
    std::printf("%d threads, reads %.1f GB/s\n", num_threads, bandwidth / 1e9);
    for (const Case& c : kCases) {
        if (std::strstr(c.name, only) == nullptr) continue;
        std::vector<Run*> runs;
        for (const Library& library : libraries) runs.push_back(new Run(library, c));
        for (int repeat = 0; repeat < 9; ++repeat) {
            for (Run* run : runs) {
                if (run->memory) run->time();
            }
        }
        std::printf("%-34s", c.name);
        for (Run* run : runs) {
            if (run->memory == nullptr) {
                std::printf("  not offered");
            } else {
                run->times.erase(run->times.begin());  // the first warms up
                const double seconds = median(run->times);
                const double least = *std::min_element(run->times.begin(), run->times.end());
                double products = 0;
                for (int q = 0; q < c.queries; ++q) products += c.length - c.queries + q + 1;
                products *= double(c.rows) * c.num_heads * 2 * c.head_size;
                std::printf("  %9.1f us (least %9.1f, %5.1f GB/s, %6.1f GFLOP/s)", seconds * 1e6, least * 1e6,
                            double(run->layer_bytes) / seconds / 1e9, 2 * products / seconds / 1e9);
            }
            delete run;
        }
        std::printf("\n");
        std::fflush(stdout);
    }
    return 0;
}
