// Runs CUDA kernels on the CPU, for tests: g++ compiles a kernel's own source after this header.
//
// Blocks run one after the other. The threads of a block are fibers on one OS thread: each runs until it waits at a
// barrier or for other lanes of its warp, and always the runnable one of highest priority goes on. Priorities come
// from a seed, so some threads run as far ahead of the others as the kernel's barriers let them: where a barrier is
// missing, values are wrong for some seed. Shared memory starts as NaN. What a GPU would leave undefined (a barrier
// that not all threads reach, lanes that meet at different instructions, misaligned or out-of-bounds access, integer
// overflow) ends the launch with a message. Not covered: inline PTX, memory ordering, races between blocks, rounding
// of approximate instructions.
#pragma once
#ifdef __CUDACC__
#error "emulator.h is for the host compiler"
#endif

// ---- what crt/host_defines.h defines: wheels of the CUDA runtime come without it -----------------------------------
#define __CUDA_INCLUDE_COMPILER_INTERNAL_HEADERS__
#define __host__
#define __device__
#define __global__
#define __constant__
#define __managed__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __forceinline__ __inline__ __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __no_return__ __attribute__((noreturn))
#define __specialization_static
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define CUDARTAPI
#define CUDARTAPI_CDECL

#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <source_location>
#include <type_traits>
#include <utility>
#include <vector>

#include <vector_types.h>
#include <vector_functions.h>
#include <math_constants.h>
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>

// after NVIDIA's headers: names of this file's own
#undef __shared__
#define __shared__ static __attribute__((section("emulated_shared")))
extern char __start_emulated_shared[] __attribute__((weak, visibility("hidden")));
extern char __stop_emulated_shared[] __attribute__((weak, visibility("hidden")));

