#include "isa.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string>

namespace octavo {
namespace {

// Worst first. A processor that runs one runs those before it.
const Kernels* const kBuilt[] = {
    &base::kernels,
#ifdef OCTAVO_X86
    &avx2::kernels,
    &avx512::kernels,
    &avx512bf16::kernels,
#endif
};
constexpr int kNumBuilt = sizeof kBuilt / sizeof kBuilt[0];

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
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") ? 4 : 3;
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
