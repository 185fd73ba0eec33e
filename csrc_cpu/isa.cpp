#include "isa.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string>

#ifdef OCTAVO_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

// Of selfcheck/tile_emulator.cpp, where tests have preloaded it: it runs the tile instructions in the processor's place.
extern "C" __attribute__((weak, visibility("default"))) int octavo_tiles_are_emulated();
#endif

#if defined(OCTAVO_ARM64) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(OCTAVO_ARM64) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace octavo {
namespace {

// Worst first. A processor that runs one runs those before it.
const Kernels* const kBuilt[] = {
    &base::kernels,
#ifdef OCTAVO_X86
    &avx2::kernels,
    &avx512::kernels,
    &avx512bf16::kernels,
#ifdef OCTAVO_AMX
    &amx::kernels,
#endif
#endif
#ifdef OCTAVO_ARM64
    &dotprod::kernels,
    &bf16::kernels,
#endif
};
constexpr int kNumBuilt = sizeof kBuilt / sizeof kBuilt[0];

#ifdef OCTAVO_AMX
// Whether the processor has tiles with products of bfloat16 and int8, and the system saves and grants them.
bool ask_for_tiles() {
    if (octavo_tiles_are_emulated && octavo_tiles_are_emulated()) return true;
    unsigned eax, ebx, ecx, edx;
    constexpr unsigned kProducts = 1u << 22 | 1u << 24 | 1u << 25;  // amx-bf16, amx-tile, amx-int8
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || (edx & kProducts) != kProducts) return false;
    unsigned saved, saved_high;  // XCR0, which AVX-512 has shown to be there
    __asm__ volatile("xgetbv" : "=a"(saved), "=d"(saved_high) : "c"(0));
    constexpr unsigned kTileState = 1u << 17 | 1u << 18;
    if ((saved & kTileState) != kTileState) return false;
    constexpr int kRequestPermission = 0x1023, kTileData = 18;  // of arch_prctl, for the whole process
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

#ifdef OCTAVO_ARM64
// Whether the processor has products of four int8; and those with one side unsigned, those of bfloat16, and float16.
struct Features {
    bool dotprod, bf16;
};

#if defined(__linux__)
Features features() {
    constexpr unsigned long kFloat16 = 1ul << 10, kDotProducts = 1ul << 20;    // of AT_HWCAP
    constexpr unsigned long kInt8Matrices = 1ul << 13, kBFloat16 = 1ul << 14;  // of AT_HWCAP2
    const unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
    return {(first & kDotProducts) != 0,
            (first & kFloat16) != 0 && (second & kInt8Matrices) != 0 && (second & kBFloat16) != 0};
}
#elif defined(__APPLE__)
bool has(const char* feature) {
    int there = 0;
    size_t size = sizeof there;
    return sysctlbyname(feature, &there, &size, nullptr, 0) == 0 && there != 0;
}
Features features() {
    return {has("hw.optional.arm.FEAT_DotProd"), has("hw.optional.arm.FEAT_FP16") &&
                                                     has("hw.optional.arm.FEAT_I8MM") &&
                                                     has("hw.optional.arm.FEAT_BF16")};
}
#else
Features features() { return {false, false}; }
#endif
#endif

int count_usable() {
#ifdef OCTAVO_X86
    __builtin_cpu_init();  // asks the operating system too, whether it saves the wide registers
    if (!__builtin_cpu_supports("sse4.2")) return 0;
    // Every processor with FMA and AVX2 has F16C.
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 1;
    const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512cd");
    if (!wide) return 2;
    if (!__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512vnni")) return 3;
#ifdef OCTAVO_AMX
    static const bool tiles = ask_for_tiles();  // once, and when the library is first used: before its threads start
    if (tiles) return 5;
#endif
    return 4;
#elif defined(OCTAVO_ARM64)
    const Features found = features();
    return !found.dotprod ? 1 : !found.bf16 ? 2 : 3;
#else
    return 1;
#endif
}

std::string join(int count) {
    std::string names;
    for (int i = 0; i < count; ++i) {
        if (i > 0) names += ',';
        names += kBuilt[i]->name;
    }
    return names;
}

const Kernels* best(const char* cap) {
    const int usable = count_usable();
    int allowed = kNumBuilt;
    if (cap != nullptr && *cap != '\0') {
        allowed = 0;
        for (int i = 0; i < kNumBuilt; ++i) {
            if (std::strcmp(kBuilt[i]->name, cap) == 0) allowed = i + 1;
        }
    }
    const int count = usable < allowed ? usable : allowed;
    return count > 0 ? kBuilt[count - 1] : nullptr;
}

std::atomic<const Kernels*>& chosen() {
    static std::atomic<const Kernels*> kernels{best(std::getenv("OCTAVO_CPU_ISA"))};
    return kernels;
}

}  // namespace

const Kernels* kernels() { return chosen().load(std::memory_order_acquire); }

bool set_isa(const char* cap) {
    const Kernels* const found = best(cap);
    if (found != nullptr) chosen().store(found, std::memory_order_release);
    return found != nullptr;
}

const char* isas_built() {
    static const std::string names = join(kNumBuilt);
    return names.c_str();
}

const char* isas_usable() {
    static const std::string names = join(count_usable());
    return names.c_str();
}

}  // namespace octavo
