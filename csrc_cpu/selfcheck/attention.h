// Attention: against the slow truth, alone and in a batch, whole and in chunks, with one thread and with two.
#pragma once

#include "support.h"

struct Row {
    int queries, length;
};

struct AttentionCase {
    std::string text;
    octavo_attention geometry = {};
    bool sinks = false;
    std::vector<Row> rows;
};

// One sequence a row, its keys and values written to blocks in random places; everything else of the cache is NaN.
class AttentionCheck {
public:
    explicit AttentionCheck(const AttentionCase& c)
        : case_(c),
          g_(c.geometry),
          value_size_(g_.latent ? g_.head_size : g_.value_size),
          cache_(g_.kv_dtype, 0),
          sinks_(size_t(g_.num_heads)) {
        int num_blocks = 3;
        for (const Row& row : c.rows) {
            tables_.emplace_back();
            for (int b = 0; b <= (row.length - 1) / g_.block_size; ++b) tables_.back().push_back(num_blocks++);
        }
        std::vector<int> shuffled;
        for (int b = 3; b < num_blocks; ++b) shuffled.push_back(b);
        std::shuffle(shuffled.begin(), shuffled.end(), generator);
        for (auto& table : tables_) {
            for (int& block : table) block = shuffled[size_t(block - 3)];
        }
        g_.num_blocks = num_blocks;
        cache_ = Buffer(g_.kv_dtype, num_blocks * CALL(octavo_block_elements)(&g_));
        for (float& sink : sinks_) sink = normal();
        for (const Row& row : c.rows) {
            keys_.push_back(random_rows(g_.dtype, row.length, g_.num_kv_heads * g_.head_size));
            values_.push_back(random_rows(g_.dtype, row.length, g_.num_kv_heads * value_size_));
            queries_.push_back(random_rows(g_.dtype, row.queries, g_.num_heads * g_.head_size, 2.0f));
        }
        for (size_t r = 0; r < c.rows.size(); ++r) write(r);
    }

    void run() {
        std::vector<Buffer> together = attend(all_rows(), 1);
        for (size_t r = 0; r < case_.rows.size(); ++r) compare(r, together[r]);
        check(attend(all_rows(), 2) == together, case_.text, "two threads differ from one");
        for (size_t r = 0; r < case_.rows.size(); ++r) {
            const std::string what = case_.text + ", row " + std::to_string(r);
            check(attend({{r, 0, case_.rows[r].queries}}, 2)[0] == together[r], what, "alone differs from in a batch");
            if (case_.rows[r].queries > 1) check_chunks(r, together[r], what);
        }
        if (g_.kv_dtype == OCTAVO_INT8 && std::string(CALL(octavo_isa)()) == "amx") check_vectors(together);
        check(attend({}, 2).empty(), case_.text, "an empty batch");
        cache_.put(0, NAN);
        check(cache_.guarded(), case_.text, "wrote outside of the cache");
    }

private:
    struct Part {
        size_t row;
        int first, count;  // of its query tokens
    };

    std::vector<Part> all_rows() const {
        std::vector<Part> parts;
        for (size_t r = 0; r < case_.rows.size(); ++r) parts.push_back({r, 0, case_.rows[r].queries});
        return parts;
    }

    void write(size_t r) {
        const Row& row = case_.rows[r];
        std::vector<int64_t> slots;
        for (int t = 0; t < row.length; ++t)
            slots.push_back(int64_t(tables_[r][size_t(t / g_.block_size)]) * g_.block_size + t % g_.block_size);
        octavo_attention g = g_;
        g.num_tokens = row.length;
        g.slots = slots.data();
        const int64_t key_stride = g.num_kv_heads * g.head_size + kGap,
                      value_stride = g.num_kv_heads * value_size_ + kGap;
        CALL(octavo_write_kv)
        (&g, cache_.data(), keys_[r].data(), key_stride, g.head_size, values_[r].data(), value_stride, value_size_);
        const Buffer before = cache_;
        slots.assign(slots.size(), -1);
        CALL(octavo_write_kv)(&g, cache_.data(), values_[r].data(), 0, 0, values_[r].data(), 0, 0);
        check(cache_ == before, case_.text, "slot -1 wrote");
    }

