// HiSparse swap-in for a batch and one layer: makes the selected entries resident in the hot buffers.
//
// One block a batch row. Hot buffer of slot s: rows s * rows_per_slot + [0, D) in recency order, row D the newest entry;
// entries [slots, D+1] int32, recency [slots, D] int32 (least recently used first). Layout of host and hot pages:
// rows.cuh, 64 rows a page. Slots of one launch are distinct (or -1: padding).
// Bytes a batch row: reads 8 K (selected), 4 D (recency), 4 D (entries), writes 4 D, 8 K; a miss moves 584.
//
// Shared memory, ints: hash keys, first places, rows [3 * 2^hash_log2]; order [D]: evictable rows from the front, hits
// from the back; misses: hash cell, host row, and both again in address order [4 * K]; scan [33]; buckets [256];
// scalars [8]. A batch row with any bad argument is refused as a whole before its state changes.
#include "rows.cuh"

// Exclusive prefix sum over the block (a multiple of 32 threads); scan is 33 ints of shared memory.
__device__ __forceinline__ int block_scan(int value, int* scan, int* total) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    int sum = value;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        const int other = __shfl_up_sync(FULL_WARP, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == 31) scan[warp] = sum;
    __syncthreads();
    if (warp == 0) {
        int part = lane < warps ? scan[lane] : 0;
#pragma unroll
        for (int step = 1; step < 32; step <<= 1) {
            const int other = __shfl_up_sync(FULL_WARP, part, step);
            if (lane >= step) part += other;
        }
        scan[lane] = part;
    }
    __syncthreads();
    *total = scan[warps - 1];
    const int before = warp ? scan[warp - 1] : 0;
    __syncthreads();
    return before + sum - value;
}

struct Hash {
    int* keys;
    int* first;
    int* rows;
    int log2_size;

    __device__ __forceinline__ u32 start(int key) const { return ((u32)key * 2654435761u) >> (32 - log2_size); }
    __device__ __forceinline__ int insert(int key) const {
        const u32 mask = (1u << log2_size) - 1;
        for (u32 cell = start(key);; cell = (cell + 1) & mask) {
            const int held = atomicCAS(keys + cell, -1, key);
            if (held == -1 || held == key) return (int)cell;
        }
    }
    __device__ __forceinline__ int find(int key) const {
        const u32 mask = (1u << log2_size) - 1;
        for (u32 cell = start(key);; cell = (cell + 1) & mask) {
            if (keys[cell] == key) return (int)cell;
            if (keys[cell] == -1) return -1;
        }
    }
};

enum Scalar { WANTED, LEAST_ROW, MOST_ROW, LIST_BASE };

