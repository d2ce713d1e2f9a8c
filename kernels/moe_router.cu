// The router of a mixture of experts: scores of all experts, the best of them for each token, and their weights.
//
// A warp computes a token: lane l has the experts l, 32 + l, 64 + l, ... in registers. What lanes need of each other
// is in the warp's part of shared memory. All in float32, in an order that does not depend on other tokens.
//
// The experts per lane, so that num_experts is at most 32 times as many:
// build: ITEMS = 1, 2, 4, 8, 16
#include "numeric.cuh"

constexpr int WARPS = 4;                   // of a block, as in functron/ops/moe.py
constexpr unsigned ALL = 0xffffffffu;      // lanes
constexpr unsigned NONE = 0;               // the order of what cannot be chosen, below that of all numbers
constexpr float RENORMALISE_EPS = 1e-20f;  // as in functron/nn/moe/router.py

enum Score { SOFTMAX, SIGMOID, GIVEN };
enum Weighting { SCORES, RENORMALISED, SOFTMAX_OF_CHOSEN };

// Integers in the order of numbers: of equal ones the same, and NaN above all, as in torch's argmax.
__device__ inline unsigned order_of(float x) {
    const unsigned bits = __float_as_uint(x + 0.f);  // -0 is 0
    return x != x ? ALL : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The first expert of the highest order among all lanes' candidates; of equal ones that of the highest `tie`.
__device__ inline int first_best(unsigned order, unsigned tie, int expert) {
    const bool among = order == __reduce_max_sync(ALL, order);
    const unsigned best = __reduce_max_sync(ALL, among ? tie : NONE);
    return __reduce_min_sync(ALL, among && tie == best ? (unsigned)expert : ALL);
}

__device__ inline float finite(float x) { return fminf(fmaxf(x, -3.4e38f), 3.4e38f); }
// log(exp(x) + exp(y)) of finite numbers.
__device__ inline float log_add(float x, float y) { return fmaxf(x, y) + log1pf(expf(-fabsf(x - y))); }
__device__ inline float log_sigmoid(float x) { return fminf(x, 0.f) - log1pf(expf(-fabsf(x))); }

// What rises with the sum S of the scores of two logits, also where it rounds: for sigmoids log(S) - log(2 - S).
__device__ inline float order_of_pair(float x, float y, int score) {
    if (score == GIVEN) return x + y;
    x = finite(x), y = finite(y);
    if (score == SOFTMAX) return log_add(x, y);
    return log_add(log_sigmoid(x), log_sigmoid(y)) - log_add(log_sigmoid(-x), log_sigmoid(-y));
}

// Scores of the logits of a token; unused items are 0 in both.
__device__ inline void score_all(const float (&logit)[ITEMS], float (&value)[ITEMS], int experts, int lane, int score) {
    float top = -CUDART_INF_F, sum = 0.f;
    if (score == SOFTMAX) {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i)
            if (i * 32 + lane < experts) top = fmaxf(top, logit[i]);
        top = warp_max(top);
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const bool real = i * 32 + lane < experts;
        if (score == SOFTMAX) value[i] = real ? expf(logit[i] - top) : 0.f;
        if (score == SIGMOID) value[i] = real ? 1.f / (1.f + expf(-logit[i])) : 0.f;
        if (score == GIVEN) value[i] = logit[i];
        sum += value[i];
    }
    if (score != SOFTMAX) return;
    sum = warp_sum(sum);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) value[i] = value[i] / sum;
}