    // Outputs of each part, [count][num_heads * value_size] with gaps.
    std::vector<Buffer> attend(const std::vector<Part>& parts, int num_threads) {
        std::vector<int32_t> query_start_loc = {0}, seq_lens, table;
        const size_t stride = 1 + size_t(g_.num_blocks);
        for (const Part& part : parts) {
            const Row& row = case_.rows[part.row];
            query_start_loc.push_back(query_start_loc.back() + part.count);
            seq_lens.push_back(row.length - row.queries + part.first + part.count);
            const auto& blocks = tables_[part.row];
            for (size_t b = 0; b < stride; ++b) table.push_back(b < blocks.size() ? blocks[b] : INT32_MAX);
            // What a window has left behind is gone, what comes after is not there yet.
            const int first = seq_lens.back() - part.count;
            for (int b = 0; g_.window > 0 && b < std::max(0, first + 1 - g_.window) / g_.block_size; ++b)
                table[table.size() - stride + size_t(b)] = INT32_MIN;
        }
        const int64_t tokens = query_start_loc.back(), query_width = g_.num_heads * g_.head_size,
                      out_width = g_.num_heads * g_.value_size;
        Buffer query(g_.dtype, tokens * (query_width + kGap)), out(g_.dtype, tokens * (out_width + kGap));
        for (size_t p = 0; p < parts.size(); ++p) {
            const int64_t stride_in = query_width + kGap;
            query.copy(query_start_loc[p] * stride_in, queries_[parts[p].row], parts[p].first * stride_in,
                       parts[p].count * stride_in);
        }
        std::vector<int64_t> slots(size_t(tokens), -1);
        octavo_attention g = g_;
        g.num_rows = int32_t(parts.size());
        g.num_tokens = int32_t(tokens);
        g.query_start_loc = query_start_loc.data();
        g.seq_lens = seq_lens.data();
        g.block_table = table.data();
        g.block_table_stride = int64_t(stride);
        g.slots = slots.data();
        check(CALL(octavo_check_batch)(&g) == OCTAVO_OK, case_.text, "the batch was refused");
        CALL(octavo_set_num_threads)(num_threads);
        const int status =
            CALL(octavo_attend)(&g, out.data(), out_width + kGap, g.value_size, query.data(), query_width + kGap,
                                g.head_size, cache_.data(), case_.sinks ? sinks_.data() : nullptr);
        check(status == OCTAVO_OK && out.guarded(), case_.text, "failed, or wrote outside of the output");
        std::vector<Buffer> results;
        for (size_t p = 0; p < parts.size(); ++p) {
            results.emplace_back(g.dtype, parts[p].count * out_width);
            for (int t = 0; t < parts[p].count; ++t) {
                const int64_t at = (query_start_loc[p] + t) * (out_width + kGap);
                results.back().copy(t * out_width, out, at, out_width);
                for (int i = 0; i < kGap; ++i)
                    check(out.untouched(at + out_width + i), case_.text, "wrote between rows");
            }
        }
        return results;
    }

    void check_chunks(size_t r, const Buffer& whole, const std::string& what) {
        const int64_t width = g_.num_heads * g_.value_size;
        const int queries = case_.rows[r].queries;
        // One token and the rest, some and then twenty at a time, halves, all and then one as decoding does.
        const int firsts[] = {1, std::min(3, queries), queries / 2, queries - 1}, thens[] = {queries, 20, queries, 1};
        for (int way = 0; way < 4; ++way) {
            Buffer joined(g_.dtype, queries * width);
            for (int first = 0, count = std::max(1, firsts[way]); first < queries; count = thens[way]) {
                count = std::min(count, queries - first);
                joined.copy(first * width, attend({{r, first, count}}, 1)[0], 0, count * width);
                first += count;
            }
            check(joined == whole, what, "chunks differ from the whole");
        }
    }

    // Sums of whole numbers are exact, so tiles have the bits of vectors.
    void check_vectors(const std::vector<Buffer>& on_tiles) {
        CALL(octavo_set_isa)("avx512bf16");
        check(attend(all_rows(), 2) == on_tiles, case_.text, "int8 on vectors differs from tiles");
        CALL(octavo_set_isa)("amx");
    }

