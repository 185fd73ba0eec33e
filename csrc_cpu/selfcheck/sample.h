// Drawing tokens: the definition of the op `sample` once more, by sorting everything, against the library bit for bit.
#pragma once

#include <numeric>

#include "support.h"

// Rounded by itself, whatever the compiler would like to fuse.
inline float rounded(float x) {
    const volatile float stored = x;
    return stored;
}

class SampleCheck {
public:
    explicit SampleCheck(int64_t size) : size_(size), what_("sample, " + std::to_string(size)) {}

    void run() {
        for (int kind = 0; kind < kKinds; ++kind) {
            const std::vector<float> row = make(kind);
            Wishes wishes;
            for (int i = 0; i < kWishes; ++i) {
                const int64_t counts[] = {0, 0, 1, 3, 40, size_ / 2, size_ - 1, size_, -1};
                const double heats[] = {1, 0.8, 0.1, 3, 1e-6, 1e-40}, shares[] = {1, 1, 0.95, 0.5, 0.05, 0.9999, 1e-9},
                             least[] = {0, 0, 0.02, 1, 1e-13, 1e-300}, numbers[] = {0, 0.5, 0x1p-53, 1 - 0x1p-53};
                const double drawn = i % 3 ? std::uniform_real_distribution<double>()(generator) : pick(numbers);
                wishes.add(pick(heats), pick(counts), pick(shares), pick(least), drawn);
            }
            check_row(row, wishes, kind);
        }
        refuse();
    }

private:
    static constexpr int kKinds = 9, kWishes = 12;

    struct Wishes {
        std::vector<double> temperature, top_p, min_p, uniform;
        std::vector<int64_t> top_k;

        void add(double t, int64_t k, double p, double m, double u) {
            temperature.push_back(t);
            top_k.push_back(k);
            top_p.push_back(p);
            min_p.push_back(m);
            uniform.push_back(u);
        }
    };

    template <class T, size_t N>
    static T pick(const T (&from)[N]) {
        return from[generator() % N];
    }

    std::vector<float> make(int kind) const {
        std::vector<float> row(static_cast<size_t>(size_));
        for (float& x : row) {
            const float n = normal();
            switch (kind) {
                case 0: x = 3 * n; break;
                case 1: x = 0.01f * n; break;
                case 2: x = std::round(2 * n) / 2; break;
                case 3: x = n < 1 ? -INFINITY : n; break;
                case 4: x = n < 0 ? -0.0f : 0.0f; break;
                case 5: x = n * 1e-40f; break;
                case 6: x = n < 0 ? -3e38f : 3e38f; break;
                case 7: x = 12 * n; break;
                default: x = n; break;
            }
        }
        if (kind == 3) row[generator() % row.size()] = 1;
        if (kind == 8) row[generator() % row.size()] = generator() % 2 ? NAN : INFINITY;
        return row;
    }

    // Rows lie apart, amid values that are no numbers.
    void check_row(const std::vector<float>& row, const Wishes& wishes, int kind) {
        const int64_t stride = size_ + kGap, num = int64_t(wishes.top_k.size());
        Buffer logits(OCTAVO_FLOAT32, 2 * stride);
        for (int64_t i = 0; i < size_; ++i) logits.put(stride + i, row[size_t(i)]);
        const Buffer before = logits;
        const std::vector<int64_t> rows(wishes.top_k.size(), 1);
        std::vector<int64_t> ids(wishes.top_k.size() + 1, -7);
        const int status = CALL(octavo_sample)(
            ids.data(), static_cast<float*>(logits.data()), 2, stride, size_, rows.data(), wishes.temperature.data(),
            wishes.top_k.data(), wishes.top_p.data(), wishes.min_p.data(), wishes.uniform.data(), num);
        check(status == OCTAVO_OK && ids.back() == -7 && logits == before, what_, "failed, or wrote where it must not");
        for (size_t i = 0; i < size_t(num); ++i) {
            const int64_t want = drawn(row, wishes, i);
            ++num_checks;
            if (ids[i] != want) {
                fail(what_, "of kind " + std::to_string(kind) + ": wish " + std::to_string(i) + " gave " +
                                std::to_string(ids[i]) + ", not " + std::to_string(want));
            }
        }
    }