// The groups to choose from, as bits; `ranking` has the experts' numbers, `logits` what orders equal ones. At most 32
// groups, one to a lane.
__device__ inline unsigned choose_groups(const float* ranking, const float* logits, int lane, int groups, int members,
                                         int wanted, bool top_two, int score) {
    float best = -CUDART_INF_F, second = -CUDART_INF_F, of_best = -CUDART_INF_F, of_second = -CUDART_INF_F;
    const auto above = [](float x, float of_x, float y, float of_y) {
        return order_of(x) > order_of(y) || (order_of(x) == order_of(y) && order_of(of_x) > order_of(of_y));
    };
    for (int i = 0; lane < groups && i < members; ++i) {
        const int at = lane * members + (i + lane) % members;  // lanes meet different banks
        const float x = ranking[at], of_x = logits[at];
        const bool first = above(x, of_x, best, of_best), next = !first && above(x, of_x, second, of_second);
        second = first ? best : next ? x : second, of_second = first ? of_best : next ? of_x : of_second;
        best = first ? x : best, of_best = first ? of_x : of_best;
    }
    unsigned order = lane < groups ? order_of(top_two ? best + second : best) : NONE, chosen = 0;
    const unsigned tie = order_of(top_two ? order_of_pair(of_best, of_second, score) : of_best);
    for (int i = 0; i < wanted; ++i) {
        const int group = first_best(order, tie, lane);
        chosen |= 1u << group;
        if (lane == group) order = NONE;
    }
    return chosen;
}

// The weights of a token's chosen experts; `from` has all experts' scores, or logits for SOFTMAX_OF_CHOSEN.
__device__ inline void weigh(const float* from, const int* chosen, float* weights, int choices, int lane, int weighting) {
    float top = 0.f, sum = 1.f;
    if (weighting == SOFTMAX_OF_CHOSEN) {
        top = -CUDART_INF_F;
        for (int j = lane; j < choices; j += 32) top = fmaxf(top, from[chosen[j]]);
        top = warp_max(top);
    }
    const auto part = [&](int j) { return weighting == SOFTMAX_OF_CHOSEN ? expf(from[chosen[j]] - top) : from[chosen[j]]; };
    if (weighting != SCORES) {
        sum = 0.f;
        for (int j = lane; j < choices; j += 32) sum += part(j);
        sum = warp_sum(sum) + (weighting == RENORMALISED ? RENORMALISE_EPS : 0.f);
    }
    for (int j = lane; j < choices; j += 32) weights[j] = part(j) / sum;
}

// logits: [tokens, experts], rows `stride` apart. balance: [experts] or null, added to scores in choosing alone.
// chosen, weights: [tokens, choices], best first; of equals those of larger logits, then the first.
// scores: [tokens, experts].
// Where groups > 1, the best `top_groups` are chosen first, by their best expert, or the sum of their best two.
// Grid: any. Shared memory: WARPS * (2 * experts + choices) * 4 bytes.
extern "C" __global__ void __launch_bounds__(32 * WARPS, ITEMS > 8 ? 4 : 8)
route(const float* __restrict__ logits, const float* __restrict__ balance, i64* __restrict__ chosen,
      float* __restrict__ weights, float* __restrict__ scores, i64 tokens, i64 experts, i64 stride, i64 choices,
      i64 score, i64 weighting, i64 groups, i64 top_groups, i64 top_two) {
    extern __shared__ float shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, count = (int)experts;
    const int members = count / (int)groups;
    float* row = shared + warp * (2 * count + (int)choices);  // of numbers of all experts
    float* all_logits = row + count;
    int* found = reinterpret_cast<int*>(all_logits + count);  // the chosen ones
    for (i64 token = (i64)blockIdx.x * WARPS + warp; token < tokens; token += (i64)gridDim.x * WARPS) {
        float logit[ITEMS], value[ITEMS];
        unsigned order[ITEMS];
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) logit[i] = i * 32 + lane < count ? logits[token * stride + i * 32 + lane] : 0.f;
        score_all(logit, value, count, lane, (int)score);
        __syncwarp();  // of `row` and `found`, the last token's have been read
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const int expert = i * 32 + lane;
            order[i] = NONE;
            if (expert >= count) continue;
            scores[token * experts + expert] = value[i];
            const float ranking = balance ? value[i] + balance[expert] : value[i];
            order[i] = order_of(ranking);
            row[expert] = ranking, all_logits[expert] = logit[i];
        }
        if (groups > 1) {
            __syncwarp();
            const unsigned open = choose_groups(row, all_logits, lane, (int)groups, members, (int)top_groups,
                                                top_two, (int)score);
#pragma unroll
            for (int i = 0; i < ITEMS; ++i)
                if (i * 32 + lane < count && !(open >> (i * 32 + lane) / members & 1)) order[i] = NONE;
            __syncwarp();
        }
