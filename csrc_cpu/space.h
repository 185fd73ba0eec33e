// Memory of one piece, handed out.
#pragma once

#include <cstdint>

namespace octavo {

// From null on, it counts.
struct Space {
    char* base;
    int64_t used = 0;

    template <class T = void>
    T* take(int64_t bytes) {
        char* const at = base ? base + used : nullptr;
        used += (bytes + 63) / 64 * 64;
        return reinterpret_cast<T*>(at);
    }
};

}  // namespace octavo
