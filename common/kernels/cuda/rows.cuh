// Rows of page-split buffers, shared by every kernel here (put in front of each by common.kernels.cuda_sources).
//
// A page of P rows (P a power of two) is P * data bytes, then P * scale bytes, then padding up to page_bytes:
//   data(row)  = base + (row >> log2 P) * page_bytes + (row & P-1) * data
//   scale(row) = base + (row >> log2 P) * page_bytes + P * data + (row & P-1) * scale
// Main rows: data 576 (448 e4m3, 64 bf16), scale 8 (7 exponents, 0); index keys: data 128 (e4m3), scale 4 (fp32).
// 576, 128 and every page_bytes are multiples of 16, so data is read and written 16 bytes at a time.
//
// A wrong index or a value that isn't finite is never acted on: its row is left out and the first such fault of
// any launch is kept in `fault` [4]: what, place in its list, value, bound.
//
// All kernel arguments are pointers or 64-bit integers. Pages may be in device or in page-locked host memory.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define FULL_WARP 0xffffffffu

enum Fault { BAD_SOURCE = 1, BAD_TARGET = 2, NOT_FINITE = 3, BAD_SLOT = 4, BAD_ENTRY = 5, BAD_HOST_PAGE = 6, BAD_STATE = 7 };

__device__ __forceinline__ void report(u64* fault, int what, i64 place, i64 value, i64 bound) {
    if (atomicCAS(fault, 0ull, (u64)what) == 0ull) {
        fault[1] = (u64)place;
        fault[2] = (u64)value;
        fault[3] = (u64)bound;
    }
}

struct Pages {
    u8* base;
    i64 page_bytes;
    int rows_log2;

    template <int DATA>
    __device__ __forceinline__ u8* data(i64 row) const {
        return base + (row >> rows_log2) * page_bytes + (row & ((1 << rows_log2) - 1)) * DATA;
    }
    template <int DATA, int SCALE>
    __device__ __forceinline__ u8* scale(i64 row) const {
        return base + (row >> rows_log2) * page_bytes + ((i64)DATA << rows_log2) + (row & ((1 << rows_log2) - 1)) * SCALE;
    }
};

// Reads past L1: a row is read once, and host memory must not push out what is used again.
__device__ __forceinline__ uint4 read16(const void* address) {
#ifdef __CUDA_ARCH__
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address) : "memory");
    return v;
#else
    return *(const uint4*)address;
#endif
}

// One warp copies up to four main rows: lane r < 4 holds row r's places, -1 = none. A row is 36 pieces of 16 bytes
// and one of 8; four rows are 4 * 32 pieces, 16 left over and 4 scales, so a lane has six loads in flight
// before its first store. 584 bytes read and 584 written a row.
__device__ __forceinline__ void copy_four_rows(const Pages& source, i64 source_row, const Pages& target, i64 target_row,
                                               int lane) {
    uint4 head[4], rest;
    uint2 scale;
    i64 from[4], to[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        from[r] = __shfl_sync(FULL_WARP, source_row, r);
        to[r] = __shfl_sync(FULL_WARP, target_row, r);
    }
    i64 rest_from = __shfl_sync(FULL_WARP, source_row, (lane >> 2) & 3);
    i64 rest_to = __shfl_sync(FULL_WARP, target_row, (lane >> 2) & 3);
    i64 scale_from = __shfl_sync(FULL_WARP, source_row, lane & 3);
    i64 scale_to = __shfl_sync(FULL_WARP, target_row, lane & 3);
    bool has_rest = lane < 16 && rest_from >= 0;
    bool has_scale = lane >= 16 && lane < 20 && scale_from >= 0;
    int piece = 32 + (lane & 3);
#pragma unroll
    for (int r = 0; r < 4; ++r)
        if (from[r] >= 0) head[r] = read16(source.data<576>(from[r]) + 16 * lane);
    if (has_rest) rest = read16(source.data<576>(rest_from) + 16 * piece);
    if (has_scale) scale = *(const uint2*)(source.scale<576, 8>(scale_from));
#pragma unroll
    for (int r = 0; r < 4; ++r)
        if (from[r] >= 0) *(uint4*)(target.data<576>(to[r]) + 16 * lane) = head[r];
    if (has_rest) *(uint4*)(target.data<576>(rest_to) + 16 * piece) = rest;
    if (has_scale) *(uint2*)(target.scale<576, 8>(scale_to)) = scale;
}

// The same for index keys: four keys are 32 pieces of 16 bytes and four fp32 scales.
__device__ __forceinline__ void copy_four_keys(const Pages& source, i64 source_row, const Pages& target, i64 target_row,
                                               int lane) {
    i64 from = __shfl_sync(FULL_WARP, source_row, lane >> 3);
    i64 to = __shfl_sync(FULL_WARP, target_row, lane >> 3);
    if (from >= 0) *(uint4*)(target.data<128>(to) + 16 * (lane & 7)) = read16(source.data<128>(from) + 16 * (lane & 7));
    if (lane < 4 && source_row >= 0)
        *(u32*)(target.scale<128, 4>(target_row)) = *(const u32*)(source.scale<128, 4>(source_row));
}