    static int64_t drawn(const std::vector<float>& row, const Wishes& wishes, size_t w) {
        float top = -INFINITY;
        for (const float x : row) {
            if (std::isnan(x)) return -1;
            top = std::max(top, x);
        }
        if (!std::isfinite(top)) return -1;
        const float factor = float(0x1.71547652b82fep0 / std::max(wishes.temperature[w], 1e-30));
        std::vector<float> scores;
        std::vector<int64_t> weights, kept;
        const double least = std::max(1.0, wishes.min_p[w] * 0x1p40);
        for (size_t i = 0; i < row.size(); ++i) {
            scores.push_back(rounded(rounded(row[i] - top) * factor));
            weights.push_back(weight(scores.back()));
            if (double(weights.back()) >= least) kept.push_back(int64_t(i));
        }
        std::stable_sort(kept.begin(), kept.end(),
                         [&](int64_t a, int64_t b) { return scores[size_t(a)] > scores[size_t(b)]; });
        if (wishes.top_k[w] > 0) kept.resize(std::min(kept.size(), size_t(wishes.top_k[w])));
        if (wishes.top_p[w] < 1) {
            int64_t whole = 0, running = 0;
            for (const int64_t id : kept) whole += weights[size_t(id)];
            size_t num = 0;
            do running += weights[size_t(kept[num++])];
            while (less(running, whole, wishes.top_p[w]));
            kept.resize(num);
        }
        std::sort(kept.begin(), kept.end());
        int64_t whole = 0, running = 0;
        for (const int64_t id : kept) whole += weights[size_t(id)];
        for (const int64_t id : kept) {
            running += weights[size_t(id)];
            if (!less(running, whole, wishes.uniform[w]) && !same(running, whole, wishes.uniform[w])) return id;
        }
        return -2;
    }

    static int64_t weight(float score) {
        const float x = std::max(score, -64.0f), n = std::nearbyint(x), f = x - n;
        float p = 0;
        for (const float c : {0x1.5bba14p-10f, 0x1.3cea88p-7f, 0x1.c6b752p-5f, 0x1.ebf9bcp-3f, 0x1.62e42ap-1f, 1.0f}) {
            p = rounded(rounded(p * f) + c);
        }
        return int64_t(std::nearbyint(std::ldexp(double(p), int(n) + 40)));
    }

    __extension__ typedef unsigned __int128 Wide;

    static Wide left(int64_t running) { return Wide(uint64_t(running)) << 53; }
    static Wide right(int64_t whole, double share) { return Wide(uint64_t(whole)) * uint64_t(std::ldexp(share, 53)); }
    static bool less(int64_t running, int64_t whole, double share) { return left(running) < right(whole, share); }
    static bool same(int64_t running, int64_t whole, double share) { return left(running) == right(whole, share); }

    void refuse() {
        const float logit = 0;
        const int64_t row = 1, none = 0;
        const double one = 1, zero = 0;
        int64_t id = -7;
        const auto ask = [&](int64_t size, int64_t num_logits, const double* uniform) {
            return CALL(octavo_sample)(&id, &logit, num_logits, 1, size, &row, &one, &none, &one, &zero, uniform, 1);
        };
        check(ask(1, 1, &zero) == OCTAVO_OUT_OF_RANGE && id == -7, what_, "took a row that is not there");
        check(ask(1, 2, &one) == OCTAVO_OUT_OF_RANGE, what_, "took a random number of 1");
        check(ask(0, 2, &zero) == OCTAVO_OUT_OF_RANGE, what_, "took rows without logits");
        check(ask((int64_t(1) << 22) + 1, 2, &zero) == OCTAVO_OUT_OF_RANGE, what_, "took rows too long");
    }

    int64_t size_;
    std::string what_;
};
