// transfer_cache_dsv4_mla: rows between page-split buffers, byte by byte, all layers in one launch.
//
// Layout: rows.cuh, on both sides; page sizes may differ. sources[layer] and targets[layer] are base addresses, each
// in device or page-locked host memory; the place lists hold for every layer, and -1 on either side leaves a row out. No target row may be a source row.
// A block takes 64 places of one layer (grid: x = groups of 64, y = layers). When they are one whole page on both
// sides the page goes as one run, else row by row. Bytes a row: 584 (a key: 132) read and written, 16 of its places.
#include "rows.cuh"

template <int DATA, int SCALE>
__device__ __forceinline__ void transfer(const u64* sources, const u64* targets, const i64* source_places,
                                         const i64* target_places, i64 n, i64 source_count, i64 source_bytes,
                                         i64 source_log2, i64 target_count, i64 target_bytes, i64 target_log2, u64* fault) {
    const Pages source = {(u8*)sources[blockIdx.y], source_bytes, (int)source_log2};
    const Pages target = {(u8*)targets[blockIdx.y], target_bytes, (int)target_log2};
    const i64 source_rows = source_count << source_log2, target_rows = target_count << target_log2;
    const i64 first = (i64)blockIdx.x * 64;
    const int thread = threadIdx.x, lane = thread & 31;

    const i64 from = source_places[first], to = target_places[first];
    bool page = n - first >= 64 && source_log2 == 6 && target_log2 == 6 && (from & 63) == 0 && (to & 63) == 0 && from >= 0 &&
                to >= 0 && from < source_rows && to < target_rows;
    if (page && thread < 64)
        page = source_places[first + thread] == from + thread && target_places[first + thread] == to + thread;
    if (__syncthreads_and(page)) {
        const u8* read = source.data<DATA>(from);
        u8* write = target.data<DATA>(to);
        const int pieces = 64 * (DATA + SCALE) / 16;
        for (int base = 0; base < pieces; base += 4 * blockDim.x) {
            uint4 v[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int piece = base + i * blockDim.x + thread;
                if (piece < pieces) v[i] = read16(read + 16 * piece);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int piece = base + i * blockDim.x + thread;
                if (piece < pieces) *(uint4*)(write + 16 * piece) = v[i];
            }
        }
        return;
    }
    for (int group = (thread >> 5) * 4; group < 64; group += (blockDim.x >> 5) * 4) {
        i64 source_row = -1, target_row = -1;
        const i64 place = first + group + lane;
        if (lane < 4 && place < n) {
            source_row = source_places[place];
            target_row = target_places[place];
            const bool left_out = source_row == -1 || target_row == -1;
            const bool bad_source = !left_out && (source_row < 0 || source_row >= source_rows);
            const bool bad_target = !left_out && (target_row < 0 || target_row >= target_rows);
            if (bad_source) report(fault, BAD_SOURCE, place, source_row, source_rows);
            else if (bad_target) report(fault, BAD_TARGET, place, target_row, target_rows);
            if (left_out || bad_source || bad_target) source_row = target_row = -1;
        }
        if (DATA == 576) copy_four_rows(source, source_row, target, target_row, lane);
        else copy_four_keys(source, source_row, target, target_row, lane);
    }
}

extern "C" __global__ void __launch_bounds__(256)
transfer_rows(const u64* sources, const u64* targets, const i64* source_places, const i64* target_places, i64 n,
              i64 source_count, i64 source_bytes, i64 source_log2, i64 target_count, i64 target_bytes, i64 target_log2,
              u64* fault) {
    transfer<576, 8>(sources, targets, source_places, target_places, n, source_count, source_bytes, source_log2,
                     target_count, target_bytes, target_log2, fault);
}

extern "C" __global__ void __launch_bounds__(256)
transfer_index_keys(const u64* sources, const u64* targets, const i64* source_places, const i64* target_places, i64 n,
                    i64 source_count, i64 source_bytes, i64 source_log2, i64 target_count, i64 target_bytes,
                    i64 target_log2, u64* fault) {
    transfer<128, 4>(sources, targets, source_places, target_places, n, source_count, source_bytes, source_log2,
                     target_count, target_bytes, target_log2, fault);
}
