#include "linear.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>

#include "isa.h"
#include "pack.h"
#include "pool.h"

namespace octavo {
namespace {

// Below so many elements, or multiply-adds, a second thread is not worth waking.
constexpr int64_t kGrainElements = 8 * 1024;
constexpr int64_t kGrainProducts = 64 * 1024;
constexpr int64_t kFewRows = 4;         // up to so many, reading the weights is all that counts
constexpr int64_t kTileRowsAlign = 12;  // a multiple of every tile's rows
static_assert(kUnitRows % kTileRowsAlign == 0);
constexpr int64_t kBandBytes = 1 << 20;  // of inputs, half of the second cache of the processors that have tiles

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

int64_t element_bytes(int format) {
    return format == OCTAVO_FORMAT_FLOAT32 ? 4 : format == OCTAVO_FORMAT_BFLOAT16 ? 2 : 1;
}

// Rows whose length is a multiple of a page would fall into the same few lines of the first cache.
int64_t operand_stride(int64_t size, int format) {
    const int64_t bytes = round_up(round_up(size, kGroup) * element_bytes(format), 64);
    return (bytes % 1024 ? bytes : bytes + 64) / element_bytes(format);
}

// Rows a range: as many ranges as are worth handing out, and of equal length.
int64_t rows_for(int64_t rows, int64_t elements) {
    const int64_t ranges = std::clamp<int64_t>(rows * elements / kGrainElements, 1, 8 * num_threads());
    return std::max<int64_t>(1, (rows + ranges - 1) / ranges);
}

// How rows are cut into units: how many a unit has at most, and what its rows are a multiple of.
struct RowCut {
    int64_t most, multiple;
    bool bands;  // whether weights serve several units of rows one right after another
};
RowCut row_cut(const Kernels& k, int format) {
    if (k.tiled && format != OCTAVO_FORMAT_FLOAT32) return {kTiledUnitRows, kTwoTiles, true};
    return {kUnitRows, kTileRowsAlign, false};
}

// unit(i, memory for its results) for each of `count`, of so many products each. False where there is no memory.
template <class Unit>
bool run_units(int64_t count, int64_t products, const Unit& unit) {
    const int64_t grain = std::max<int64_t>(1, kGrainProducts / std::max<int64_t>(1, products));
    std::atomic<bool> starved{false};
    parallel_for(count, grain, [&](int64_t begin, int64_t end) {
        auto* scratch = static_cast<float*>(thread_scratch(size_t(kMostUnitRows * kUnitColumns) * sizeof(float)));
        if (scratch == nullptr) {
            starved.store(true, std::memory_order_relaxed);
            return;
        }
        for (int64_t i = begin; i < end; ++i) unit(i, scratch);
    });
    return !starved.load(std::memory_order_relaxed);
}

}  // namespace

int operand_format(const octavo_matrix& weight) { return std::min<int>(weight.format, OCTAVO_FORMAT_INT8); }

int64_t operand_bytes(int64_t rows, int64_t size, int format) {
    const int64_t groups = round_up(size, kGroup) / kGroup;
    const int64_t factors = format == OCTAVO_FORMAT_INT8 ? 2 * round_up(rows * groups * 4, 64) : 0;
    return round_up(rows * operand_stride(size, format) * element_bytes(format), 64) + factors;
}

Operand make_operand(void* memory, int64_t rows, const octavo_matrix& weight) {
    const int format = operand_format(weight);
    const int64_t groups = padded_cols(weight) / kGroup, stride = operand_stride(weight.cols, format);
    const int factor = weight.format == OCTAVO_FORMAT_INT8 ? -128 : weight.format == OCTAVO_FORMAT_INT4 ? -8 : 1;
    Operand x = {memory, stride, nullptr, nullptr, groups, format, factor};
    if (format == OCTAVO_FORMAT_INT8) {
        char* after = static_cast<char*>(memory) + round_up(rows * stride, 64);
        x.scales = reinterpret_cast<float*>(after);
        x.starts = reinterpret_cast<int32_t*>(after + round_up(rows * groups * 4, 64));
    }
    return x;
}

Operand rows_from(const Operand& x, int64_t row) {
    Operand from = x;
    from.data = static_cast<char*>(x.data) + row * x.stride * element_bytes(x.format);
    if (x.scales) {
        from.scales += row * x.groups;
        from.starts += row * x.groups;
    }
    return from;
}

bool multiply(Product& p) {
    const Kernels& k = *kernels();
    p.panel_bytes = panel_bytes(p.weight);
    const int64_t panels = num_panels(p.weight), cols = padded_cols(p.weight);
    const RowCut cut = row_cut(k, p.weight.format);
    const int64_t blocks = (p.num_rows + cut.most - 1) / cut.most;
    const int64_t block_rows = round_up((p.num_rows + blocks - 1) / blocks, cut.multiple);
    // Units of two panels use each input twice. Where there are few, every thread gets as many panels, so that the
    // last of its units may be of one. Gate and up stay together, and so do the pairs that share a best result.
    const bool paired = p.weight.gated || p.finish == kBest;
    const int64_t threads = blocks == 1 ? num_threads() : 1;
    const int64_t part_panels = round_up((panels + threads - 1) / threads, paired ? 2 : 1);
    const int64_t width = p.num_rows > kFewRows || paired ? 2 : 1;
    const int64_t part_units = (part_panels + width - 1) / width, units = part_units * threads;
    p.num_units = (panels + 1) / 2;
    const int64_t products = std::min(block_rows, p.num_rows) * cols * width * kPanelColumns;
    // A band is blocks of rows whose inputs stay in the second cache while all weights pass by, a unit's at a time.
    const int64_t fitting = cut.bands ? std::clamp<int64_t>(kBandBytes / (block_rows * cols * 2), 1, blocks) : 1;
    const int64_t bands = (blocks + fitting - 1) / fitting, band_blocks = (blocks + bands - 1) / bands;
    return run_units(bands * units * band_blocks, products, [&](int64_t i, float* scratch) {
        const int64_t unit = i / band_blocks % units, block = i / (band_blocks * units) * band_blocks + i % band_blocks;
        const int64_t row = block * block_rows, part = unit / part_units;
        const int64_t panel = part * part_panels + unit % part_units * width;
        const int64_t last = std::min(panels, (part + 1) * part_panels);
        if (row >= p.num_rows || panel >= last) return;
        k.product(p, scratch, row, std::min(block_rows, p.num_rows - row), panel, int(std::min(width, last - panel)));
    });
}

bool multiply_each(Product& p, const std::vector<Segment>& segments) {
    if (segments.empty()) return true;
    const auto kernel = kernels()->product;
    const octavo_matrix& first = segments[0].weight;
    p.panel_bytes = panel_bytes(first);
    const int64_t panels = num_panels(first), units = (panels + 1) / 2;
    struct Block {
        const Segment* segment;
        int64_t row, rows;
    };
    std::vector<Block> blocks;
    for (const Segment& segment : segments) {
        for (int64_t row = segment.begin; row < segment.end; row += kUnitRows) {
            blocks.push_back({&segment, row, std::min<int64_t>(kUnitRows, segment.end - row)});
        }
    }
    const int64_t products = blocks[0].rows * padded_cols(first) * kUnitColumns;
    return run_units(int64_t(blocks.size()) * units, products, [&](int64_t i, float* scratch) {
        const Block& block = blocks[size_t(i / units)];
        const int64_t panel = i % units * 2;
        Product own = p;
        own.weight = block.segment->weight;
        if (block.segment->out) own.out = block.segment->out - block.segment->begin * p.out_stride;
        kernel(own, scratch, block.row, block.rows, panel, int(std::min<int64_t>(2, panels - panel)));
    });
}

void prepare(const Prepare& p, int64_t num_rows) {
    const auto kernel = kernels()->prepare;
    parallel_for(num_rows, rows_for(num_rows, p.hidden), [&](int64_t begin, int64_t end) { kernel(p, begin, end); });
}

void convert(const Convert& p, int64_t num_rows) {
    const auto kernel = kernels()->convert;
    parallel_for(num_rows, rows_for(num_rows, p.size), [&](int64_t begin, int64_t end) { kernel(p, begin, end); });
}

void gather(const Operand& from, const int32_t* rows, int64_t num_rows, const Operand& to) {
    const int64_t bytes = from.stride * element_bytes(from.format), groups = from.groups;
    parallel_for(num_rows, rows_for(num_rows, from.stride), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            std::memcpy(static_cast<char*>(to.data) + i * bytes, static_cast<const char*>(from.data) + rows[i] * bytes,
                        size_t(bytes));
            if (!from.scales) continue;
            std::copy_n(from.scales + rows[i] * groups, groups, to.scales + i * groups);
            std::copy_n(from.starts + rows[i] * groups, groups, to.starts + i * groups);
        }
    });
}

}  // namespace octavo

