// Compiled once an instruction set, with OCTAVO_ISA the name of its namespace.

#include "attention.h"
#include "decoder.h"
#include "elementwise.h"
#include "finish.h"
#include "norm.h"
#include "probe.h"
#include "sample.h"
#include "table.h"
#include "tiles.h"
#include "write.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

#define OCTAVO_STRING_OF(name) #name
#define OCTAVO_STRING(name) OCTAVO_STRING_OF(name)

template <class T>
struct TypeOf {
    typedef T type;
};

// Calls body with the type of a dtype.
template <class Body>
void with_type(int dtype, const Body& body) {
    switch (dtype) {
        case OCTAVO_FLOAT32: return body(TypeOf<float>());
        case OCTAVO_BFLOAT16: return body(TypeOf<BFloat16>());
        default: return body(TypeOf<Float16>());
    }
}

template <class Body>
void with_types(int first, int second, const Body& body) {
    with_type(first, [&](auto a) { with_type(second, [&](auto b) { body(a, b); }); });
}

void rms_norm(const Norm& a, int64_t begin, int64_t end) {
    with_types(a.dtype, a.weight_dtype, [&](auto x, auto weight) {
        rms_norm_rows<typename decltype(x)::type, typename decltype(weight)::type>(a, begin, end);
    });
}

void fused_add_rms_norm(const Norm& a, int64_t begin, int64_t end) {
    with_types(a.dtype, a.weight_dtype, [&](auto x, auto weight) {
        fused_add_rms_norm_rows<typename decltype(x)::type, typename decltype(weight)::type>(a, begin, end);
    });
}

void layer_norm(const Norm& a, int64_t begin, int64_t end) {
    with_types(a.dtype, a.weight_dtype, [&](auto x, auto weight) {
        layer_norm_rows<typename decltype(x)::type, typename decltype(weight)::type>(a, begin, end);
    });
}

void rotary_embedding(const Rotary& a, int64_t begin, int64_t end) {
    with_type(a.dtype, [&](auto x) { rotate_tokens<typename decltype(x)::type>(a, begin, end); });
}

void activation(const Activate& a, int64_t begin, int64_t end) {
    with_type(a.dtype, [&](auto x) {
        with_activation(a.activation, [&](auto kind) {
            activate_range<typename decltype(x)::type, decltype(kind)::kind>(a, begin, end);
        });
    });
}

void act_and_mul(const Activate& a, int64_t begin, int64_t end) {
    with_type(a.dtype, [&](auto x) {
        typedef typename decltype(x)::type T;
        if (a.activation == OCTAVO_SWIGLU_CLAMPED) return gate_rows<T, OCTAVO_SWIGLU_CLAMPED>(a, begin, end);
        with_activation(a.activation, [&](auto kind) { gate_rows<T, decltype(kind)::kind>(a, begin, end); });
    });
}

void convert(const Convert& a, int64_t begin, int64_t end) {
    with_type(a.dtype, [&](auto x) { convert_rows<typename decltype(x)::type>(a, begin, end); });
}

}  // namespace

extern const Kernels kernels;
const Kernels kernels = {
    OCTAVO_STRING(OCTAVO_ISA),
    kTiled,
    product,
    prepare_rows,
    convert,
    rotate_rows,
    unpack_rows,
    probe_read,
    probe_products,
    rms_norm,
    fused_add_rms_norm,
    layer_norm,
    rotary_embedding,
    activation,
    act_and_mul,
    write_kv,
    attend_scratch,
    attend_tiles,
    attend_pieces,
    fold_tiles,
    survey_row,
    weigh_row,
    gather_row,
    weigh_scores,
    release_tiles,
};

}  // namespace OCTAVO_ISA
}  // namespace octavo