template <bool FUSED>
__device__ __forceinline__ void swap_in(const i64* selected, i64 topk, const i64* slots, const i64* counts,
                                        const void* table, i64 table_pages, i64 table_is_wide, const u8* host_pages,
                                        i64 host_count, u8* hot_pages, i64 page_bytes, int* entries, int* recency,
                                        i64 slot_count, i64 hot_rows, i64 rows_per_slot, u64* counters, i64* out,
                                        i64 hash_log2, u64* list, u64* list_size, u64* fault) {
    extern __shared__ int shared_memory[];
    const int thread = threadIdx.x, threads = blockDim.x, K = (int)topk, D = (int)hot_rows;
    const int cells = 1 << hash_log2;
    const Hash hash = {shared_memory, shared_memory + cells, shared_memory + 2 * cells, (int)hash_log2};
    int* order = shared_memory + 3 * cells;
    int* miss_cell = order + D;
    int* miss_row = miss_cell + K;
    int* sorted_from = miss_row + K;
    int* sorted_to = sorted_from + K;
    int* scan = sorted_to + K;
    int* buckets = scan + 33;
    int* scalars = buckets + 256;

    const i64 batch = blockIdx.x;
    const i64 slot = slots[batch], count = counts[batch];
    selected += batch * topk;
    out += batch * topk;
    bool bad = slot < -1 || slot >= slot_count;
    if (bad && thread == 0) report(fault, BAD_SLOT, batch, slot, slot_count);
    if (bad || slot < 0) {
        for (int k = thread; k < K; k += threads) out[k] = -1;
        return;
    }
    const i64 base = slot * rows_per_slot;
    const bool fits = count <= hot_rows;
    entries += slot * (hot_rows + 1);
    recency += slot * hot_rows;

    if (thread == 0) {
        scalars[WANTED] = 0;
        scalars[LEAST_ROW] = 0x7fffffff;
        scalars[MOST_ROW] = 0;
    }
    if (!fits)
        for (int cell = thread; cell < cells; cell += threads) {
            hash.keys[cell] = -1;
            hash.first[cell] = 0x7fffffff;
            hash.rows[cell] = -1;
        }
    __syncthreads();

    // The top-k into the hash; the newest entry has its own row and is never looked for.
    int wanted = 0;
    for (int k = thread; k < K; k += threads) {
        const i64 entry = selected[k];
        if (entry < -1 || entry >= count) {
            report(fault, BAD_ENTRY, batch, entry, count);
            bad = true;
        } else if (entry >= 0) {
            ++wanted;
            if (!fits && entry != count - 1) atomicMin(hash.first + hash.insert((int)entry), k);
        }
    }
    if (wanted) atomicAdd(scalars + WANTED, wanted);
    if (__syncthreads_or(bad)) {
        for (int k = thread; k < K; k += threads) out[k] = -1;
        return;
    }
    if (fits) {
        for (int k = thread; k < K; k += threads) out[k] = selected[k] < 0 ? -1 : base + selected[k];
        if (thread == 0) atomicAdd(counters, (u64)scalars[WANTED]);
        return;
    }

    // Rows in recency order, split into evictable ones and hits, the order kept.
    int hits = 0;
    for (int begin = 0; begin < D; begin += threads) {
        const int at = begin + thread;
        int row = 0, cell = -1;
        if (at < D) {
            row = recency[at];
            if (row < 0 || row >= D) {
                report(fault, BAD_STATE, batch, row, D);
                bad = true;
                row = 0;
            } else if (entries[row] >= 0) {
                cell = hash.find(entries[row]);
            }
        }
        if (cell >= 0) hash.rows[cell] = row;
        int found;
        const int before = hits + block_scan(cell >= 0, scan, &found);
        if (at < D) order[cell >= 0 ? D - 1 - before : at - before] = row;
        hits += found;
    }

    // The m-th miss, in top-k order and counted once however often it is selected, takes order[m].
    __syncthreads();
    int misses = 0;
    for (int begin = 0; begin < K; begin += threads) {
        const int k = begin + thread;
        const i64 entry = k < K ? selected[k] : -1;
        int cell = -1;
        if (entry >= 0 && entry != count - 1) cell = hash.find((int)entry);
        const bool missed = cell >= 0 && hash.first[cell] == k && hash.rows[cell] < 0;
        int found;
        const int rank = misses + block_scan(missed, scan, &found);
        if (missed) {
            const i64 page_at = batch * table_pages + (entry >> 6);
            i64 page = -1;
            if ((entry >> 6) < table_pages)
                page = table_is_wide ? ((const i64*)table)[page_at] : (i64)((const int*)table)[page_at];
            if (page < 0 || page >= host_count) {
                report(fault, BAD_HOST_PAGE, batch, page, host_count);
                bad = true;
            } else if (rank < D - hits) {
                const int host_row = (int)(page << 6 | (entry & 63));
                miss_cell[rank] = cell;
                miss_row[rank] = host_row;
                hash.rows[cell] = order[rank];
                atomicMin(scalars + LEAST_ROW, host_row);
                atomicMax(scalars + MOST_ROW, host_row);
            } else {
                report(fault, BAD_STATE, batch, rank, D - hits);
                bad = true;
            }
        }
        misses += found;
    }
    if (__syncthreads_or(bad)) {
        for (int k = thread; k < K; k += threads) out[k] = -1;
        return;
    }

    const int unused = D - hits;
    for (int m = thread; m < misses; m += threads) entries[order[m]] = hash.keys[miss_cell[m]];
    for (int at = thread; at < D; at += threads) {
        int from = D - 1 - (at - unused);
        if (at < unused) from = at < unused - misses ? misses + at : at - (unused - misses);
        recency[at] = order[from];
    }
    for (int k = thread; k < K; k += threads) {
        const i64 entry = selected[k];
        if (entry < 0) out[k] = -1;
        else out[k] = base + (entry == count - 1 ? D : hash.rows[hash.find((int)entry)]);
    }
    if (thread == 0) {
        atomicAdd(counters, (u64)(scalars[WANTED] - misses));
        atomicAdd(counters + 1, (u64)misses);
    }
    if (misses == 0) return;

    // Nearly in address order: by 256 equal parts of the host rows the misses span.
    const int least = scalars[LEAST_ROW];
    const u32 span = (u32)(scalars[MOST_ROW] - least);
    int shift = 0;
    while (span >> shift >= 256u) ++shift;
    for (int bucket = thread; bucket < 256; bucket += threads) buckets[bucket] = 0;
    __syncthreads();
    for (int m = thread; m < misses; m += threads) atomicAdd(buckets + ((u32)(miss_row[m] - least) >> shift), 1);
    __syncthreads();
    for (int begin = 0, running = 0; begin < 256; begin += threads) {
        const int bucket = begin + thread;
        int sum;
        const int start = running + block_scan(bucket < 256 ? buckets[bucket] : 0, scan, &sum);
        if (bucket < 256) buckets[bucket] = start;
        running += sum;
    }
    __syncthreads();
    for (int m = thread; m < misses; m += threads) {
        const int at = atomicAdd(buckets + ((u32)(miss_row[m] - least) >> shift), 1);
        sorted_from[at] = miss_row[m];
        sorted_to[at] = order[m];
    }
    if (!FUSED && thread == 0) scalars[LIST_BASE] = (int)atomicAdd(list_size, (u64)misses);
    __syncthreads();

    if (!FUSED) {
        u64* mine = list + 2 * (i64)scalars[LIST_BASE];
        for (int m = thread; m < misses; m += threads) {
            mine[2 * m] = (u64)sorted_from[m];
            mine[2 * m + 1] = (u64)(base + sorted_to[m]);
        }
        return;
    }
    const Pages host = {(u8*)host_pages, page_bytes, 6};
    const Pages hot = {hot_pages, page_bytes, 6};
    const int lane = thread & 31;
    for (int group = (thread >> 5) * 4; group < misses; group += (threads >> 5) * 4) {
        const bool mine = lane < 4 && group + lane < misses;
        copy_four_rows(host, mine ? sorted_from[group + lane] : -1, hot, mine ? base + sorted_to[group + lane] : -1, lane);
    }
}

