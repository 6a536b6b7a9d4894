// Enough of CUDA to run common/kernels/cuda/*.cu on a CPU: every thread of a block is a fiber, and one OS thread runs
// them one at a time, in an order drawn anew from `seed` each time, up to their next barrier or warp operation. So
// a missing barrier shows as a result that depends on the seed. Not emulated: time, memory spaces, weak ordering.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#ifdef __SSE__
#include <xmmintrin.h>
#endif

#include <cmath>
#include <vector>

#define __device__
#define __global__ __attribute__((visibility("default")))
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__

struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct Index { unsigned x, y, z; };
static Index threadIdx, blockIdx, blockDim, gridDim;

static const size_t SHARED_BYTES = 256 * 1024;
extern "C" { alignas(16) int shared_memory[SHARED_BYTES / 4]; }

inline unsigned __float_as_uint(float x) { unsigned u; memcpy(&u, &x, 4); return u; }
inline float __uint_as_float(unsigned u) { float x; memcpy(&x, &u, 4); return x; }

enum State { READY, AT_BLOCK, AT_WARP, ENDED };
struct Fiber {
    ucontext_t context;
    State state;
    std::vector<char> stack;
};
struct Warp { uint64_t held[32]; bool flag[32]; };
static std::vector<Fiber> fibers;
static std::vector<Warp> warps;
static ucontext_t scheduler;
static int current;
static int block_votes, block_answer_and, block_answer_or;

static void wait(State what) {
    fibers[current].state = what;
    swapcontext(&fibers[current].context, &scheduler);
}
inline void __syncthreads() { wait(AT_BLOCK); }
// Both votes are taken between two barriers.
static int vote(bool yes, bool all) {
    int& answer = all ? block_answer_and : block_answer_or;
    if (all ? !yes : yes) answer = !all;
    wait(AT_BLOCK);
    const int result = answer;
    wait(AT_BLOCK);
    answer = all;
    wait(AT_BLOCK);
    return result;
}
inline int __syncthreads_and(int yes) { return vote(yes, true); }
inline int __syncthreads_or(int yes) { return vote(yes, false); }

template <class T> T exchange(T value, int lane_from) {
    Warp& warp = warps[current / 32];
    memcpy(&warp.held[current % 32], &value, sizeof(T));
    wait(AT_WARP);
    T result;
    memcpy(&result, &warp.held[lane_from & 31], sizeof(T));
    wait(AT_WARP);
    return result;
}
template <class T> T __shfl_sync(unsigned, T value, int lane) { return exchange(value, lane); }
template <class T> T __shfl_xor_sync(unsigned, T value, int mask) { return exchange(value, (current % 32) ^ mask); }
template <class T> T __shfl_up_sync(unsigned, T value, int step) {
    const int lane = current % 32;
    return exchange(value, lane >= step ? lane - step : lane);
}
inline bool __all_sync(unsigned, bool yes) {
    Warp& warp = warps[current / 32];
    warp.flag[current % 32] = yes;
    wait(AT_WARP);
    bool all = true;
    for (bool flag : warp.flag) all = all && flag;
    wait(AT_WARP);
    return all;
}

template <class T> T atomicAdd(T* at, T value) { T old = *at; *at += value; return old; }
template <class T> T atomicCAS(T* at, T expected, T value) { T old = *at; if (old == expected) *at = value; return old; }
template <class T> T atomicMin(T* at, T value) { T old = *at; if (value < old) *at = value; return old; }
template <class T> T atomicMax(T* at, T value) { T old = *at; if (value > old) *at = value; return old; }

// The C calling convention of 64-bit Linux lets a function ignore arguments it has no parameters for.
typedef void (*Kernel)(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t,
                       uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t,
                       uint64_t, uint64_t, uint64_t, uint64_t);
static Kernel kernel_now;
static const uint64_t* arguments_now;

static void run_fiber() {
    const uint64_t* a = arguments_now;
    kernel_now(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15], a[16],
               a[17], a[18], a[19], a[20], a[21], a[22], a[23]);
    fibers[current].state = ENDED;
    swapcontext(&fibers[current].context, &scheduler);
}

static uint64_t random_state;
static unsigned draw(unsigned bound) {
    random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
    return (unsigned)((random_state >> 33) % bound);
}

// 0: done. 1: threads wait for one another for ever. 2: shared memory was written beyond its end.
static int run_block(int threads, size_t shared_bytes) {
    memset(shared_memory, 0xcd, SHARED_BYTES);
    block_answer_and = 1;
    block_answer_or = 0;
    for (int t = 0; t < threads; ++t) {
        Fiber& fiber = fibers[t];
        fiber.state = READY;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        fiber.context.uc_link = &scheduler;
        makecontext(&fiber.context, run_fiber, 0);
    }
    std::vector<int> ready;
    for (;;) {
        ready.clear();
        for (int t = 0; t < threads; ++t)
            if (fibers[t].state == READY) ready.push_back(t);
        for (size_t left = ready.size(); left; --left) {
            const unsigned pick = draw((unsigned)left);
            current = ready[pick];
            ready[pick] = ready[left - 1];
            threadIdx.x = (unsigned)current;
            swapcontext(&scheduler, &fibers[current].context);
        }
        bool moved = false, at_warp = false, alive = false;
        for (int w = 0; w < threads / 32; ++w) {
            bool whole = true;
            for (int t = 32 * w; t < 32 * w + 32; ++t) {
                whole = whole && fibers[t].state == AT_WARP;
                at_warp = at_warp || fibers[t].state == AT_WARP;
                alive = alive || fibers[t].state != ENDED;
            }
            if (whole) {
                moved = true;
                for (int t = 32 * w; t < 32 * w + 32; ++t) fibers[t].state = READY;
            }
        }
        if (!alive) break;
        if (moved) continue;
        if (at_warp) return 1;
        for (int t = 0; t < threads; ++t)
            if (fibers[t].state == AT_BLOCK) fibers[t].state = READY;
    }
    for (size_t at = shared_bytes; at < SHARED_BYTES; ++at)
        if (((unsigned char*)shared_memory)[at] != 0xcd) return 2;
    return 0;
}

// Subnormal numbers count as zero, as CuPy compiles: -ftz=true.
struct FlushSubnormals {
#ifdef __SSE__
    unsigned before = _mm_getcsr();
    FlushSubnormals() { _mm_setcsr(before | 0x8040); }
    ~FlushSubnormals() { _mm_setcsr(before); }
#endif
};

extern "C" __attribute__((visibility("default"))) int emulate(Kernel kernel, unsigned grid_x, unsigned grid_y, unsigned threads,
                                                              size_t shared_bytes, const uint64_t* arguments,
                                                              uint64_t seed) {
    const FlushSubnormals flush;
    kernel_now = kernel;
    arguments_now = arguments;
    random_state = seed;
    gridDim = {grid_x, grid_y, 1};
    blockDim = {threads, 1, 1};
    if (fibers.size() < threads) {
        fibers.resize(threads);
        warps.resize(threads / 32);
        for (Fiber& fiber : fibers) fiber.stack.resize(32 * 1024);
    }
    std::vector<unsigned> blocks(grid_x * grid_y);
    for (unsigned i = 0; i < blocks.size(); ++i) blocks[i] = i;
    for (size_t left = blocks.size(); left; --left) {
        const unsigned pick = draw((unsigned)left), block = blocks[pick];
        blocks[pick] = blocks[left - 1];
        blockIdx = {block % grid_x, block / grid_x, 0};
        if (const int failed = run_block((int)threads, shared_bytes)) return failed;
    }
    return 0;
}