namespace emulator {

// What Python passes: the call, and where its tensors are, to say which of them an access is near.
struct Region {
    const char *begin, *end;
    long long argument;
};
struct Call {
    long long grid[3], block[3], dynamic_bytes, seed;
    void** arguments;
    const Region* regions;
    long long num_regions;
    char* message;
    long long message_bytes;
};

constexpr size_t STACK_BYTES = 128 << 10, SIGNAL_STACK_BYTES = 64 << 10, PAGE = 4096, GUARD_BYTES = 1 << 20;
constexpr int WARP = 32, BLOCK_LIMIT = 1024;

using Site = std::source_location;  // of a barrier or an operation of a warp
inline bool operator!=(const Site& a, const Site& b) {
    return a.line() != b.line() || strcmp(a.file_name(), b.file_name());
}
inline const char* base(const char* path) { return strrchr(path, '/') ? strrchr(path, '/') + 1 : path; }
#define SITE "%s:%u"
#define PARTS(site) emulator::base((site).file_name()), (site).line()

struct Fiber {
    ucontext_t context;
    jmp_buf resume;
    bool started, ended, in_warp;  // in_warp: what it waits for are lanes of its warp, not the block
    unsigned id, rank;             // rank: place in the order of priorities
    Site site;                     // where it waits
    uint3 place;
};
struct Warp {
    unsigned arrived, mask, meetings;
    Site site;
    unsigned long long values[2][WARP];  // of this meeting, and of the one that slower lanes still read
};

inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline std::vector<unsigned> by_rank;           // fibers in the order of priorities
inline unsigned long long ready[BLOCK_LIMIT / 64];  // by rank
inline char *stacks, *dynamic;                  // `dynamic`: extern __shared__ arrays
inline size_t dynamic_bytes;
inline Fiber* current;
inline jmp_buf scheduler, failed;
inline ucontext_t first_entry;
inline unsigned barrier_arrived, barrier_votes[2], barrier_meetings;
inline Site barrier_site;
inline void (*kernel)(void**);
inline const Call* call;
inline dim3 grid_dim, block_dim;
template <class... More> constexpr long long first(long long threads, More...) { return threads; }
inline uint3 block_index;

[[noreturn]] __attribute__((format(printf, 1, 2))) inline void fail(const char* format, ...) {
    const size_t size = call->message_bytes;
    size_t at = 0;
    if (current)
        at = snprintf(call->message, size, "block (%u, %u, %u), thread (%u, %u, %u): ", block_index.x, block_index.y,
                      block_index.z, current->place.x, current->place.y, current->place.z);
    va_list values;
    va_start(values, format);
    vsnprintf(call->message + at, size - at, format, values);
    va_end(values);
    _longjmp(failed, 1);
}

// ---- fibers --------------------------------------------------------------------------------------------------------
inline void wake(unsigned id) { ready[fibers[id].rank / 64] |= 1ull << fibers[id].rank % 64; }
inline void sleep(Site site, bool in_warp) {
    current->site = site;
    current->in_warp = in_warp;
    ready[current->rank / 64] &= ~(1ull << current->rank % 64);
    if (!_setjmp(current->resume)) _longjmp(scheduler, 1);
}
// Lets others of higher priority go first; the last to arrive anywhere comes here.
inline void give_way() {
    if (!_setjmp(current->resume)) _longjmp(scheduler, 1);
}

// All threads of the block meet; returns how many of them vote.
inline unsigned meet_block(Site site, bool vote) {
    if (barrier_arrived && barrier_site != site)
        fail("waits at the barrier " SITE " while others wait at that of " SITE, PARTS(site), PARTS(barrier_site));
    const unsigned parity = barrier_meetings & 1;
    if (!barrier_arrived) barrier_votes[parity] = 0;
    barrier_site = site;
    barrier_votes[parity] += vote;
    if (++barrier_arrived < fibers.size()) {
        sleep(site, false);
    } else {
        barrier_arrived = 0;
        ++barrier_meetings;
        for (const Fiber& fiber : fibers) wake(fiber.id);
        give_way();
    }
    return barrier_votes[parity];
}

// The lanes of `mask` meet; returns what each of them brought.
inline const unsigned long long* meet_warp(unsigned mask, unsigned long long value, Site site) {
    Warp& warp = warps[current->id / WARP];
    const unsigned lane = current->id % WARP, base = current->id - lane;
    if (!(mask >> lane & 1)) fail(SITE ": takes part in a warp operation whose mask %08x leaves it out", PARTS(site), mask);
    if (warp.arrived && warp.mask != mask)
        fail(SITE ": lanes of one warp meet with the masks %08x and %08x", PARTS(site), mask, warp.mask);
    if (warp.arrived && warp.site != site)
        fail("lanes of one warp meet at different operations, " SITE " and " SITE, PARTS(site), PARTS(warp.site));
    const unsigned parity = warp.meetings & 1;
    warp.mask = mask;
    warp.site = site;
    warp.values[parity][lane] = value;
    warp.arrived |= 1u << lane;
    if (warp.arrived != mask) {
        sleep(site, true);
    } else {
        warp.arrived = 0;
        ++warp.meetings;
        for (unsigned i = 0; i < WARP; ++i)
            if (mask >> i & 1) wake(base + i);
        give_way();
    }
    return warp.values[parity];
}

template <class T> T shuffle(unsigned mask, T value, int source, Site site) {
    static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
    unsigned long long bits = 0;
    memcpy(&bits, &value, sizeof value);
    const unsigned long long* values = meet_warp(mask, bits, site);
    if (!(mask >> source & 1)) fail(SITE ": reads lane %d, which the mask %08x leaves out", PARTS(site), source, mask);
    memcpy(&value, &values[source], sizeof value);
    return value;
}
inline int lane() { return current->id % WARP; }

inline void run_thread() {
    kernel(call->arguments);
    current->ended = true;
    ready[current->rank / 64] &= ~(1ull << current->rank % 64);
    _longjmp(scheduler, 1);
}

[[noreturn]] inline void fail_deadlock() {
    const Fiber* waiting = nullptr;
    unsigned ended = 0, others = 0;
    for (const Fiber& fiber : fibers) {
        ended += fiber.ended;
        if (!fiber.ended && !waiting) waiting = &fiber;
        if (!fiber.ended && (fiber.site != waiting->site || fiber.in_warp != waiting->in_warp)) ++others;
    }
    current = const_cast<Fiber*>(waiting);
    fail("deadlock: waits at " SITE " for %s, while %u threads wait elsewhere and %u have ended", PARTS(waiting->site),
         waiting->in_warp ? "lanes of its warp" : "the block", others, ended);
}

// Seed 0: low threads go first; 1: high ones; others: warps in some order, and lanes in some order within each.
inline void set_priorities(unsigned count, long long seed) {
    std::mt19937 random(seed * 7919 + block_index.x);
    std::vector<unsigned> order((count + WARP - 1) / WARP);
    std::iota(order.begin(), order.end(), 0u);
    if (seed > 1) std::shuffle(order.begin(), order.end(), random);
    by_rank.clear();
    for (unsigned warp : order) {
        const size_t begin = by_rank.size();
        for (unsigned i = warp * WARP; i < (warp + 1) * WARP && i < count; ++i) by_rank.push_back(i);
        if (seed > 1) std::shuffle(by_rank.begin() + begin, by_rank.end(), random);
    }
    if (seed == 1) std::reverse(by_rank.begin(), by_rank.end());
}

inline void run_block() {
    const unsigned count = fibers.size();
    set_priorities(count, call->seed);
    warps.assign((count + WARP - 1) / WARP, {});
    barrier_arrived = 0;
    memset(__start_emulated_shared, 0xFF, __stop_emulated_shared - __start_emulated_shared);  // NaN, or -1
    if (dynamic_bytes) memset(dynamic, 0xFF, dynamic_bytes);
    for (unsigned i = 0; i < count; ++i) {
        fibers[i].started = fibers[i].ended = false;
        fibers[i].id = i;
        fibers[i].place = {i % block_dim.x, i / block_dim.x % block_dim.y, i / (block_dim.x * block_dim.y)};
    }
    for (unsigned rank = 0; rank < count; ++rank) {
        fibers[by_rank[rank]].rank = rank;
        wake(by_rank[rank]);
    }
    volatile unsigned left = count;
    while (left) {
        int word = 0;
        while (word < BLOCK_LIMIT / 64 && !ready[word]) ++word;
        if (word == BLOCK_LIMIT / 64) fail_deadlock();
        current = &fibers[by_rank[word * 64 + std::countr_zero(ready[word])]];
        if (!_setjmp(scheduler)) {
            if (current->started) _longjmp(current->resume, 1);
            current->started = true;
            getcontext(&current->context);
            current->context.uc_stack.ss_sp = stacks + current->id * STACK_BYTES;
            current->context.uc_stack.ss_size = STACK_BYTES;
            current->context.uc_link = nullptr;
            makecontext(&current->context, run_thread, 0);
            swapcontext(&first_entry, &current->context);
        }
        left = left - current->ended;
    }
}

inline void run_grid() {
    const long long* grid = call->grid;
    std::vector<long long> order(grid[0] * grid[1] * grid[2]);
    std::iota(order.begin(), order.end(), 0ll);
    if (call->seed == 1) std::reverse(order.begin(), order.end());
    std::mt19937 random(call->seed);
    if (call->seed > 1) std::shuffle(order.begin(), order.end(), random);
    for (long long i : order) {
        block_index = {unsigned(i % grid[0]), unsigned(i / grid[0] % grid[1]), unsigned(i / (grid[0] * grid[1]))};
        run_block();
    }
}

// ---- failures that the CPU finds -----------------------------------------------------------------------------------
inline void on_signal(int number, siginfo_t* info, void*) {
    if (number == SIGFPE) fail("divides an integer by zero");
    const char* at = static_cast<const char*>(info->si_addr);
    if (dynamic && at >= dynamic - GUARD_BYTES && at < dynamic + dynamic_bytes + GUARD_BYTES)
        fail("out of bounds: accesses byte %td of the %zu of dynamic shared memory", at - dynamic, dynamic_bytes);
    const Region* nearest = nullptr;
    ptrdiff_t least = 0;
    for (long long i = 0; i < call->num_regions; ++i) {
        const Region& region = call->regions[i];
        const ptrdiff_t distance = at < region.begin ? region.begin - at : at - region.end;
        if (!nearest || distance < least) nearest = &region, least = distance;
    }
    if (!nearest || at < reinterpret_cast<const char*>(PAGE)) fail("out of bounds: accesses address %p", at);
    if (at < nearest->begin) fail("out of bounds: accesses %td bytes before argument %lld", least, nearest->argument);
    fail("out of bounds: accesses byte %td of argument %lld, which has %td", at - nearest->begin, nearest->argument,
         nearest->end - nearest->begin);
}

// While it lives, faults of this process end the launch.
class Signals {
    struct sigaction before[3];
    stack_t stack_before;
    std::vector<char> stack = std::vector<char>(SIGNAL_STACK_BYTES);
    static constexpr int numbers[3] = {SIGSEGV, SIGBUS, SIGFPE};