using namespace octavo;

extern "C" int octavo_linear(void* out, const octavo_matrix* m, const void* x, int64_t n, int64_t x_stride, int dtype) {
    if (dtype != OCTAVO_FLOAT32 && dtype != OCTAVO_BFLOAT16) return OCTAVO_BAD_DTYPE;
    if (panel_bytes(*m) == 0 || n < 0 || m->gated) return OCTAVO_OUT_OF_RANGE;
    if (n == 0) return OCTAVO_OK;
    static thread_local struct Buffer {
        void* memory = nullptr;
        int64_t bytes = 0;
        ~Buffer() { std::free(memory); }
    } buffer;
    const int format = operand_format(*m);
    Product p = {};
    p.weight = *m;
    p.num_rows = n;
    p.finish = dtype == OCTAVO_BFLOAT16 ? kStoreBf16 : kStore;
    p.out = out;
    p.out_stride = m->rows;
    if (format == dtype && m->cols % kGroup == 0) {  // as it lies
        p.x = {const_cast<void*>(x), x_stride, nullptr, nullptr, m->cols / kGroup, format, 1};
    } else {
        const int64_t bytes = operand_bytes(n, m->cols, format);
        if (bytes > buffer.bytes) {
            std::free(buffer.memory);
            buffer.memory = std::aligned_alloc(64, size_t(round_up(bytes, 4096)));
            buffer.bytes = buffer.memory ? bytes : 0;
            if (!buffer.memory) return OCTAVO_NO_MEMORY;
        }
        p.x = make_operand(buffer.memory, n, *m);
        convert({x, x_stride, m->cols, dtype, p.x}, n);
    }
    return multiply(p) ? OCTAVO_OK : OCTAVO_NO_MEMORY;
}
