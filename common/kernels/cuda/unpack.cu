// Gather and dequantise: rows of page-split buffers to [n, 512] fp32, whole index pages to [n * 64, 128] fp32.
//
// Layout: rows.cuh. Bits: common/kv/quantise.py. One warp a row. Bytes a row: reads 584 and 8 of its place, writes
// 2048; a key: reads 132, writes 512. A place of -1 gives zeros.
#include "rows.cuh"

// Exact, and without subnormal numbers on the way: CuPy compiles with -ftz=true, whatever it is asked for.
__device__ __forceinline__ float from_e4m3(u32 byte) {
    const u32 size = byte & 0x7fu, sign = (byte & 0x80u) << 24;
    const float small = (float)size * 0.001953125f;  // steps of 2^-9 below 2^-6
    return __uint_as_float(sign | (size < 8u ? __float_as_uint(small) : (size << 20) + (120u << 23)));
}

// 2^(exponent - 127); exponents below 105 are never packed.
__device__ __forceinline__ float power(u32 exponent) { return __uint_as_float(exponent << 23); }

extern "C" __global__ void __launch_bounds__(256)
unpack_rows(const u8* pages, i64 page_count, i64 page_bytes, i64 rows_log2, const i64* places, i64 n, float* out,
            u64* fault) {
    const Pages source = {(u8*)pages, page_bytes, (int)rows_log2};
    const int lane = threadIdx.x & 31;
    const i64 warps = (i64)gridDim.x * (blockDim.x >> 5);
    for (i64 row = (i64)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5); row < n; row += warps) {
        const i64 place = places[row];
        float4* target = (float4*)(out + row * 512);
        const bool bad = place < -1 || place >= page_count << rows_log2;
        if (bad && lane == 0) report(fault, BAD_SOURCE, row, place, page_count << rows_log2);
        if (bad || place < 0) {
#pragma unroll
            for (int j = 0; j < 4; ++j) target[32 * j + lane] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            continue;
        }
        const u8* data = source.data<576>(place);
        u32 words[4];
#pragma unroll
        for (int j = 0; j < 3; ++j) words[j] = *(const u32*)(data + 128 * j + 4 * lane);
        uint2 rope = make_uint2(0u, 0u);
        if (lane < 16) words[3] = *(const u32*)(data + 384 + 4 * lane);
        else rope = *(const uint2*)(data + 448 + 8 * (lane - 16));
        const uint2 scales = *(const uint2*)(source.scale<576, 8>(place));
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (j < 3 || lane < 16) {
                const u32 pair = (j < 2 ? scales.x : scales.y) >> (16 * (j & 1));
                const u32 exponent = (lane < 16 ? pair : pair >> 8) & 0xffu;
                const float scale = power(exponent);
                target[32 * j + lane] = make_float4(from_e4m3(words[j]) * scale, from_e4m3(words[j] >> 8) * scale,
                                                    from_e4m3(words[j] >> 16) * scale, from_e4m3(words[j] >> 24) * scale);
            } else {
                target[32 * j + lane] = make_float4(__uint_as_float(rope.x << 16), __uint_as_float(rope.x & 0xffff0000u),
                                                    __uint_as_float(rope.y << 16), __uint_as_float(rope.y & 0xffff0000u));
            }
        }
    }
}

// Four blocks a multiprocessor are enough; asking for no more keeps the compiler from spilling on sm_100.
extern "C" __global__ void __launch_bounds__(256, 4)
unpack_index_pages(const u8* pages, i64 page_count, i64 page_bytes, i64 rows_log2, const i64* page_ids, i64 n, float* out,
                   u64* fault) {
    const Pages source = {(u8*)pages, page_bytes, (int)rows_log2};
    const int lane = threadIdx.x & 31;
    const i64 warps = (i64)gridDim.x * (blockDim.x >> 5);
    for (i64 key = (i64)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5); key < n << rows_log2; key += warps) {
        const i64 page = page_ids[key >> rows_log2], row = key & ((1 << rows_log2) - 1);
        float4* target = (float4*)(out + key * 128) + lane;
        if (page < 0 || page >= page_count) {
            if (lane == 0) report(fault, BAD_SOURCE, key >> rows_log2, page << rows_log2, page_count << rows_log2);
            *target = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            continue;
        }
        const i64 place = (page << rows_log2) + row;
        const u32 word = *(const u32*)(source.data<128>(place) + 4 * lane);
        const float scale = *(const float*)(source.scale<128, 4>(place));
        *target = make_float4(from_e4m3(word) * scale, from_e4m3(word >> 8) * scale, from_e4m3(word >> 16) * scale,
                              from_e4m3(word >> 24) * scale);
    }
}