  public:
    Signals() {
        stack_t own = {};
        own.ss_sp = stack.data();
        own.ss_size = stack.size();
        sigaltstack(&own, &stack_before);
        struct sigaction action = {};
        action.sa_sigaction = on_signal;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        for (int i = 0; i < 3; ++i) sigaction(numbers[i], &action, &before[i]);
    }
    ~Signals() {
        for (int i = 0; i < 3; ++i) sigaction(numbers[i], &before[i], nullptr);
        sigaltstack(&stack_before, nullptr);
    }
};

// Memory between unmapped pages, its end as close to them as 16-byte alignment allows.
class Guarded {
    char* mapped;
    size_t length;

  public:
    char* begin;
    explicit Guarded(size_t bytes) {
        const size_t inside = (bytes + PAGE - 1) / PAGE * PAGE;
        length = inside + 2 * GUARD_BYTES;
        mapped = static_cast<char*>(mmap(nullptr, length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
        mprotect(mapped + GUARD_BYTES, inside, PROT_READ | PROT_WRITE);
        begin = mapped + GUARD_BYTES + inside - (bytes + 15) / 16 * 16;
    }
    ~Guarded() { munmap(mapped, length); }
};

inline int launch(const Call* of, void (*body)(void**)) {
    const long long* block = of->block;
    call = of;
    kernel = body;
    current = nullptr;
    grid_dim = dim3(of->grid[0], of->grid[1], of->grid[2]);
    block_dim = dim3(block[0], block[1], block[2]);
    fibers.resize(block[0] * block[1] * block[2]);
    memset(ready, 0, sizeof ready);
    const Guarded stack_memory(fibers.size() * STACK_BYTES), shared_memory(of->dynamic_bytes);
    stacks = stack_memory.begin;
    dynamic = shared_memory.begin;
    dynamic_bytes = of->dynamic_bytes;
    const Signals signals;
    if (_setjmp(failed)) return 1;
    run_grid();
    return 0;
}

// ---- kernels as functions of boxed arguments -----------------------------------------------------------------------
// One letter for what a parameter takes: the launcher passes integers as long long and floating-point numbers as float.
template <class T> constexpr char kind_of() {
    if constexpr (std::is_same_v<T, long long>) return 'i';
    else if constexpr (std::is_same_v<T, float>) return 'f';
    else if constexpr (!std::is_pointer_v<T>) return '!';
    else {
        using At = std::remove_cv_t<std::remove_pointer_t<T>>;
        if (std::is_same_v<At, float>) return 'S';
        if (std::is_same_v<At, __half>) return 'H';
        if (std::is_same_v<At, __nv_bfloat16>) return 'B';
        if (std::is_same_v<At, long long>) return 'L';
        if (std::is_same_v<At, int> || std::is_same_v<At, unsigned>) return 'I';
        if (std::is_same_v<At, bool>) return 'T';
        if (std::is_same_v<At, __nv_fp8_e4m3> || std::is_same_v<At, __nv_fp8_e5m2>) return '8';
        if (std::is_integral_v<At> && sizeof(At) == 1) return 'C';
        return '*';
    }
}
template <class... Parameters> const char* kinds(void (*)(Parameters...)) {
    static_assert(((kind_of<Parameters>() != '!') && ...), "a parameter that is no long long, float or pointer");
    static const char letters[] = {kind_of<Parameters>()..., 0};
    return letters;
}
template <class... Parameters> void apply(void (*kernel)(Parameters...), void** boxes) {
    [&]<size_t... I>(std::index_sequence<I...>) {
        kernel(*static_cast<std::remove_cv_t<Parameters>*>(boxes[I])...);
    }(std::index_sequence_for<Parameters...>{});
}

// What g++'s -fsanitize calls, with the place in the source first.
struct Place {
    const char* file;
    unsigned line, column;
};
#define OF_PLACE(data) \
    emulator::base(static_cast<emulator::Place*>(data)->file), static_cast<emulator::Place*>(data)->line

}  // namespace emulator

#define EMULATED_KERNEL(name, ...)                                                                                  \
    extern "C" const char* emulated_kinds_##name() { return emulator::kinds(&name); }                                 \
    extern "C" long long emulated_bound_##name() { return emulator::first(__VA_ARGS__); }                             \
    extern "C" long long emulated_shared_##name() { return __stop_emulated_shared - __start_emulated_shared; }        \
    extern "C" int emulated_##name(const emulator::Call* call) {                                                      \
        return emulator::launch(call, [](void** boxes) { emulator::apply(&name, boxes); });                          \
    }

#define EMULATOR_ON(check, format)                                                                                    \
    extern "C" inline __attribute__((used, visibility("hidden"))) void __ubsan_handle_##check##_abort(                \
        void* data, [[maybe_unused]] void* a, [[maybe_unused]] void* b) {                                             \
        emulator::fail(SITE ": " format, OF_PLACE(data));                                                                                                             \
    }
