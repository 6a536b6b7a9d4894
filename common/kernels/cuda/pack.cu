// Quantise and pack: rows [n, 512] or index keys [n, 128], fp32 or bf16, into page-split buffers.
//
// Layout: rows.cuh. Bits: common/kv/quantise.py, which is the definition; both do the same fp32 roundings in the
// same order, so results are equal byte for byte. One warp a row; lane l holds values 4l ... 4l+3 of every 128.
// A place of -1 leaves its row out. Bytes a row: reads 2048 (fp32) or 1024 (bf16) and 8 of its place, writes 584. A key: 512 or 256 and 8; 132.
#include "rows.cuh"

// Two fp32 values rounded to bf16, the first in the low half.
__device__ __forceinline__ u32 two_bf16(float low, float high) {
#ifdef __CUDA_ARCH__
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
#else
    u32 half[2] = {__float_as_uint(low), __float_as_uint(high)};
    for (u32& bits : half)
        bits = (bits & 0x7f800000u) == 0x7f800000u ? bits >> 16 | 0x40u * !!(bits & 0x7fffffu)
                                                  : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return half[0] | half[1] << 16;
#endif
}

// e4m3fn to nearest even, the first in the low byte; no NaN.
__device__ __forceinline__ u32 two_e4m3(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    unsigned short both;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
    return both;
#else
    u32 byte[2];
    const float values[2] = {low, high};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 bits = __float_as_uint(fminf(fmaxf(values[i], -448.0f), 448.0f));
        const u32 sign = (bits >> 24) & 0x80u, size = bits & 0x7fffffffu;
        if (size < 0x3c800000u)  // below 2^-6: steps of 2^-9, which is what adding 2^14 rounds to
            byte[i] = sign | (__float_as_uint(__uint_as_float(size) + 16384.0f) - 0x46800000u);
        else
            byte[i] = sign | (((size + 0x7ffffu + ((size >> 20) & 1u)) >> 20) - 960u);
    }
    return byte[0] | byte[1] << 8;
#endif
}

__device__ __forceinline__ u32 four_e4m3(float a, float b, float c, float d) {
    return two_e4m3(a, b) | two_e4m3(c, d) << 16;
}

__device__ __forceinline__ bool finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

__device__ __forceinline__ float low_half(u32 both) { return __uint_as_float(both << 16); }
__device__ __forceinline__ float high_half(u32 both) { return __uint_as_float(both & 0xffff0000u); }

__device__ __forceinline__ u32 larger_halves(u32 a, u32 b) {
#ifdef __CUDA_ARCH__
    return __vmaxu2(a, b);
#else
    const u32 low = (a & 0xffffu) > (b & 0xffffu) ? a & 0xffffu : b & 0xffffu;
    return (a >> 16 > b >> 16 ? a >> 16 : b >> 16) << 16 | low;
#endif
}

// Four values as two pairs of bf16.
__device__ __forceinline__ uint2 load_four_bf16(const void* values, i64 at, i64 is_bf16) {
    if (is_bf16) return *(const uint2*)((const unsigned short*)values + at);
    const float4 raw = *(const float4*)((const float*)values + at);
    uint2 pairs;
    pairs.x = two_bf16(raw.x, raw.y);
    pairs.y = two_bf16(raw.z, raw.w);
    return pairs;
}

__device__ __forceinline__ void load_four(float* v, const void* values, i64 at, i64 is_bf16) {
    if (is_bf16) {
        uint2 raw = *(const uint2*)((const unsigned short*)values + at);
        v[0] = __uint_as_float(raw.x << 16);
        v[1] = __uint_as_float(raw.x & 0xffff0000u);
        v[2] = __uint_as_float(raw.y << 16);
        v[3] = __uint_as_float(raw.y & 0xffff0000u);
    } else {
        float4 raw = *(const float4*)((const float*)values + at);
        v[0] = raw.x;
        v[1] = raw.y;
        v[2] = raw.z;
        v[3] = raw.w;
    }
}