    // What the cache makes of x [rows][num_kv_heads * size].
    std::vector<double> stored(const Buffer& x, int64_t rows, int64_t size) const {
        const int64_t stride = g_.num_kv_heads * size + kGap;
        std::vector<double> wide(size_t(rows * stride), NAN);
        Buffer cell(g_.kv_dtype, 1);
        for (int64_t r = 0; r < rows; ++r) {
            for (int64_t head = r * stride; head < r * stride + g_.num_kv_heads * size; head += size) {
                float largest = 0;
                for (int64_t i = head; i < head + size; ++i) largest = std::max(largest, std::fabs(float(x.get(i))));
                const float scale = largest / 127.0f, inverse = 1.0f / scale;
                for (int64_t i = head; i < head + size; ++i) {
                    const auto number = float(x.get(i));
                    if (g_.kv_dtype == OCTAVO_INT8) {
                        wide[size_t(i)] = double(scale) * double(std::nearbyint(number * inverse));
                    } else if (g_.kv_dtype == g_.dtype) {
                        wide[size_t(i)] = x.get(i);
                    } else {
                        cell.put(0, number);
                        wide[size_t(i)] = cell.get(0);
                    }
                }
            }
        }
        return wide;
    }

    // Errors beyond float32's, relative to the weighted sizes of the values: weights rounded to bfloat16; queries to
    // fifteen bits.
    double rounding() const {
        const std::string isa = CALL(octavo_isa)();
        if ((isa != "avx512bf16" && isa != "amx") || g_.latent) return 0;
        if (g_.kv_dtype == OCTAVO_INT8) return 1e-3;
        return g_.kv_dtype == OCTAVO_BFLOAT16 && g_.dtype == OCTAVO_BFLOAT16 ? 0x1p-8 : 0;
    }

    void compare(size_t r, const Buffer& got) {
        const Row& row = case_.rows[r];
        const std::string what = case_.text + ", row " + std::to_string(r);
        const int group = g_.num_heads / g_.num_kv_heads;
        const int64_t key_stride = g_.num_kv_heads * g_.head_size + kGap,
                      value_stride = g_.num_kv_heads * value_size_ + kGap;
        // As the cache holds them.
        const std::vector<double> keys = stored(keys_[r], row.length, g_.head_size);
        const std::vector<double> values = stored(values_[r], row.length, value_size_);
        // Some of many queries, first and last among them: the slow truth is slow.
        const int num_picked = std::min(row.queries, 7);
        for (int i = 0; i < num_picked; ++i) {
            const int t = num_picked == 1 ? 0 : i * (row.queries - 1) / (num_picked - 1);
            const int position = row.length - row.queries + t;
            const int first = g_.window > 0 ? std::max(0, position + 1 - g_.window) : 0;
            for (int h = 0; h < g_.num_heads; ++h) {
                std::vector<double> weights;
                double top = case_.sinks ? double(sinks_[size_t(h)]) : -INFINITY;
                for (int p = first; p <= position; ++p) {
                    double score = 0;
                    for (int d = 0; d < g_.head_size; ++d) {
                        score +=
                            queries_[r].get(t * (int64_t(g_.num_heads) * g_.head_size + kGap) + h * g_.head_size + d) *
                            keys[size_t(p * key_stride + h / group * g_.head_size + d)];
                    }
                    score *= double(g_.scale);
                    if (g_.softcap > 0) score = double(g_.softcap) * std::tanh(score / double(g_.softcap));
                    weights.push_back(score);
                    top = std::max(top, score);
                }
                double total = case_.sinks ? std::exp(double(sinks_[size_t(h)]) - top) : 0;
                for (double& weight : weights) total += weight = std::exp(weight - top);
                for (int d = 0; d < g_.value_size; d += std::max(1, g_.value_size / 19)) {
                    double want = 0, sizes = 0;
                    for (int p = first; p <= position; ++p) {
                        const double value = g_.latent ? keys[size_t(p * key_stride + d)]
                                                       : values[size_t(p * value_stride + h / group * value_size_ + d)];
                        want += weights[size_t(p - first)] / total * value;
                        sizes += weights[size_t(p - first)] / total * std::fabs(value);
                    }
                    check_close(got, (int64_t(t) * g_.num_heads + h) * g_.value_size + d, want, 3, what, "out",
                                rounding() * sizes);
                }
            }
        }
    }

    const AttentionCase& case_;
    octavo_attention g_;
    int value_size_;
    Buffer cache_;
    std::vector<float> sinks_;
    std::vector<std::vector<int>> tables_;
    std::vector<Buffer> keys_, values_, queries_;
};