extern "C" inline __attribute__((used, visibility("hidden"))) void __ubsan_handle_type_mismatch_v1_abort(void* data,
                                                                                                        void* at) {
    if (!at) emulator::fail(SITE ": out of bounds: dereferences null", OF_PLACE(data));
    emulator::fail(SITE ": misaligned access at an address that ends in 0x%x", OF_PLACE(data),
                   unsigned(reinterpret_cast<uintptr_t>(at) & 0xFF));
}
EMULATOR_ON(out_of_bounds, "out of bounds: an index beyond the array's size")
EMULATOR_ON(add_overflow, "integer overflow")
EMULATOR_ON(sub_overflow, "integer overflow")
EMULATOR_ON(mul_overflow, "integer overflow")
EMULATOR_ON(negate_overflow, "integer overflow")
EMULATOR_ON(divrem_overflow, "divides an integer by zero, or overflows")
EMULATOR_ON(shift_out_of_bounds, "shifts by more bits than there are, or by a negative number")
EMULATOR_ON(missing_return, "a function ends without returning a value")

// ---- the language --------------------------------------------------------------------------------------------------
#define threadIdx (emulator::current->place)
#define blockIdx (emulator::block_index)
#define blockDim (emulator::block_dim)
#define gridDim (emulator::grid_dim)
#define warpSize 32
#define __CUDA_ARCH_EMULATED__ 1
#define FROM_HERE emulator::Site site = emulator::Site::current()

