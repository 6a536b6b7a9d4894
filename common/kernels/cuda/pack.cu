// Quantise and pack: rows [n, 512] or index keys [n, 128], fp32 or bf16, into page-split buffers.
//
// Layout: rows.cuh. Bits: common/kv/quantise.py, which is the definition; both do the same fp32 roundings in the
// same order, so results are equal byte for byte. One warp a row; lane l holds values 4l ... 4l+3 of every 128.
// A place of -1 leaves its row out. Bytes a row: reads 2048 (fp32) or 1024 (bf16) and 8 of its place, writes 584. A key: 512 or 256 and 8; 132.
#include "rows.cuh"

__device__ __forceinline__ u32 bf16_bits(float x) {
    u32 bits = __float_as_uint(x);
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

// e4m3fn of |x| <= 448, to nearest even.
__device__ __forceinline__ u32 e4m3_bits(float x) {
    u32 bits = __float_as_uint(x), sign = (bits >> 24) & 0x80u, size = bits & 0x7fffffffu;
    if (size < 0x3c800000u)  // below 2^-6: steps of 2^-9, which is what adding 2^14 rounds to
        return sign | (__float_as_uint(__uint_as_float(size) + 16384.0f) - 0x46800000u);
    return sign | (((size + 0x7ffffu + ((size >> 20) & 1u)) >> 20) - 960u);
}

__device__ __forceinline__ bool finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

__device__ __forceinline__ float limit(float x) { return fminf(fmaxf(x, -448.0f), 448.0f); }

__device__ __forceinline__ u32 four_e4m3(const float* v, float factor) {
    u32 word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) word |= e4m3_bits(limit(v[i] * factor)) << (8 * i);
    return word;
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
        float v[4][4];
#pragma unroll
        for (int j = 0; j < 4; ++j) load_four(v[j], values, row * 512 + 128 * j + 4 * lane, is_bf16);
        bool good = true;
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                v[j][i] = finite(v[j][i]) ? __uint_as_float(bf16_bits(v[j][i]) << 16) : v[j][i];
                good = good && finite(v[j][i]);
            }
        if (!__all_sync(FULL_WARP, good)) {
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
            float largest = fmaxf(fmaxf(fabsf(v[j][0]), fabsf(v[j][1])), fmaxf(fabsf(v[j][2]), fabsf(v[j][3])));
#pragma unroll
            for (int step = 8; step; step >>= 1) largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, step));
            const u32 bits = __float_as_uint(fmaxf(largest, 1e-4f) / 448.0f);
            exponents[j] = (bits >> 23) + ((bits & 0x7fffffu) != 0);
            if (j < 3 || lane < 16) {
                *(u32*)(data + 128 * j + 4 * lane) = four_e4m3(v[j], __uint_as_float((254u - exponents[j]) << 23));
            } else {
                uint2 rope;
                rope.x = (__float_as_uint(v[j][0]) >> 16) | (__float_as_uint(v[j][1]) & 0xffff0000u);
                rope.y = (__float_as_uint(v[j][2]) >> 16) | (__float_as_uint(v[j][3]) & 0xffff0000u);
                *(uint2*)(data + 448 + 8 * (lane - 16)) = rope;
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
        u32 word = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) word |= e4m3_bits(limit(v[i] / scale)) << (8 * i);
        *(u32*)(target.data<128>(place) + 4 * lane) = word;
        if (lane == 0) *(float*)(target.scale<128, 4>(place)) = scale;
    }
}
