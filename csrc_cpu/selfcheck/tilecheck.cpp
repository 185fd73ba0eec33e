// Checks the emulator of tile instructions by itself, on any x86-64 processor: octavo_tilecheck. It is compiled
// together with tile_emulator.cpp, and its instructions are encoded by the assembler.

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include <xmmintrin.h>

#include <cmath>
#include <csignal>
#include <cstdio>
#include <random>
#include <string>
#include <thread>

#define OCTAVO_ISA tilecheck
#include "../kernels/tiles.h"

extern "C" {
int64_t octavo_tile_configs();
int64_t octavo_tile_products();
int64_t octavo_tile_threads();
alignas(64) octavo::tilecheck::TileConfig tilecheck_config;  // by a name that assembly can give
}

namespace {

using namespace octavo::tilecheck;

int num_failures = 0;
long num_checks = 0;
std::mt19937 generator(7);

void check(bool ok, const std::string& what) {
    ++num_checks;
    if (ok) return;
    ++num_failures;
    std::fprintf(stderr, "FAILED %s\n", what.c_str());
}

// What one tile holds, and a stride of 64 bytes between its rows.
struct Square {
    alignas(64) uint32_t words[16][16];

    template <class Value>
    static Square of(const Value& value) {
        Square s;
        for (auto& row : s.words) {
            for (uint32_t& word : row) word = uint32_t(value());
        }
        return s;
    }
    bool operator==(const Square& other) const { return std::memcmp(words, other.words, sizeof words) == 0; }
};
Square random_square() { return Square::of([] { return generator(); }); }

uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}
float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

// ---- addresses

constexpr uint64_t kLow = 0x10000000, kLowBytes = 0x10000;  // so that an address fits into a displacement

// A function (base, index, out) that loads tile 0 by an instruction, and stores it to `out`.
#define LOADER(name, setup, instruction)                                                                       \
    extern "C" void name(const void* base, int64_t index, void* out);                                          \
    asm(".text\n" #name ": push %rbx; push %rbp; push %r12; push %r13; push %r14; push %r15; mov %rdx, %r11\n" \
        ".set tilecheck_base, 0x10008000\n" setup "; " instruction "\n"                                        \
        "mov $64, %edx; tilestored %tmm0, (%r11,%rdx,1)\n"                                                     \
        "pop %r15; pop %r14; pop %r13; pop %r12; pop %rbp; pop %rbx; ret\n");

LOADER(load_plain, "", "tileloadd (%rdi,%rsi,1), %tmm0")
LOADER(load_twice, "", "tileloaddt1 (%rdi,%rsi,2), %tmm0")
LOADER(load_four, "", "tileloadd 100(%rdi,%rsi,4), %tmm0")
LOADER(load_eight, "", "tileloadd -128(%rdi,%rsi,8), %tmm0")
LOADER(load_far, "", "tileloadd 0x1234(%rdi,%rsi,1), %tmm0")
LOADER(load_far_down, "", "tileloadd -0x1234(%rdi,%rsi,1), %tmm0")
LOADER(load_no_index, "", "tileloadd 8(%rdi), %tmm0")
LOADER(load_no_base, "", "tileloadd tilecheck_base(,%rsi,2), %tmm0")
LOADER(load_narrow, "bts $40, %rdi", "addr32 tileloadd (%edi,%esi,1), %tmm0")
LOADER(load_rbp, "mov %rdi, %rbp; mov %rsi, %rbx", "tileloadd (%rbp,%rbx,1), %tmm0")
LOADER(load_r13, "mov %rdi, %r13; mov %rsi, %rbp", "tileloadd (%r13,%rbp,1), %tmm0")
LOADER(load_r8, "mov %rdi, %r8; mov %rsi, %r15", "tileloadd 4(%r8,%r15,1), %tmm0")
LOADER(load_r12, "mov %rdi, %r12; mov %rsi, %rax", "tileloadd (%r12,%rax,1), %tmm0")
LOADER(load_rax_r12, "mov %rdi, %rax; mov %rsi, %r12", "tileloadd (%rax,%r12,1), %tmm0")
LOADER(load_r9_rcx, "mov %rdi, %r9; mov %rsi, %rcx", "tileloadd (%r9,%rcx,1), %tmm0")
LOADER(load_rsp, "mov %rsp, %rcx; mov %rdi, %rsp", "tileloadd (%rsp,%rsi,1), %tmm0; mov %rcx, %rsp")