inline void __syncthreads(FROM_HERE) { emulator::meet_block(site, false); }
inline int __syncthreads_count(int vote, FROM_HERE) { return emulator::meet_block(site, vote); }
inline int __syncthreads_or(int vote, FROM_HERE) { return emulator::meet_block(site, vote) > 0; }
inline int __syncthreads_and(int vote, FROM_HERE) { return emulator::meet_block(site, !vote) == 0; }
inline void __syncwarp(unsigned mask = ~0u, FROM_HERE) { emulator::meet_warp(mask, 0, site); }

template <class T> T __shfl_sync(unsigned mask, T value, int source, int width = 32, FROM_HERE) {
    return emulator::shuffle(mask, value, (emulator::lane() & -width) | (source & (width - 1)), site);
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int other, int width = 32, FROM_HERE) {
    const int lane = emulator::lane(), source = lane ^ other;
    return emulator::shuffle(mask, value, source < (lane & -width) + width ? source : lane, site);
}
template <class T> T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32, FROM_HERE) {
    const int lane = emulator::lane(), inside = lane & (width - 1);
    return emulator::shuffle(mask, value, inside + (int)by < width ? lane + (int)by : lane, site);
}
template <class T> T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32, FROM_HERE) {
    const int lane = emulator::lane(), inside = lane & (width - 1);
    return emulator::shuffle(mask, value, inside >= (int)by ? lane - (int)by : lane, site);
}
namespace emulator {
template <class F> unsigned lanes_where(unsigned mask, unsigned long long value, Site site, F holds) {
    const unsigned long long* values = meet_warp(mask, value, site);
    unsigned found = 0;
    for (int i = 0; i < WARP; ++i)
        if ((mask >> i & 1) && holds(values[i])) found |= 1u << i;
    return found;
}
template <class T, class F> T reduce(unsigned mask, T value, Site site, F combine) {
    const unsigned long long* values = meet_warp(mask, static_cast<unsigned long long>(value), site);
    T total = static_cast<T>(values[std::countr_zero(mask)]);
    for (int i = std::countr_zero(mask) + 1; i < WARP; ++i)
        if (mask >> i & 1) total = combine(total, static_cast<T>(values[i]));
    return total;
}
}  // namespace emulator
inline unsigned __ballot_sync(unsigned mask, int vote, FROM_HERE) {
    return emulator::lanes_where(mask, vote != 0, site, [](auto x) { return x != 0; });
}
inline int __any_sync(unsigned mask, int vote, FROM_HERE) { return __ballot_sync(mask, vote, site) != 0; }
inline int __all_sync(unsigned mask, int vote, FROM_HERE) { return __ballot_sync(mask, vote, site) == mask; }
template <class T> unsigned __match_any_sync(unsigned mask, T value, FROM_HERE) {
    unsigned long long bits = 0;
    memcpy(&bits, &value, sizeof value);
    return emulator::lanes_where(mask, bits, site, [=](auto x) { return x == bits; });
}
#define EMULATED_REDUCE(name, T, expression)                                                                          \
    inline T name(unsigned mask, T value, FROM_HERE) {                                                                  \
        return emulator::reduce(mask, value, site, [](T a, T b) -> T { return expression; });                         \
    }
