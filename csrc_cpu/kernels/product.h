// Products of activations and packed weights.
//
// A tile is R rows by V vectors of outputs. Every result is the sum of its own inputs in ascending order, whatever
// tile it is computed in, so a row has the same bits alone and among others. Codes are summed as integers within a
// group of inputs, which is exact, and groups are added in ascending order.
#pragma once

#include "numeric.h"
#include "simd.h"
#include "table.h"

namespace octavo {
namespace OCTAVO_ISA {

constexpr int kPanelVectors = kPanelColumns / kLanes;
constexpr int kUnitVectors = 2 * kPanelVectors;

// Rows and vectors of a tile: what the registers hold beside weights and inputs. One row alone takes more vectors, as
// each of its sums waits for itself.
constexpr bool kLongRows = kRegisters == 32 && kInputWords == 1;
constexpr int kDenseRows = kLongRows ? 6 : 4, kDenseVectors = kRegisters == 32 ? 4 : 2;
constexpr int kGroupRows = kLongRows ? 6 : kRegisters == 32 ? 4 : 2, kGroupVectors = 2;
constexpr int kRowVectors = kLongRows ? 4 : kRegisters == 32 ? 8 : 2;
static_assert(kUnitRows % kDenseRows == 0 && kUnitRows % kGroupRows == 0, "a unit is whole tiles");

// Inputs of a dense product are summed in spans: the weights of a span stay in the second cache while rows pass by.
constexpr int64_t kSpanWords = 1536;

// A word is a float.
struct FloatWord {
    static constexpr int kInputBytes = 4;
    template <int Place>
    static OCTAVO_INLINE Floats dot(Floats sum, Words x, Words w) {
        return dot_floats<Place>(sum, x, w);
    }
};

// A word is a pair of bfloat16, the first in the low bits.
struct PairWord {
    static constexpr int kInputBytes = 2;
    template <int Place>
    static OCTAVO_INLINE Floats dot(Floats sum, Words x, Words w) {
        return dot_pairs<Place>(sum, x, w);
    }
};

// kStarted: sums of a group start at minus the offset times the sum of its inputs.
struct Int8Codes {
    static constexpr int kOffset = 128, kCodeBytes = kGroup * kPanelColumns;
    static constexpr bool kMinima = false, kStarted = !kSignedQuads;
    static OCTAVO_INLINE Words quad(const char* group, int q, int column) {
        const Words codes = load_words(group + (q * kPanelColumns + column) * 4);
        return kSignedQuads ? codes ^ 0x80808080u : codes;
    }
};
struct Int4Codes {
    static constexpr int kOffset = 8, kCodeBytes = kGroup * kPanelColumns / 2;
    static constexpr bool kMinima = false, kStarted = true;
    static OCTAVO_INLINE Words quad(const char* group, int q, int column) {
        const Words both = load_words(group + (q % 4 * kPanelColumns + column) * 4);
        return (q < 4 ? both : both >> 4) & 0x0f0f0f0fu;
    }
};
struct Int4MinCodes : Int4Codes {
    static constexpr int kOffset = 0;
    static constexpr bool kMinima = true, kStarted = false;
};

template <class Codes>
constexpr int64_t kGroupBytes = Codes::kCodeBytes + kPanelColumns * 2 * (Codes::kMinima ? 2 : 1);

// Which panel a unit's vector lies in, and its first column there.
constexpr int panel_of(int vector) { return vector / kPanelVectors; }
constexpr int column_of(int vector) { return vector % kPanelVectors * kLanes; }
constexpr int kLineVectors = 64 / (4 * kLanes);  // that share a cache line

// What a tile fetches meanwhile: its own weights from further on, where they come from memory; or those of the next
// unit into the second cache.
struct NoFetch {
    OCTAVO_INLINE void weights(const char*, int64_t) const {}
    OCTAVO_INLINE void step() {}
};
template <int Ahead>
struct FetchAhead {
    OCTAVO_INLINE void weights(const char* w, int64_t offset) const { prefetch(w, offset + Ahead); }
    OCTAVO_INLINE void step() {}
};
struct FetchNext {
    const char*& next;
    const char* end;
    int64_t lines;
    OCTAVO_INLINE void weights(const char*, int64_t) const {}
    OCTAVO_INLINE void step() {
        for (int64_t i = 0; i < lines && next < end; ++i, next += 64) __builtin_prefetch(next, 0, 2);
    }
};
constexpr int kAheadOne = 16384, kAheadFew = 4096;  // bytes; one row reads fastest

// c[R][V vectors] += words [begin, end) of x times a unit's panels from vector `first` on. A tile begins where a panel
// does, or lies within one: places within a panel are constants.
template <class Word, int R, int V, class Fetch>
void dense_tile(const char* x, int64_t x_bytes, const char* panels, int64_t panel_bytes, int first, int64_t begin,
                int64_t end, float* c, Fetch fetch) {
    constexpr int kPanels = (V + kPanelVectors - 1) / kPanelVectors;
    Floats sums[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
            sums[r][v] = begin == 0 ? splat(0.0f) : load(c + r * kUnitColumns + (first + v) * kLanes);
        }
    }
    const char* w[kPanels];
    for (int p = 0; p < kPanels; ++p) w[p] = panels + (panel_of(first) + p) * panel_bytes + column_of(first) * 4;
    for (int64_t s = begin; s < end; s += kInputWords) {
        Words inputs[R];
#pragma GCC unroll 8
        for (int r = 0; r < R && kInputWords > 1; ++r) inputs[r] = load_inputs(x + r * x_bytes + s * 4);
        for_each_number<kInputWords>([&](auto place) OCTAVO_LAMBDA {
            const int64_t offset = (s + place.value) * (kPanelColumns * 4);
            Words weights[V];
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) {
                weights[v] = load_words(w[panel_of(v)] + offset + column_of(v) * 4);
                if (v % kLineVectors == 0) fetch.weights(w[panel_of(v)], offset + column_of(v) * 4);
            }
            fetch.step();
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const Words input = kInputWords > 1 ? inputs[r] : load_inputs(x + r * x_bytes + s * 4);
#pragma GCC unroll 8
                for (int v = 0; v < V; ++v) {
                    sums[r][v] = Word::template dot<place.value>(sums[r][v], input, weights[v]);
                }
            }
        });
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) store(c + r * kUnitColumns + (first + v) * kLanes, sums[r][v]);
    }
}

