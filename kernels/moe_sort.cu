// Sorts the assignments of tokens to experts by expert, keeping the order within each: a counting sort.
//
// Assignments are cut into chunks, one block each. `count_chunks` counts each expert's in every chunk, `scan_counts`
// makes of that where each expert's rows of each chunk begin, and `place_rows` puts assignments there. An assignment's
// place is a function of those before it alone: no atomics, the same result on every run.
// An assignment that is not kept has the number after the last expert, so that it comes last.
#include "numeric.cuh"

constexpr int WARPS = 8;      // of a block of `count_chunks` and `place_rows`
constexpr int ROUNDS = 4;     // assignments of a lane
constexpr int CHUNK = 32 * WARPS * ROUNDS;  // as in functron/ops/moe.py
constexpr int SCAN_WARPS = 32;
constexpr unsigned ALL = 0xffffffffu;

// The expert of an assignment; -1 beyond the last of them.
__device__ inline int expert_of(const i64* experts, const bool* kept, i64 at, i64 assignments, int num_experts) {
    return at >= assignments ? -1 : kept[at] ? (int)experts[at] : num_experts;
}

// Adds up, in counts [WARPS, columns], each warp's assignments by expert. Warps have consecutive parts of the chunk.
__device__ inline void count_warps(int* counts, const i64* experts, const bool* kept, i64 assignments, int columns) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int i = threadIdx.x; i < WARPS * columns; i += 32 * WARPS) counts[i] = 0;
    __syncthreads();
    const i64 first = (i64)blockIdx.x * CHUNK + warp * 32 * ROUNDS + lane;
    for (int round = 0; round < ROUNDS; ++round) {
        const int expert = expert_of(experts, kept, first + 32 * round, assignments, columns - 1);
        const unsigned same = __match_any_sync(ALL, expert);
        if (expert >= 0 && lane == __ffs(same) - 1) counts[warp * columns + expert] += __popc(same);
        __syncwarp();
    }
    __syncthreads();
}

// counts[expert, chunk] = that chunk's assignments to the expert. Grid: chunks.
// Shared memory: WARPS * (num_experts + 1) * 4 bytes.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
count_chunks(const i64* __restrict__ experts, const bool* __restrict__ kept, i64* __restrict__ counts, i64 assignments, i64 num_experts) {
    extern __shared__ int of_warps[];
    const int columns = (int)num_experts + 1;
    count_warps(of_warps, experts, kept, assignments, columns);
    for (int expert = threadIdx.x; expert < columns; expert += 32 * WARPS) {
        int sum = 0;
        for (int warp = 0; warp < WARPS; ++warp) sum += of_warps[warp * columns + expert];
        counts[(i64)expert * gridDim.x + blockIdx.x] = sum;
    }
}

// The sum over lower lanes.
__device__ inline i64 sum_below(i64 x, int lane) {
    i64 sum = x;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        const i64 lower = __shfl_up_sync(ALL, sum, by);
        if (lane >= by) sum += lower;
    }
    return sum - x;
}

// Makes each expert's counts the sums of those of earlier chunks; sizes[expert] = the sum of all, starts[expert] = the
// sum over lower experts. Grid: 1. Shared memory: (num_experts + 1) * 8 bytes.
extern "C" __global__ void __launch_bounds__(32 * SCAN_WARPS)
scan_counts(i64* __restrict__ counts, i64* __restrict__ sizes, i64* __restrict__ starts, i64 num_experts, i64 chunks) {
    extern __shared__ i64 totals[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int expert = warp; expert <= (int)num_experts; expert += SCAN_WARPS) {
        i64* row = counts + expert * chunks;
        i64 total = 0;
        for (i64 first = 0; first < chunks; first += 32) {
            const i64 at = first + lane, count = at < chunks ? row[at] : 0, below = sum_below(count, lane);
            if (at < chunks) row[at] = total + below;
            total += __shfl_sync(ALL, below + count, 31);
        }
        if (lane == 0) totals[expert] = total;
    }
    __syncthreads();
    if (warp > 0) return;
    i64 before = 0;
    for (int first = 0; first <= (int)num_experts; first += 32) {
        const int expert = first + lane;
        const i64 count = expert <= num_experts ? totals[expert] : 0, below = sum_below(count, lane);
        if (expert < num_experts) sizes[expert] = count;
        if (expert <= num_experts) starts[expert] = before + below;
        before += __shfl_sync(ALL, below + count, 31);
    }
}

// order[row] = the assignment of each of the first `rows` rows, tokens[row] = its token, and slots[assignment] = its row,
// or -1. counts, starts: of `scan_counts`. Grid: chunks. Shared memory: WARPS * (num_experts + 1) * 4 bytes.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
place_rows(const i64* __restrict__ experts, const bool* __restrict__ kept, const i64* __restrict__ counts,
           const i64* __restrict__ starts, i64* __restrict__ order, i64* __restrict__ tokens, i64* __restrict__ slots,
           i64 assignments, i64 num_experts, i64 choices, i64 rows) {
    extern __shared__ int of_warps[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, columns = (int)num_experts + 1;
    count_warps(of_warps, experts, kept, assignments, columns);
    for (int expert = threadIdx.x; expert < columns; expert += 32 * WARPS) {  // to sums over earlier warps
        int sum = 0;
        for (int other = 0; other < WARPS; ++other) {
            const int count = of_warps[other * columns + expert];
            of_warps[other * columns + expert] = sum;
            sum += count;
        }
    }
    __syncthreads();
    const i64 first = (i64)blockIdx.x * CHUNK + warp * 32 * ROUNDS + lane;
    for (int round = 0; round < ROUNDS; ++round) {
        const i64 at = first + 32 * round;
        const int expert = expert_of(experts, kept, at, assignments, (int)num_experts);
        const unsigned same = __match_any_sync(ALL, expert);
        const int below = expert >= 0 ? of_warps[warp * columns + expert] : 0;
        __syncwarp();  // all have read
        if (expert >= 0) {
            const unsigned lower = same & ((1u << lane) - 1);
            if (lower == 0) of_warps[warp * columns + expert] = below + __popc(same);
            const i64 row = starts[expert] + counts[(i64)expert * gridDim.x + blockIdx.x] + below + __popc(lower);
            slots[at] = row < rows ? row : -1;
            if (row < rows) order[row] = at, tokens[row] = at / choices;
        }
        __syncwarp();
    }
}