EMULATED_REDUCE(__reduce_add_sync, unsigned, a + b)
EMULATED_REDUCE(__reduce_add_sync, int, int(unsigned(a) + unsigned(b)))
EMULATED_REDUCE(__reduce_max_sync, unsigned, a > b ? a : b)
EMULATED_REDUCE(__reduce_max_sync, int, a > b ? a : b)
EMULATED_REDUCE(__reduce_min_sync, unsigned, a < b ? a : b)
EMULATED_REDUCE(__reduce_min_sync, int, a < b ? a : b)
EMULATED_REDUCE(__reduce_and_sync, unsigned, a& b)
EMULATED_REDUCE(__reduce_or_sync, unsigned, a | b)
EMULATED_REDUCE(__reduce_xor_sync, unsigned, a ^ b)

#define EMULATED_ATOMIC(name, expression)                                                                             \
    template <class T> T name(T* at, std::type_identity_t<T> value) {                                                 \
        const T old = *at;                                                                                            \
        *at = expression;                                                                                             \
        return old;                                                                                                   \
    }
EMULATED_ATOMIC(atomicAdd, old + value)
EMULATED_ATOMIC(atomicSub, old - value)
EMULATED_ATOMIC(atomicMax, old > value ? old : value)
EMULATED_ATOMIC(atomicMin, old < value ? old : value)
EMULATED_ATOMIC(atomicExch, value)
EMULATED_ATOMIC(atomicOr, old | value)
EMULATED_ATOMIC(atomicAnd, old& value)
template <class T> T atomicCAS(T* at, std::type_identity_t<T> compare, std::type_identity_t<T> value) {
    const T old = *at;
    if (old == compare) *at = value;
    return old;
}
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}