// R rows that lie `stride` apart. Every second or third has a pointer: the processor's addresses reach the rest.
template <int R, class T>
struct Rows {
    static constexpr int kReach = 3;
    T* heads[(R + kReach - 1) / kReach];
    int64_t stride;

    Rows(T* first, int64_t row_stride) : stride(row_stride) {
        for (int i = 0; i * kReach < R; ++i) heads[i] = first + i * kReach * row_stride;
    }
    OCTAVO_INLINE T* at(int row, int64_t offset) const { return heads[row / kReach] + row % kReach * stride + offset; }
};

// c[R][V vectors] = x times a unit's panels from vector `first` on, group by group.
template <class Codes, int R, int V, class Fetch>
void grouped_tile(const Operand& x, int64_t row, const char* panels, int64_t panel_bytes, int first, float* c,
                  Fetch fetch) {
    constexpr int kPanels = (V + kPanelVectors - 1) / kPanelVectors;
    Floats sums[R][V] = {};
    const Rows<R, const char> codes(static_cast<const char*>(x.data) + row * x.stride, x.stride);
    const Rows<R, const float> scales(x.scales + row * x.groups, x.groups);
    const Rows<R, const int32_t> starts(x.starts + row * x.groups, x.groups);
    const char* w[kPanels];
    for (int p = 0; p < kPanels; ++p) w[p] = panels + (panel_of(first) + p) * panel_bytes + column_of(first) * 4;
    const int64_t factors_at = Codes::kCodeBytes - column_of(first) * 2;
    for (int64_t g = 0; g < x.groups; ++g) {
        Ints dots[R][V];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const Ints start = Codes::kStarted ? (Ints)splat_word(starts.at(r, g)) : Ints{};
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) dots[r][v] = start;
        }