void check_addresses() {
    void* const memory = mmap(reinterpret_cast<void*>(kLow), kLowBytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    char* const low = static_cast<char*>(memory);
    if (uint64_t(low) != kLow) return check(false, "no memory below 2 GiB");
    for (uint64_t i = 0; i < kLowBytes; ++i) low[i] = char(generator());
    TileConfig config;
    config.set(0, 16);
    use_tiles(config);
    const auto expect = [&](void (*loader)(const void*, int64_t, void*), int64_t index, int64_t offset, int64_t stride,
                            const char* what) {
        const char* const middle = low + 0x8000;
        Square want, got = random_square();
        for (int r = 0; r < 16; ++r) std::memcpy(want.words[r], middle + offset + r * stride, 64);
        loader(middle, index, &got);
        check(got == want, what);
    };
    expect(load_plain, 64, 0, 64, "a base and an index");
    expect(load_plain, -100, 0, -100, "rows downwards");
    expect(load_plain, 0, 0, 0, "a stride of 0");
    expect(load_twice, 64, 0, 128, "twice the index");
    expect(load_four, 33, 100, 132, "four times the index");
    expect(load_eight, 17, -128, 136, "eight times the index");
    expect(load_far, 65, 0x1234, 65, "a wide displacement");
    expect(load_far_down, 65, -0x1234, 65, "a wide displacement downwards");
    expect(load_no_index, 65, 8, 0, "no index");
    expect(load_no_base, 40, 0, 80, "no base");
    expect(load_narrow, 72, 0, 72, "narrow addresses");
    expect(load_rbp, 68, 0, 68, "rbp and rbx");
    expect(load_r13, 68, 0, 68, "r13 and rbp");
    expect(load_r8, 68, 4, 68, "r8 and r15");
    expect(load_r12, 68, 0, 68, "r12 and rax");
    expect(load_rax_r12, 68, 0, 68, "rax and r12");
    expect(load_r9_rcx, 68, 0, 68, "r9 and rcx");
    expect(load_rsp, 68, 0, 68, "rsp");
    munmap(memory, kLowBytes);
}

// ---- configurations

void check_configs() {
    tilecheck_config = {};
    for (int t = 0; t < 8; ++t) tilecheck_config.set(t, 9 + t, 4 * (8 + t));
    TileConfig found = {}, none = {};
    none.palette = 0;
    asm volatile("ldtilecfg tilecheck_config(%%rip)" ::: "memory");
    asm volatile("sttilecfg (%0,%1,4)" ::"r"(&found), "r"(int64_t(0)) : "memory");
    check(found == tilecheck_config, "a configuration is not the one that was loaded");
    check(octavo_tile_threads() == 1, "a configured thread is not counted");
    asm volatile("tilerelease; sttilecfg 0(%0)" ::"r"(&found) : "memory");
    check(found == none, "a configuration outlives its release");
    check(octavo_tile_threads() == 0, "a released thread is counted");

    const int64_t before = octavo_tile_configs();
    for (int i = 0; i < 3; ++i) use_tiles(tilecheck_config);
    check(octavo_tile_configs() == before + 1, "tiles are configured again as they are");
    Square seen = random_square(), zero = Square::of([] { return 0; });
    const Square kept = seen;
    store_tile<3>(&seen, 64);  // 12 rows of 11 words
    for (int r = 0; r < 16; ++r) {
        for (int n = 0; n < 16; ++n) {
            const bool inside = r < 12 && n < 11;
            check(seen.words[r][n] == (inside ? 0 : kept.words[r][n]), "a store of a fresh, smaller tile");
        }
    }
    const Square full = random_square();
    TileConfig whole;
    for (int t = 0; t < 8; ++t) whole.set(t, 16);
    use_tiles(whole);
    load_tile<7>(&full, 64);
    store_tile<7>(&seen, 64);
    check(seen == full, "a tile is not what was loaded");
    zero_tile<7>();
    store_tile<7>(&seen, 64);
    check(seen == zero, "a tile is not zero");
    load_tile<6>(&full, 64);
    release_tiles();
    use_tiles(whole);
    store_tile<6>(&seen, 64);
    check(seen == zero, "a tile outlives its release");
    release_tiles();
}
// ---- products

struct Factors {
    Square sum, a, b;
    int rows, words, columns;

    void use() const {
        TileConfig config;
        config.set(0, rows, columns * 4);
        config.set(1, rows, words * 4);
        config.set(2, words, columns * 4);
        use_tiles(config);
        load_tile<0>(&sum, 64);
        load_tile<1>(&a, 64);
        load_tile<2>(&b, 64);
    }
    Square stored() const {
        Square out = sum;
        store_tile<0>(&out, 64);
        return out;
    }
};

float half_of(uint32_t word, int i) { return float_of(i ? word & 0xffff0000u : word << 16); }

// One result as the manual has it, in double where that is exact.
float dot_bf16(const Factors& f, int m, int n) {
    float sums[2] = {};
    for (int k = 0; k < f.words; ++k) {
        for (int i = 0; i < 2; ++i) {
            const double product = double(half_of(f.a.words[m][k], i)) * double(half_of(f.b.words[k][n], i));
            const double sum = product + double(sums[i]);  // of few bits: exact
            sums[i] = float(sum);
        }
    }
    return float_of(f.sum.words[m][n]) + (sums[0] + sums[1]);
}

void check_bf16(int rows, int words, int columns) {
    // Whole numbers and a scale near one another, so that sums in double are exact.
    const auto number = [] { return bits_of(float(int(generator() % 255) - 127) * 0.25f) & 0xffff0000u; };
    const auto pair = [&] { return number() | number() >> 16; };
    Factors f = {Square::of([] { return bits_of(float(generator() % 1000003) * 1e-3f); }), Square::of(pair),
                 Square::of(pair), rows, words, columns};
    f.use();
    dot_tiles<0, 1, 2>();
    const Square got = f.stored();
    for (int m = 0; m < 16; ++m) {
        for (int n = 0; n < 16; ++n) {
            const bool inside = m < rows && n < columns;
            check(got.words[m][n] == (inside ? bits_of(dot_bf16(f, m, n)) : f.sum.words[m][n]),
                  "a product of " + std::to_string(rows) + " by " + std::to_string(words) + " by " +
                      std::to_string(columns));
        }
    }
}

// The first result of sum + a times b, of two pairs.
float first_result(float sum, const float a[4], const float b[4]) {
    Factors f = {};
    f.rows = f.columns = 1;
    f.words = 2;
    f.sum.words[0][0] = bits_of(sum);
    for (int k = 0; k < 2; ++k) {
        f.a.words[0][k] = bits_of(a[2 * k]) >> 16 | (bits_of(a[2 * k + 1]) & 0xffff0000u);
        f.b.words[k][0] = bits_of(b[2 * k]) >> 16 | (bits_of(b[2 * k + 1]) & 0xffff0000u);
    }
    f.use();
    dot_tiles<0, 1, 2>();
    return float_of(f.stored().words[0][0]);
}

void check_rounding() {
    const float ones[4] = {1, 1, 1, 1}, big = 16777216.0f;
    const float order[4] = {big, 1, 1, 0};
    check(first_result(-big, order, ones) == 0.0f, "even and odd inputs have no sum each");
    const float tiny[4] = {0x1p-70f, 0, 0, 0};
    check(first_result(0.0f, tiny, tiny) == 0.0f, "a subnormal result is kept");
    const float subnormal[4] = {0x1p-130f, 0, 0, 0}, huge[4] = {0x1p100f, 0, 0, 0};
    check(first_result(0.0f, subnormal, huge) == 0.0f, "a subnormal input counts");
    check(first_result(0x1p-130f, ones, subnormal) == 0.0f, "a subnormal sum is kept");
    const float infinite[4] = {INFINITY, 0, 0, 0}, nought[4] = {};
    check(first_result(0.0f, infinite, ones) == INFINITY, "infinity is lost");
    check(std::isnan(first_result(0.0f, infinite, nought)), "infinity times zero is a number");
    const unsigned settings = _mm_getcsr();
    _mm_setcsr((settings | _MM_ROUND_UP) & ~0x3fu);
    const float halves[4] = {0x1p-25f, 0, 0, 0};
    check(first_result(1.0f, halves, ones) == 1.0f, "the thread's rounding is used");
    check(_mm_getcsr() == ((settings | _MM_ROUND_UP) & ~0x3fu), "the thread's rounding changed");
    _mm_setcsr(settings);
}

template <class A, class B, class Dot>
void check_bytes(const char* what, const Dot& dot) {
    const Factors f = {random_square(), random_square(), random_square(), 13, 11, 15};
    f.use();
    dot();
    const Square got = f.stored();
    for (int m = 0; m < f.rows; ++m) {
        for (int n = 0; n < f.columns; ++n) {
            int64_t sum = int32_t(f.sum.words[m][n]);
            for (int k = 0; k < f.words; ++k) {
                for (int i = 0; i < 32; i += 8) sum += A(f.a.words[m][k] >> i) * B(f.b.words[k][n] >> i);
            }
            check(got.words[m][n] == uint32_t(sum), what);
        }
    }
}

void check_products() {
    for (int i = 1; i <= 16; ++i) check_bf16(i, 17 - i, (i * 5) % 16 + 1);
    check_bf16(16, 16, 16);
    check_rounding();
    check_bytes<int8_t, int8_t>("tdpbssd", [] { dot_tiles_signed<0, 1, 2>(); });
    check_bytes<int8_t, uint8_t>("tdpbsud", [] { dot_tiles_signed_unsigned<0, 1, 2>(); });
    check_bytes<uint8_t, int8_t>("tdpbusd", [] { dot_tiles_unsigned_signed<0, 1, 2>(); });
    check_bytes<uint8_t, uint8_t>("tdpbuud", [] { asm volatile("tdpbuud %tmm2, %tmm1, %tmm0"); });
    release_tiles();
}

// Stores right before the tiles are loaded are seen, and loads right behind a tile's store.
void check_order() {
    for (uint32_t i = 0; i < 100; ++i) {
        Square a = Square::of([&] { return i; }), out;
        TileConfig config;
        config.set(5, 1 + i % 16, 64);
        use_tiles(config);
        a.words[0][i % 16] = i + 1000;
        load_tile<5>(&a, 64);
        a.words[0][i % 16] = 0;
        store_tile<5>(&out, 64);
        check(out.words[0][i % 16] == i + 1000, "memory is not in order around tiles");
    }
    release_tiles();
}

// ---- what is refused, signals, threads

// How a child ends that runs `body`: the number of its signal.
template <class Body>
int end_of(const Body& body) {
    std::fflush(nullptr);
    const pid_t child = fork();
    if (child == 0) {
        std::fclose(stderr);
        close(STDERR_FILENO);
        body();
        _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

void check_refusals() {
    const auto refuses = [](const char* what, auto body) { check(end_of(body) == SIGABRT, what); };
    const auto refuses_config = [&](const char* what, auto change) {
        refuses(what, [&] {
            TileConfig config = {};
            for (int t = 0; t < 4; ++t) config.set(t, 16);
            change(config);
            use_tiles(config);
        });
    };
    refuses("tiles without a configuration", [] { zero_tile<0>(); });
    refuses("a product without a configuration", [] { dot_tiles<0, 1, 2>(); });
    refuses_config("palette 2", [](TileConfig& c) { c.palette = 2; });
    refuses_config("a reserved byte", [](TileConfig& c) { c.reserved[13] = 1; });
    refuses_config("a row of 65 bytes", [](TileConfig& c) { c.set(1, 16, 65); });
    refuses_config("17 rows", [](TileConfig& c) { c.set(1, 17); });
    refuses_config("rows of no bytes", [](TileConfig& c) { c.set(1, 3, 0); });
    refuses_config("a ninth tile", [](TileConfig& c) { c.set(8, 16); });
    refuses_config("a tile that is not configured", [](TileConfig& c) {
        use_tiles(c);
        zero_tile<4>();
    });
    refuses_config("tiles after their release", [](TileConfig& c) {
        use_tiles(c);
        release_tiles();
        zero_tile<1>();
        std::abort();  // not reached: the emulator ends the process
    });
    refuses_config("one tile as both factors", [](TileConfig& c) {
        use_tiles(c);
        asm volatile(".byte 0xc4, 0xe2, 0x72, 0x5c, 0xc1");  // tdpbf16ps %tmm1, %tmm1, %tmm0, which no assembler takes
    });
    refuses_config("a sum of other rows", [](TileConfig& c) {
        c.set(0, 15);
        use_tiles(c);
        dot_tiles<0, 1, 2>();
    });
    refuses_config("a sum of other columns", [](TileConfig& c) {
        c.set(0, 16, 60);
        use_tiles(c);
        dot_tiles<0, 1, 2>();
    });
    refuses_config("factors of other inputs", [](TileConfig& c) {
        c.set(1, 16, 60);
        use_tiles(c);
        dot_tiles<0, 1, 2>();
    });
    refuses_config("a row of half a word", [](TileConfig& c) {
        c.set(0, 16, 62);
        c.set(2, 16, 62);
        use_tiles(c);
        dot_tiles<0, 1, 2>();
    });
    check(end_of([] { asm volatile("ud2"); }) == SIGILL, "another illegal instruction goes on");
    check(end_of([] { asm volatile("tdpfp16ps %tmm2, %tmm1, %tmm0"); }) == SIGILL, "half precision is emulated");
}

volatile sig_atomic_t num_caught = 0;

void check_signals() {
    const auto catch_and_skip = [](int, siginfo_t*, void* context) {
        num_caught = num_caught + 1;
        static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP] += 2;
    };
    struct sigaction mine = {}, before = {}, found = {};
    mine.sa_sigaction = catch_and_skip;
    mine.sa_flags = SA_SIGINFO;
    sigaction(SIGILL, &mine, &before);
    TileConfig config;
    config.set(0, 16);
    use_tiles(config);
    asm volatile("ud2" ::: "memory");
    zero_tile<0>();
    release_tiles();
    check(num_caught == 1, "a handler of the program's own is not called");
    sigaction(SIGILL, &before, &found);
    check(found.sa_sigaction == mine.sa_sigaction && before.sa_handler == SIG_DFL, "a handler is forgotten");
}

void check_threads() {
    const int64_t before = octavo_tile_products();
    const auto work = [](int rows, int* num_wrong) {
        for (int i = 0; i < 200; ++i) {
            Factors f = {Square::of([] { return 0; }), Square::of([] { return 0x3f803f80; }),
                         Square::of([] { return 0x3f803f80; }), rows, rows, rows};
            f.use();
            dot_tiles<0, 1, 2>();
            const Square out = f.stored();
            *num_wrong += float_of(out.words[rows - 1][rows - 1]) != float(2 * rows);
        }
        release_tiles();
    };
    int num_wrong[3] = {};
    std::thread first(work, 16, &num_wrong[0]), second(work, 5, &num_wrong[1]);
    work(9, &num_wrong[2]);
    first.join();
    second.join();
    check(num_wrong[0] + num_wrong[1] + num_wrong[2] == 0, "threads disturb each other");
    check(octavo_tile_products() == before + 600, "products are not counted");
    check(octavo_tile_threads() == 0, "a thread holds its tiles");
}

}  // namespace

int main() {
    check_addresses();
    check_configs();
    check_products();
    check_order();
    check_refusals();
    check_signals();
    check_threads();
    std::printf("%d of %ld checks failed\n", num_failures, num_checks);
    return num_failures == 0 ? 0 : 1;
}