extern "C" inline __attribute__((used, visibility("hidden"))) void __assertfail(const char* message, const char*, unsigned, const char*, size_t) {
    emulator::fail("%s", message);
}

template <class T> T __ldg(const T* at) { return *at; }
template <class T> T __ldcs(const T* at) { return *at; }
template <class T> T __ldcg(const T* at) { return *at; }
template <class T> T __ldlu(const T* at) { return *at; }
template <class T> T __ldcv(const T* at) { return *at; }
template <class T> void __stwb(T* at, std::type_identity_t<T> value) { *at = value; }
template <class T> void __stcs(T* at, std::type_identity_t<T> value) { *at = value; }
template <class T> void __stcg(T* at, std::type_identity_t<T> value) { *at = value; }
template <class T> void __stwt(T* at, std::type_identity_t<T> value) { *at = value; }

template <class A, class B> constexpr std::common_type_t<A, B> min(A a, B b) {
    const std::common_type_t<A, B> x = a, y = b;
    return y < x ? y : x;
}
template <class A, class B> constexpr std::common_type_t<A, B> max(A a, B b) {
    const std::common_type_t<A, B> x = a, y = b;
    return x < y ? y : x;
}

// The operand as it is in memory: g++ may fuse a product with a sum, as nvcc does, except through these.
inline float exactly(float x) {
    __asm__("" : "+m"(x));
    return x;
}
inline float __fmul_rn(float a, float b) { return exactly(a * b); }
inline float __fadd_rn(float a, float b) { return exactly(exactly(a) + exactly(b)); }
inline float __fsub_rn(float a, float b) { return exactly(exactly(a) - exactly(b)); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __frcp_rn(float x) { return 1.f / x; }
inline float __frsqrt_rn(float x) { return float(1. / std::sqrt(double(x))); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float rsqrtf(float x) { return float(1. / std::sqrt(double(x))); }
inline float __expf(float x) { return std::exp(x); }
inline float __exp10f(float x) { return std::pow(10.f, x); }
inline float __logf(float x) { return std::log(x); }
inline float __log2f(float x) { return std::log2(x); }
inline float __sinf(float x) { return std::sin(x); }
inline float __cosf(float x) { return std::cos(x); }
inline void __sincosf(float x, float* sine, float* cosine) { *sine = std::sin(x), *cosine = std::cos(x); }
inline float __powf(float x, float y) { return std::pow(x, y); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1.f) : 0.f; }
inline float fdividef(float a, float b) { return a / b; }

inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline long long __double_as_longlong(double x) { return std::bit_cast<long long>(x); }
inline double __longlong_as_double(long long x) { return std::bit_cast<double>(x); }
inline int __float2int_rn(float x) { return int(std::nearbyint(x)); }
inline int __float2int_rz(float x) { return int(x); }
inline int __float2int_rd(float x) { return int(std::floor(x)); }
inline int __float2int_ru(float x) { return int(std::ceil(x)); }
inline float __int2float_rn(int x) { return float(x); }
inline float __uint2float_rn(unsigned x) { return float(x); }
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __popcll(unsigned long long x) { return std::popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return std::countl_zero(unsigned(x)); }
inline int __clzll(long long x) { return std::countl_zero((unsigned long long)x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((unsigned long long)a * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