#pragma GCC unroll 8
        for (int first_quad = 0; first_quad < kGroup / 4; first_quad += kInputWords) {
            Words inputs[R];
#pragma GCC unroll 8
            for (int r = 0; r < R && kInputWords > 1; ++r) {
                inputs[r] = load_inputs(codes.at(r, g * kGroup + first_quad * 4));
            }
            for_each_number<kInputWords>([&](auto place) OCTAVO_LAMBDA {
                const int q = first_quad + place.value;
                Words weights[V];
#pragma GCC unroll 8
                for (int v = 0; v < V; ++v) {
                    weights[v] = Codes::quad(w[panel_of(v)], q, column_of(v));
                    if (q < Codes::kCodeBytes / (4 * kPanelColumns) && v % kLineVectors == 0) {
                        fetch.weights(w[panel_of(v)], (q * kPanelColumns + column_of(v)) * 4);
                    }
                }
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    const Words input = kInputWords > 1 ? inputs[r] : load_inputs(codes.at(r, g * kGroup + q * 4));
#pragma GCC unroll 8
                    for (int v = 0; v < V; ++v) {
                        dots[r][v] = dot_quads<place.value>(dots[r][v], input, weights[v]);
                    }
                }
            });
        }
        fetch.step();
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
            const auto* factors = reinterpret_cast<const Float16*>(w[panel_of(v)] + factors_at) + column_of(v);
            const Floats scale = load(factors);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const float x_scale = *scales.at(r, g);
                sums[r][v] = fma(to_floats(dots[r][v]), scale * x_scale, sums[r][v]);
                if constexpr (Codes::kMinima) {
                    const float share = x_scale * float(*starts.at(r, g));
                    sums[r][v] = fma(load(factors + kPanelColumns), splat(share), sums[r][v]);
                }
            }
        }
        for (int p = 0; p < kPanels; ++p) w[p] += kGroupBytes<Codes>;
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) store(c + r * kUnitColumns + (first + v) * kLanes, sums[r][v]);
    }
}

template <int R>
struct RowsOf {
    static constexpr int rows = R;
};

// body(R) as a constant for `rows` of 1 to N.
template <int N, class Body>
OCTAVO_INLINE void with_rows(int64_t rows, const Body& body) {
    if constexpr (N > 1) {
        if (rows < N) return with_rows<N - 1>(rows, body);
    }
    body(RowsOf<N>());
}

// Inputs of a dense product, from one row on.
template <class Word>
struct DenseInputs {
    int64_t bytes, words;  // of a row
    const char* data;

    DenseInputs(const Operand& x, int64_t row)
        : bytes(x.stride * Word::kInputBytes),
          words(x.groups * kGroup * Word::kInputBytes / 4),
          data(static_cast<const char*>(x.data) + row * bytes) {}
};

template <class Word, int V>
void dense_row(const Product& p, float* c, int64_t row, const char* panels, int first) {
    const DenseInputs<Word> x(p.x, row);
    dense_tile<Word, 1, V>(x.data, x.bytes, panels, p.panel_bytes, first, 0, x.words, c, FetchAhead<kAheadOne>());
}

