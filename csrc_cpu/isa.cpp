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