#pragma unroll
        for (int i = 0; i < ITEMS; ++i)
            if (i * 32 + lane < count) row[i * 32 + lane] = weighting == SOFTMAX_OF_CHOSEN ? logit[i] : value[i];
        for (int j = 0; j < (int)choices; ++j) {
            unsigned best = NONE, tie = NONE;
            int expert = lane;
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                const unsigned own = order_of(logit[i]);
                if (order[i] > best || (order[i] == best && order[i] != NONE && own > tie))
                    best = order[i], tie = own, expert = i * 32 + lane;
            }
            expert = first_best(best, tie, expert);
#pragma unroll
            for (int i = 0; i < ITEMS; ++i)
                if (expert == i * 32 + lane) order[i] = NONE;
            if (lane == 0) found[j] = expert;
        }
        __syncwarp();
        for (int j = lane; j < (int)choices; j += 32) chosen[token * choices + j] = found[j];
        weigh(row, found, weights + token * choices, (int)choices, lane, (int)weighting);
    }
}

// Where weights and scores have the derivatives d_weights and d_scores, logits have d_logits.
// All [tokens, choices] or [tokens, experts], contiguous. Grid: any. Shared memory: WARPS * experts * 4 bytes.
extern "C" __global__ void __launch_bounds__(32 * WARPS, ITEMS > 8 ? 4 : 8)
route_backward(const float* __restrict__ d_weights, const float* __restrict__ d_scores, const i64* __restrict__ chosen,
               const float* __restrict__ weights, const float* __restrict__ scores, float* __restrict__ d_logits,
               i64 tokens, i64 experts, i64 choices, i64 score, i64 weighting) {
    extern __shared__ float shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, count = (int)experts;
    float* row = shared + warp * count;
    for (i64 token = (i64)blockIdx.x * WARPS + warp; token < tokens; token += (i64)gridDim.x * WARPS) {
        const i64 first = token * choices;  // of its choices
        float value[ITEMS];
        __syncwarp();  // the last token's `row` has been read
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const int expert = i * 32 + lane;
            value[i] = expert < count ? scores[token * experts + expert] : 0.f;
            if (expert < count) row[expert] = d_scores[token * experts + expert];
        }
        float dot = 0.f, sum = 0.f;  // of weights times their derivatives; of the chosen scores
        for (int j = lane; j < (int)choices && weighting != SCORES; j += 32) {
            dot = fmaf(weights[first + j], d_weights[first + j], dot);
            sum += weighting == RENORMALISED ? scores[token * experts + chosen[first + j]] : 0.f;
        }
        dot = warp_sum(dot);
        const float scale = weighting == RENORMALISED ? 1.f / (warp_sum(sum) + RENORMALISE_EPS) : 1.f;
        __syncwarp();
        for (int j = lane; j < (int)choices && weighting != SOFTMAX_OF_CHOSEN; j += 32)
            row[chosen[first + j]] += (d_weights[first + j] - dot) * scale;  // no expert twice
        __syncwarp();
        float product = 0.f;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i)
            if (i * 32 + lane < count) product = fmaf(value[i], row[i * 32 + lane], product);
        product = warp_sum(product);
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const int expert = i * 32 + lane;
            if (expert >= count) continue;
            if (score == SOFTMAX) row[expert] = value[i] * (row[expert] - product);
            if (score == SIGMOID) row[expert] = row[expert] * value[i] * (1.f - value[i]);
        }
        __syncwarp();
        for (int j = lane; j < (int)choices && weighting == SOFTMAX_OF_CHOSEN; j += 32)
            row[chosen[first + j]] += weights[first + j] * (d_weights[first + j] - dot);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < ITEMS; ++i)
            if (i * 32 + lane < count) d_logits[token * experts + i * 32 + lane] = row[i * 32 + lane];
    }
}
