// What one instruction set offers: a table of range functions, and the arguments that they share.
//
// Kernels are compiled once an instruction set in a namespace of its own. They use no inline function of another
// namespace and no standard template: the linker keeps one copy of such a function, perhaps the one that this
// processor cannot run.
#pragma once

#include <cstdint>

#include "../include/octavo_cpu.h"

namespace octavo {

struct Norm {
    void* out;
    const void* x;
    void* residual;  // fused_add_rms_norm only
    const void* weight;
    const void* bias;
    int64_t inner_rows;  // rows stand at (row / inner_rows) * outer_stride + (row % inner_rows) * inner_stride
    int64_t outer_stride, inner_stride, residual_stride, hidden;
    float eps, weight_offset;
    int dtype, weight_dtype;
};

struct Rotary {
    void* tensors[2];  // query, key
    int64_t num_heads[2], token_stride[2], head_stride[2];
    const int64_t* positions;
    const float* cos_sin;
    int64_t rotary_dim;
    bool interleaved;
    int dtype;
};

struct Activate {
    void* out;
    const void* x;
    int64_t width;     // act_and_mul
    int64_t x_stride;  // act_and_mul
    int activation, dtype;
};

struct WriteKv {
    const octavo_attention* geometry;
    void* cache;
    const void* key;
    const void* value;
    int64_t key_token_stride, key_head_stride, value_token_stride, value_head_stride;
};

constexpr int kChunk = 128;    // KV positions reduced as one; chunks lie at multiples of it
constexpr int kTileRows = 48;  // query rows (token, head) of a tile at most
constexpr int kValueAlign = 16;

// Query rows that share one KV head: num_tokens tokens by num_heads heads.
struct Tile {
    int row;  // of the batch
    int kv_head, first_head, num_heads;
    int first_token, num_tokens;  // within the row
    int first_chunk, num_chunks;
};

// One chunk of one tile; its sums go to partials + offset, [rows][value stride + 2].
struct Piece {
    int tile, chunk;
    int64_t offset;
};

struct Attend {
    const octavo_attention* geometry;
    const void* cache;
    const void* query;
    void* out;
    const float* sinks;
    int64_t query_token_stride, query_head_stride, out_token_stride, out_head_stride;
    const Tile* tiles;
    const Piece* pieces;          // where the KV is split among threads, else null
    const int64_t* first_pieces;  // of each tile
    float* partials;
};

constexpr int kPanelColumns = 32;                  // outputs of a packed panel
constexpr int kGroup = 32;                         // inputs that share a scale
constexpr int kUnitColumns = 2 * kPanelColumns;    // outputs of a unit of work at most
constexpr int kUnitRows = 120;                     // rows of a unit at most: a multiple of every tile's rows
constexpr int kTwoTiles = 32;                      // rows of two tiles of AMX, which share weights
constexpr int kTiledUnitRows = 4 * kTwoTiles;      // rows of a unit at most, where tiles multiply
constexpr int kMostUnitRows = kTiledUnitRows;      // of either
static_assert(kMostUnitRows >= kUnitRows);

// Rows of inputs as a product reads them: float, bfloat16, or int8 codes with a scale a group. Rows are padded with
// zeros to whole groups.
struct Operand {
    void* data;       // [rows][stride]
    int64_t stride;   // in elements
    float* scales;    // [rows][groups], of codes only
    int32_t* starts;  // [rows][groups]: the sum of a group's codes times start_factor
    int64_t groups;   // of a row
    int format;       // OCTAVO_FORMAT_FLOAT32, _BFLOAT16 or _INT8
    int start_factor; // minus the weights' offset, so that products of codes start there; 1 where weights have minima
};

// What becomes of a product's results.
enum Finish {
    kStore,       // out = value
    kAdd,         // out += scale * value
    kOperand,     // the inputs of the next product: activation(value), or activation(gate) * value
    kBest,        // the largest logit of a unit and its id
    kStoreBf16,   // out = value, in bfloat16
    kStoreLogits  // out = the logit
};

struct Product {
    Operand x;
    octavo_matrix weight;
    int64_t num_rows;
    int64_t panel_bytes;
    int finish;
    void* out;  // float, or bfloat16
    int64_t out_stride;
    float scale;            // kAdd; of logits
    float softcap;          // of logits, 0: none
    Operand to;             // kOperand
    int activation;         // kOperand; -1: none
    float* best_values;     // kBest: [rows][units]
    int32_t* best_ids;
    int64_t num_units;
};

// Rows of floats to an operand, through a norm.
struct Prepare {
    const float* x;
    int64_t x_stride, hidden;
    octavo_norm norm;
    Operand to;    // or
    float* out;    // [rows][hidden], then += scale * norm where `add`
    int64_t out_stride;
    bool add;
    float scale;
};

// Rows of a dtype to an operand.
struct Convert {
    const void* x;
    int64_t x_stride, size;
    int dtype;
    Operand to;
};

// Queries, keys and values of a token as the product gave them: clipped, normed, rotated, in the dtype of attention.
struct Rotate {
    const float* qkv;
    void* out;
    int64_t stride;  // of both
    const octavo_layer* layer;
    const int64_t* positions;
    int num_heads, num_kv_heads, head_size, dtype;
};

constexpr int kSampleBlock = 64;  // logits whose weights are summed as one
constexpr int kSampleSlack = 16;  // elements that a vector may reach beyond the last

// A row of logits, and how its scores are made: (logit - top) * factor.
struct LogitRow {
    const float* data;
    const float* tops;  // of each block
    int64_t size;
    float top, factor;
    int64_t least;  // what weighs less counts for nothing
};

struct Kernels {
    const char* name;
    bool tiled;  // products of bfloat16, and those of codes for many rows, run on the tiles of AMX
    // One unit of a product: rows [row, row + rows), outputs of panels [panel, panel + panels).
    void (*product)(const Product&, float* scratch, int64_t row, int64_t rows, int64_t panel, int panels);
    void (*prepare)(const Prepare&, int64_t begin, int64_t end);  // rows
    void (*convert)(const Convert&, int64_t begin, int64_t end);  // rows
    void (*rotate)(const Rotate&, int64_t begin, int64_t end);    // tokens
    void (*unpack)(float* out, const octavo_matrix&, int64_t panel_bytes, const int64_t* ids, int64_t begin,
                   int64_t end);  // rows of a matrix
    uint32_t (*probe_read)(const void* memory, int64_t bytes);
    int64_t (*probe_products)(int format, int64_t rounds, float* kept);
    void (*rms_norm)(const Norm&, int64_t begin, int64_t end);            // rows
    void (*fused_add_rms_norm)(const Norm&, int64_t begin, int64_t end);  // rows
    void (*layer_norm)(const Norm&, int64_t begin, int64_t end);          // rows
    void (*rotary_embedding)(const Rotary&, int64_t begin, int64_t end);  // tokens
    void (*activation)(const Activate&, int64_t begin, int64_t end);      // elements
    void (*act_and_mul)(const Activate&, int64_t begin, int64_t end);     // rows
    void (*write_kv)(const WriteKv&, int64_t begin, int64_t end);         // tokens
    // The three steps of attention work in `scratch`, of `attend_scratch` floats.
    int64_t (*attend_scratch)(const octavo_attention&);
    void (*attend_tiles)(const Attend&, float* scratch, int64_t begin, int64_t end);   // whole tiles
    void (*attend_pieces)(const Attend&, float* scratch, int64_t begin, int64_t end);  // chunks of tiles
    void (*fold_tiles)(const Attend&, float* scratch, int64_t begin, int64_t end);     // tiles, from their pieces
    float (*survey_row)(const float* row, int64_t size, float* tops);
    int64_t (*weigh_row)(const LogitRow&, int64_t* sums);
    int64_t (*gather_row)(const LogitRow&, int64_t begin, int64_t end, float lowest, float* scores, int32_t* ids);
    void (*weigh_scores)(const float* scores, int64_t count, int64_t least, int64_t* weights);
    // Frees what a thread holds of the processor (tiles), when no call is to follow soon.
    void (*leave)();
};

namespace base {
extern const Kernels kernels;
}
#ifdef OCTAVO_X86
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
namespace avx512bf16 {
extern const Kernels kernels;
}
#ifdef OCTAVO_AMX
namespace amx {
extern const Kernels kernels;
}
#endif
#endif
#ifdef OCTAVO_ARM64
namespace dotprod {
extern const Kernels kernels;
}
namespace bf16 {
extern const Kernels kernels;
}
#endif

}  // namespace octavo