// Everything in one launch: best where batch rows are many.
extern "C" __global__ void __launch_bounds__(1024, 1)
swap_in_fused(const i64* selected, i64 topk, const i64* slots, const i64* counts, const void* table, i64 table_pages,
              i64 table_is_wide, const u8* host_pages, i64 host_count, u8* hot_pages, i64 page_bytes, int* entries,
              int* recency, i64 slot_count, i64 hot_rows, i64 rows_per_slot, u64* counters, i64* out, i64 hash_log2,
              u64* fault) {
    swap_in<true>(selected, topk, slots, counts, table, table_pages, table_is_wide, host_pages, host_count, hot_pages,
                  page_bytes, entries, recency, slot_count, hot_rows, rows_per_slot, counters, out, hash_log2,
                  (u64*)0, (u64*)0, fault);
}

// Decides and lists the copies, which swap_in_copy then does with every multiprocessor: few rows, many misses.
// list: pairs of host row and hot row; list_size [2]: pairs in the list, blocks of swap_in_copy that are done.
extern "C" __global__ void __launch_bounds__(1024, 1)
swap_in_resolve(const i64* selected, i64 topk, const i64* slots, const i64* counts, const void* table, i64 table_pages,
                i64 table_is_wide, i64 host_count, int* entries, int* recency, i64 slot_count, i64 hot_rows,
                i64 rows_per_slot, u64* counters, i64* out, i64 hash_log2, u64* list, u64* list_size, u64* fault) {
    swap_in<false>(selected, topk, slots, counts, table, table_pages, table_is_wide, (const u8*)0, host_count, (u8*)0, 0,
                   entries, recency, slot_count, hot_rows, rows_per_slot, counters, out, hash_log2, list, list_size, fault);
}

// The last block to end empties the list for the next step.
extern "C" __global__ void __launch_bounds__(256)
swap_in_copy(const u8* host_pages, u8* hot_pages, i64 page_bytes, const u64* list, u64* list_size) {
    const Pages host = {(u8*)host_pages, page_bytes, 6};
    const Pages hot = {hot_pages, page_bytes, 6};
    const int lane = threadIdx.x & 31;
    const i64 misses = (i64)list_size[0];
    const i64 step = (i64)gridDim.x * (blockDim.x >> 5) * 4;
    for (i64 group = ((i64)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5)) * 4; group < misses; group += step) {
        const bool mine = lane < 4 && group + lane < misses;
        copy_four_rows(host, mine ? (i64)list[2 * (group + lane)] : -1, hot, mine ? (i64)list[2 * (group + lane) + 1] : -1,
                       lane);
    }
    __syncthreads();
    if (threadIdx.x == 0 && atomicAdd(list_size + 1, 1ull) == gridDim.x - 1) {
        list_size[0] = 0;
        list_size[1] = 0;
    }
}
