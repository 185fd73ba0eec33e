// Paged attention of one geometry, which the host defines: HQ query and HKV key heads of D dims, BS tokens a block,
// KV_BITS and KV_BFLOAT of what is stored, SINKS, SOFTCAP (0: none).
// A block of a layer is keys [HKV][D][BS], then values [HKV][BS][D]: the scores of a block's tokens lie side by side.
#define GROUP (HQ / HKV)
#define KEYS ((size_t)HKV * D * BS)

#if KV_BITS == 32
typedef float kv_t;
#define LOAD(p) vload8(0, p)
#define STORE(x, p) (*(p) = (x))
#elif KV_BFLOAT
typedef ushort kv_t;
#define LOAD(p) as_float8(convert_uint8(vload8(0, p)) << 16)
#define STORE(x, p) (*(p) = isnan(x) ? 0x7fc0 : (as_uint(x) + 0x7fff + (as_uint(x) >> 16 & 1)) >> 16)
#else
typedef half kv_t;
#define LOAD(p) vload_half8(0, p)
#define STORE(x, p) vstore_half(x, 0, p)
#endif

// One work-item a token and element of [HKV][D].
__kernel void write(__global const float *key, __global const float *value, __global const long *slots,
                    __global kv_t *cache) {
    const size_t e = get_global_id(0), from = get_global_id(1) * HKV * D + e;
    const long slot = slots[get_global_id(1)];
    if (slot < 0) return;
    __global kv_t *block = cache + slot / BS * 2 * KEYS;
    STORE(key[from], block + e * BS + slot % BS);
    STORE(value[from], block + KEYS + (e / D * BS + slot % BS) * D + e % D);
}

// One work-item a token and key head: the query heads of its group share what is loaded. Softmax as it goes, a block
// at a time, so that a token's bits depend on its own position alone.
__kernel void attend(__global const float *query, __global const kv_t *cache, __global const int *tables,
                     const int table_width, __global const int *row_of, __global const int *position_of,
                     const float scale, const int window, __global const float *sinks, __global float *out) {
    const size_t head = get_global_id(0), token = get_global_id(1), at = (token * HKV + head) * GROUP;
    const int last = position_of[token], first = max(last - window + 1, 0);
    __global const int *table = tables + (size_t)row_of[token] * table_width;
    float8 y[GROUP][D / 8];
    float best[GROUP], sum[GROUP];
    for (int g = 0; g < GROUP; g++) {
        best[g] = SINKS ? sinks[head * GROUP + g] : -INFINITY;
        sum[g] = SINKS;
        for (int i = 0; i < D / 8; i++) y[g][i] = 0;
    }
    for (int b = first / BS; b <= last / BS; b++) {
        __global const kv_t *keys = cache + table[b] * 2 * KEYS + head * D * BS, *values = keys + KEYS;
        const int from = max(first - b * BS, 0), to = min(last - b * BS, BS - 1);
        union { float8 by8[BS / 8]; float by1[BS]; } p[GROUP];
        for (int g = 0; g < GROUP; g++)
            for (int i = 0; i < BS / 8; i++) p[g].by8[i] = 0;
        for (int d = 0; d < D; d++)
            for (int i = 0; i < BS / 8; i++) {
                const float8 k = LOAD(keys + d * BS + i * 8);
                for (int g = 0; g < GROUP; g++) p[g].by8[i] += query[(at + g) * D + d] * k;
            }
        for (int g = 0; g < GROUP; g++) {
            float8 top = best[g], total = 0;
            for (int i = 0; i < BS / 8; i++) {
                const int8 j = (int8)(0, 1, 2, 3, 4, 5, 6, 7) + i * 8;
                float8 x = p[g].by8[i] * scale;
                if (SOFTCAP > 0) x = SOFTCAP * tanh(x / SOFTCAP);
                x = select(x, (float8)(-INFINITY), j < from || j > to);  // whatever lies there, NaN included
                p[g].by8[i] = x;
                top = fmax(top, x);
            }
            const float4 top4 = fmax(top.lo, top.hi);
            const float2 top2 = fmax(top4.lo, top4.hi);
            const float top1 = fmax(top2.x, top2.y), kept = exp(best[g] - top1);
            for (int i = 0; i < BS / 8; i++) total += p[g].by8[i] = exp(p[g].by8[i] - top1);
            const float4 total4 = total.lo + total.hi;
            best[g] = top1;
            sum[g] = sum[g] * kept + (total4.x + total4.y) + (total4.z + total4.w);
            for (int i = 0; i < D / 8; i++) y[g][i] *= kept;
        }
        for (int i = 0; i < D / 8; i++)
            for (int j = from; j <= to; j++) {
                const float8 v = LOAD(values + j * D + i * 8);
                for (int g = 0; g < GROUP; g++) y[g][i] += p[g].by1[j] * v;
            }
    }
    for (int g = 0; g < GROUP; g++)
        for (int i = 0; i < D / 8; i++) vstore8(y[g][i] / sum[g], i, out + (at + g) * D);
}

// One work-item a pair of blocks and word: within the device, or between it and buffers in host memory.
__kernel void move(__global const uint *source, __global uint *target, __global const long *pairs) {
    const size_t words = get_global_size(0), word = get_global_id(0), pair = get_global_id(1);
    target[pairs[2 * pair + 1] * words + word] = source[pairs[2 * pair] * words + word];
}