template <class Word, int V>
void dense_unit(const Product& p, float* c, int64_t row, int64_t rows, const char* panels, int first) {
    if (rows == 1) return dense_row<Word, V>(p, c, row, panels, first);
    const DenseInputs<Word> x(p.x, row);
    const int64_t other_tiles = (rows - 1) / kDenseRows;
    const char* next = panels + (panel_of(first + V - 1) + 1) * p.panel_bytes;
    const char* const next_end = next + (panel_of(V - 1) + 1) * p.panel_bytes;
    const int64_t lines = other_tiles ? (V * kLanes * 4 / 64 + other_tiles - 1) / other_tiles : 0;
    const auto tile = [&](int64_t r, int64_t n, int64_t begin, int64_t end, auto fetch) {
        with_rows<kDenseRows>(n, [&](auto count) OCTAVO_LAMBDA {
            dense_tile<Word, decltype(count)::rows, V>(x.data + r * x.bytes, x.bytes, panels, p.panel_bytes, first,
                                                       begin, end, c + r * kUnitColumns, fetch);
        });
    };
    for (int64_t begin = 0; begin < x.words; begin += kSpanWords) {
        const int64_t end = smaller(x.words, begin + kSpanWords);
        tile(0, smaller<int64_t>(kDenseRows, rows), begin, end, FetchAhead<kAheadFew>());
        for (int64_t r = kDenseRows; r < rows; r += kDenseRows) {
            tile(r, smaller<int64_t>(kDenseRows, rows - r), begin, end, FetchNext{next, next_end, lines});
        }
    }
}

template <class Codes, int V>
void grouped_row(const Product& p, float* c, int64_t row, const char* panels, int first) {
    grouped_tile<Codes, 1, V>(p.x, row, panels, p.panel_bytes, first, c, FetchAhead<kAheadOne>());
}

template <class Codes, int V>
void grouped_unit(const Product& p, float* c, int64_t row, int64_t rows, const char* panels, int first) {
    const int64_t other_tiles = (rows - 1) / kGroupRows;
    const char* next = panels + (panel_of(first + V - 1) + 1) * p.panel_bytes;
    const char* const next_end = next + (panel_of(V - 1) + 1) * p.panel_bytes;
    const int64_t group_lines = kGroupBytes<Codes> * V / kPanelVectors / 64;
    const int64_t lines = other_tiles ? (group_lines + other_tiles - 1) / other_tiles : 0;
    const auto tile = [&](int64_t r, auto fetch) {
        with_rows<kGroupRows>(smaller<int64_t>(kGroupRows, rows - r), [&](auto n) OCTAVO_LAMBDA {
            grouped_tile<Codes, decltype(n)::rows, V>(p.x, row + r, panels, p.panel_bytes, first, c + r * kUnitColumns,
                                                      fetch);
        });
    };
    if (rows == 1) return grouped_row<Codes, V>(p, c, row, panels, first);
    tile(0, FetchAhead<kAheadFew>());
    for (int64_t r = kGroupRows; r < rows; r += kGroupRows) tile(r, FetchNext{next, next_end, lines});
}

template <class Word>
void multiply_dense(const Product& p, float* c, int64_t row, int64_t rows, const char* panels, int vectors) {
    int first = 0;
    if constexpr (kRowVectors > kDenseVectors) {
        for (; rows == 1 && first + kRowVectors <= vectors; first += kRowVectors) {
            dense_row<Word, kRowVectors>(p, c, row, panels, first);
        }
    }
    for (; first + kDenseVectors <= vectors; first += kDenseVectors) {
        dense_unit<Word, kDenseVectors>(p, c, row, rows, panels, first);
    }
    for (; first < vectors; first += 2) dense_unit<Word, 2>(p, c, row, rows, panels, first);
}

template <class Codes>
void multiply_groups(const Product& p, float* c, int64_t row, int64_t rows, const char* panels, int vectors) {
    int first = 0;
    if constexpr (kRowVectors > kGroupVectors) {
        for (; rows == 1 && first + kRowVectors <= vectors; first += kRowVectors) {
            grouped_row<Codes, kRowVectors>(p, c, row, panels, first);
        }
    }
    for (; first < vectors; first += kGroupVectors) {
        grouped_unit<Codes, kGroupVectors>(p, c, row, rows, panels, first);
    }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