extern "C" __global__ void __launch_bounds__(256)
pack_rows(const void* values, i64 is_bf16, i64 n, const i64* places, u8* pages, i64 page_count, i64 page_bytes,
          i64 rows_log2, u64* fault) {
    const Pages target = {pages, page_bytes, (int)rows_log2};
    const int lane = threadIdx.x & 31;
    const i64 warps = (i64)gridDim.x * (blockDim.x >> 5);
    for (i64 row = (i64)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5); row < n; row += warps) {
        const i64 place = places[row];
        if (place == -1) continue;
        uint2 v[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) v[j] = load_four_bf16(values, row * 512 + 128 * j + 4 * lane, is_bf16);
        // Largest magnitude as bf16 bits, which order like the numbers, NaN above all; two blocks of 64 in one word.
        u32 largest[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            u32 one[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const u32 both = larger_halves(v[2 * i + j].x & 0x7fff7fffu, v[2 * i + j].y & 0x7fff7fffu);
                one[j] = both >> 16 > (both & 0xffffu) ? both >> 16 : both & 0xffffu;
            }
            largest[i] = one[0] | one[1] << 16;
#pragma unroll
            for (int step = 8; step; step >>= 1)
                largest[i] = larger_halves(largest[i], __shfl_xor_sync(FULL_WARP, largest[i], step));
        }
        const u32 most = larger_halves(largest[0], largest[1]);
        if (!__all_sync(FULL_WARP, (most & 0xffffu) < 0x7f80u && most >> 16 < 0x7f80u)) {
            if (lane == 0) report(fault, NOT_FINITE, row, row, n);
            continue;
        }
        if (place < 0 || place >= page_count << rows_log2) {
            if (lane == 0) report(fault, BAD_TARGET, row, place, page_count << rows_log2);
            continue;
        }
        u8* data = target.data<576>(place);
        u32 exponents[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            // Values 128 j + 4 lane are of block 2 j + lane / 16; the last half is the rope part.
            if (j < 3 || lane < 16) {
                // fp32's exponent of amax / 448, one more unless that is a power of two: 448 is 1.75 * 2^8, so by the
                // bf16 bits of amax it is its exponent - 8, one more above a mantissa of 1.75; 105 at 1e-4 and below.
                const u32 bits = largest[j >> 1] >> (16 * (j & 1)) & 0xffffu;
                const int byte = (int)(bits >> 7) - 8 + ((bits & 127u) > 96u);
                exponents[j] = byte > 105 ? byte : 105;
                const float factor = __uint_as_float((254u - exponents[j]) << 23);
                *(u32*)(data + 128 * j + 4 * lane) = four_e4m3(low_half(v[j].x) * factor, high_half(v[j].x) * factor,
                                                               low_half(v[j].y) * factor, high_half(v[j].y) * factor);
            } else {
                *(uint2*)(data + 448 + 8 * (lane - 16)) = v[j];
                exponents[j] = 0;
            }
        }
        const u32 low = exponents[0] | exponents[1] << 16, high = exponents[2] | exponents[3] << 16;
        uint2 scales;
        scales.x = low | __shfl_xor_sync(FULL_WARP, low, 16) << 8;
        scales.y = high | __shfl_xor_sync(FULL_WARP, high, 16) << 8;
        if (lane == 0) *(uint2*)(target.scale<576, 8>(place)) = scales;
    }
}

extern "C" __global__ void __launch_bounds__(256)
pack_index_keys(const void* values, i64 is_bf16, i64 n, const i64* places, u8* pages, i64 page_count, i64 page_bytes,
                i64 rows_log2, u64* fault) {
    const Pages target = {pages, page_bytes, (int)rows_log2};
    const int lane = threadIdx.x & 31;
    const i64 warps = (i64)gridDim.x * (blockDim.x >> 5);
    for (i64 key = (i64)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5); key < n; key += warps) {
        const i64 place = places[key];
        if (place == -1) continue;
        float v[4];
        load_four(v, values, key * 128 + 4 * lane, is_bf16);
        if (!__all_sync(FULL_WARP, finite(v[0]) && finite(v[1]) && finite(v[2]) && finite(v[3]))) {
            if (lane == 0) report(fault, NOT_FINITE, key, key, n);
            continue;
        }
        if (place < 0 || place >= page_count << rows_log2) {
            if (lane == 0) report(fault, BAD_TARGET, key, place, page_count << rows_log2);
            continue;
        }
        // Hadamard: rounds of sums and differences at distance 1, 2 (inside a lane), 4 ... 64 (between lanes).
        float a = v[0] + v[1], b = v[0] - v[1], c = v[2] + v[3], d = v[2] - v[3];
        v[0] = a + c;
        v[1] = b + d;
        v[2] = a - c;
        v[3] = b - d;
#pragma unroll
        for (int step = 1; step < 32; step <<= 1)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float other = __shfl_xor_sync(FULL_WARP, v[i], step);
                v[i] = lane & step ? other - v[i] : v[i] + other;
            }
        float largest = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            v[i] *= 0.08838834764831845f;  // 128^-0.5
            largest = fmaxf(largest, fabsf(v[i]));
        }
#pragma unroll
        for (int step = 16; step; step >>= 1) largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, step));
        const float scale = fmaxf(largest, 1e-4f) / 448.0f;
        *(u32*)(target.data<128>(place) + 4 * lane) =
            four_e4m3(v[0] / scale, v[1] / scale, v[2] / scale, v[3] / scale);
        if (lane == 0) *(float*)(target.scale<128, 4>(place)) = scale;
    }
}
