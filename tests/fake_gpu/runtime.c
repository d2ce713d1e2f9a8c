/* The CUDA runtime, cuBLAS and NCCL of a machine with eight GPUs, on a machine without any.

It is loaded before torch's libraries (LD_PRELOAD) and answers in the place of libcudart, libcublas
and libnccl: see README.md. Memory of a device is memory of the host, of which only touched pages
exist; kernels are counted by name and compute nothing. What a driver refuses is refused with its
error: memory beyond that of a card, launches beyond its limits, pages that are registered twice,
handles of another device, and what a capture forbids.

Where FAKE_GPU_LOG names a folder, each process writes a file of JSON lines there: allocations,
registrations, contexts, streams, events, launches and the calls of NCCL, in order. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <driver_types.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "fake.h"

#define EXPORT __attribute__((visibility("default")))

/* --- the log and the counts */

static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static FILE *journal;
static int journal_of; /* the process that opened it: a fork opens its own */

typedef struct {
    char name[224];
    long count;
} Count;

static Count counts[8192];
static int num_counts;

EXPORT void fake_count(const char *name) {
    pthread_mutex_lock(&lock);
    int i = 0;
    while (i < num_counts && strncmp(counts[i].name, name, sizeof counts[i].name - 1)) i++;
    if (i == num_counts && i < 8192) strncpy(counts[num_counts++].name, name, sizeof counts[i].name - 1);
    if (i < 8192) counts[i].count++;
    pthread_mutex_unlock(&lock);
}

EXPORT void fake_forget_counts(void) {
    pthread_mutex_lock(&lock);
    memset(counts, 0, sizeof counts);
    num_counts = 0;
    pthread_mutex_unlock(&lock);
}

/* The counts as lines "NUMBER NAME"; the number of bytes that they have. */
EXPORT size_t fake_read_counts(char *into, size_t room) {
    size_t at = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < num_counts && at < room; i++)
        at += snprintf(into + at, room - at, "%ld %s\n", counts[i].count, counts[i].name);
    pthread_mutex_unlock(&lock);
    return at < room ? at : room;
}

static void print(const char *format, ...) {
    const char *folder = getenv("FAKE_GPU_LOG");
    if (!folder) return;
    pthread_mutex_lock(&lock);
    if (journal_of != getpid()) {
        char path[512];
        snprintf(path, sizeof path, "%s/%d.jsonl", folder, getpid());
        journal = fopen(path, "a");
        journal_of = getpid();
        const char *rank = getenv("RANK");
        if (journal) fprintf(journal, "{\"op\": \"process\", \"rank\": %s}\n", rank ? rank : "0");
    }
    if (journal) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        fprintf(journal, "{\"at\": %ld.%06ld, ", (long)now.tv_sec, now.tv_nsec / 1000);
        va_list values;
        va_start(values, format);
        vfprintf(journal, format, values);
        va_end(values);
        fputs("}\n", journal);
        fflush(journal);
    }
    pthread_mutex_unlock(&lock);
}

EXPORT void fake_print(const char *text) { print("%s", text); }

/* --- devices and errors */

static __thread int current;
static __thread int last_error;
static int opened[NUM_DEVICES];

static int fail(int error, const char *call) {
    last_error = error;
    print("\"op\": \"error\", \"call\": \"%s\", \"error\": %d", call, error);
    return error;
}

static void name_thread(char *into, size_t room) {
    FILE *file = fopen("/proc/thread-self/comm", "r");
    into[0] = 0;
    if (file && fgets(into, (int)room, file)) into[strcspn(into, "\n")] = 0;
    if (file) fclose(file);
    for (char *c = into; *c; c++)
        if (*c == '"' || *c == '\\') *c = '_';
}

/* The current device, whose context is opened by its first use, as the runtime does. */
EXPORT int fake_use(const char *call) {
    pthread_mutex_lock(&lock);
    if (!opened[current]) {
        char thread[32];
        name_thread(thread, sizeof thread);
        opened[current] = 1;
        print("\"op\": \"context\", \"device\": %d, \"call\": \"%s\", \"thread\": \"%s\"", current, call, thread);
    }
    pthread_mutex_unlock(&lock);
    return current;
}

EXPORT int fake_is_open(int device) { return opened[device]; }
EXPORT int fake_current(void) { return current; }
EXPORT void fake_set_current(int device) { current = device; }

EXPORT int cudaGetDeviceCount(int *count) { *count = NUM_DEVICES; return 0; }
EXPORT int cudaGetDevice(int *device) { *device = current; return 0; }
EXPORT int cudaSetDevice(int device) {
    if (device < 0 || device >= NUM_DEVICES) return fail(cudaErrorInvalidDevice, "cudaSetDevice");
    current = device;
    fake_use("cudaSetDevice");
    return 0;
}
EXPORT int cudaGetLastError(void) { int found = last_error; last_error = 0; return found; }
EXPORT int cudaPeekAtLastError(void) { return last_error; }
EXPORT int cudaDriverGetVersion(int *version) { *version = 13000; return 0; }
EXPORT int cudaRuntimeGetVersion(int *version) { *version = 13000; return 0; }
EXPORT int cudaDeviceGetPCIBusId(char *into, int room, int device) { snprintf(into, room, "0000:%02x:00.0", device + 1); return 0; }
EXPORT int cudaDeviceCanAccessPeer(int *can, int one, int other) { *can = one != other; return 0; }
EXPORT int cudaDeviceEnablePeerAccess(int peer, unsigned flags) { return 0; }
EXPORT int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return 0;
}

EXPORT const char *cudaGetErrorString(int error) {
    switch (error) {
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorInvalidResourceHandle: return "invalid resource handle";
    case cudaErrorHostMemoryAlreadyRegistered: return "part or all of the requested memory range is already mapped";
    case cudaErrorHostMemoryNotRegistered: return "pointer does not correspond to a registered memory region";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
    case cudaErrorStreamCaptureUnjoined: return "capturing stream has unjoined work";
    }
    return "an error";
}
EXPORT const char *cudaGetErrorName(int error) { return cudaGetErrorString(error); }

EXPORT int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMultiProcessorCount: *value = NUM_PROCESSORS; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = SHARED_BYTES; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    default: *value = 1;
    }
    return 0;
}

EXPORT int cudaGetDeviceProperties(struct cudaDeviceProp *into, int device) {
    memset(into, 0, sizeof *into);
    strcpy(into->name, "NVIDIA H100 80GB HBM3");
    memset(&into->uuid, device + 1, sizeof into->uuid);
    into->major = 9;
    into->multiProcessorCount = NUM_PROCESSORS;
    into->totalGlobalMem = DEVICE_BYTES;
    into->regsPerMultiprocessor = into->regsPerBlock = 65536;
    into->maxThreadsPerMultiProcessor = 2048;
    into->maxThreadsPerBlock = 1024;
    into->warpSize = 32;
    into->sharedMemPerBlock = 49152;
    into->sharedMemPerBlockOptin = SHARED_BYTES;
    into->sharedMemPerMultiprocessor = 233472;
    into->l2CacheSize = 50 << 20;
    into->maxThreadsDim[0] = into->maxThreadsDim[1] = 1024;
    into->maxThreadsDim[2] = 64;
    into->maxGridSize[0] = 2147483647;
    into->maxGridSize[1] = into->maxGridSize[2] = 65535;
    into->pciBusID = device + 1;
    into->memoryBusWidth = 5120;
    return 0;
}
EXPORT int cudaGetDeviceProperties_v2(struct cudaDeviceProp *into, int device) { return cudaGetDeviceProperties(into, device); }

/* --- memory of devices */

typedef struct {
    char *start;
    size_t size;
    int device;
} Region;

static Region *regions;
static int num_regions, room_for_regions;
static size_t held[NUM_DEVICES];

static char *map_pages(size_t size) {
    void *found = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return found == MAP_FAILED ? 0 : found;
}

/* Bytes of a device, taken or given back; 0 where the card has not so many. */
EXPORT int fake_take(int device, long size) {
    int good = 1;
    pthread_mutex_lock(&lock);
    if (size > 0 && held[device] + size > DEVICE_BYTES - CONTEXT_BYTES) good = 0;
    else held[device] += size;
    pthread_mutex_unlock(&lock);
    return good;
}

EXPORT void fake_add_region(void *start, size_t size, int device) {
    pthread_mutex_lock(&lock);
    if (num_regions == room_for_regions) {
        room_for_regions = room_for_regions ? 2 * room_for_regions : 1024;
        regions = realloc(regions, room_for_regions * sizeof *regions);
    }
    regions[num_regions++] = (Region){start, size, device};
    pthread_mutex_unlock(&lock);
}

/* Forget the region that begins here; its bytes. */
EXPORT size_t fake_drop_region(void *start, int *device) {
    size_t size = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < num_regions; i++)
        if (regions[i].start == (char *)start) {
            size = regions[i].size;
            *device = regions[i].device;
            regions[i] = regions[--num_regions];
            break;
        }
    pthread_mutex_unlock(&lock);
    return size;
}

/* The device of so many bytes at an address; -1: they are of none, or reach beyond what is there. */
EXPORT int fake_find(const void *at, size_t size) {
    int found = -1;
    char *begin = (char *)at, *end = begin + size;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < num_regions; i++) /* a segment that grew is regions one after another */
        if (begin >= regions[i].start && begin + !!size <= regions[i].start + regions[i].size) {
            begin = regions[i].start + regions[i].size;
            if (begin >= end) {
                found = regions[i].device;
                break;
            }
            i = -1;
        }
    pthread_mutex_unlock(&lock);
    return found;
}

static int is_capturing_anywhere(void);

EXPORT int cudaMalloc(void **into, size_t size) {
    int device = fake_use("cudaMalloc");
    fake_count("cudaMalloc");
    if (is_capturing_anywhere()) return fail(cudaErrorStreamCaptureUnsupported, "cudaMalloc");
    size_t whole = (size + 511) / 512 * 512;
    if (!fake_take(device, (long)whole)) return fail(cudaErrorMemoryAllocation, "cudaMalloc");
    *into = map_pages(whole ? whole : 4096);
    fake_add_region(*into, whole, device);
    print("\"op\": \"malloc\", \"device\": %d, \"bytes\": %zu, \"held\": %zu", device, whole, held[device]);
    return 0;
}
EXPORT int cudaMallocAsync(void **into, size_t size, void *stream) { return cudaMalloc(into, size); }
EXPORT int cudaFree(void *start) {
    int device = 0;
    size_t size = start ? fake_drop_region(start, &device) : 0;
    if (!size) return 0;
    fake_take(device, -(long)size);
    munmap(start, size);
    print("\"op\": \"free\", \"device\": %d, \"bytes\": %zu, \"held\": %zu", device, size, held[device]);
    return 0;
}
EXPORT int cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    int device = fake_use("cudaMemGetInfo");
    *total = DEVICE_BYTES;
    *free_bytes = DEVICE_BYTES - CONTEXT_BYTES - held[device];
    return 0;
}

/* --- pages of the host that a device reads */

typedef struct {
    unsigned long first, last;
    char *start;
} Pages;

static Pages registered[65536];
static int num_registered;

static int add_pages(void *start, size_t size) {
    unsigned long first = (unsigned long)start >> 12, last = ((unsigned long)start + size - 1) >> 12;
    for (int i = 0; i < num_registered; i++)
        if (first <= registered[i].last && registered[i].first <= last) return 0;
    if (num_registered < 65536) registered[num_registered++] = (Pages){first, last, start};
    return 1;
}

EXPORT int cudaHostRegister(void *start, size_t size, unsigned flags) {
    char thread[32];
    int device = fake_use("cudaHostRegister");
    name_thread(thread, sizeof thread);
    fake_count("cudaHostRegister");
    pthread_mutex_lock(&lock);
    int good = add_pages(start, size);
    pthread_mutex_unlock(&lock);
    print("\"op\": \"register\", \"device\": %d, \"bytes\": %zu, \"start\": %lu, \"thread\": \"%s\", \"good\": %s", device, size, (unsigned long)start, thread, good ? "true" : "false");
    return good ? 0 : fail(cudaErrorHostMemoryAlreadyRegistered, "cudaHostRegister");
}
EXPORT int cudaHostUnregister(void *start) {
    int found = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < num_registered; i++)
        if (registered[i].start == (char *)start) {
            registered[i] = registered[--num_registered];
            found = 1;
            break;
        }
    pthread_mutex_unlock(&lock);
    print("\"op\": \"unregister\", \"start\": %lu", (unsigned long)start);
    return found ? 0 : fail(cudaErrorHostMemoryNotRegistered, "cudaHostUnregister");
}
EXPORT int cudaHostAlloc(void **into, size_t size, unsigned flags) {
    fake_use("cudaHostAlloc");
    size = (size + 4095) / 4096 * 4096;
    *into = map_pages(size ? size : 4096);
    pthread_mutex_lock(&lock);
    add_pages(*into, size ? size : 4096);
    pthread_mutex_unlock(&lock);
    return 0;
}
EXPORT int cudaMallocHost(void **into, size_t size) { return cudaHostAlloc(into, size, 0); }
EXPORT int cudaFreeHost(void *start) { return cudaHostUnregister(start); }

typedef struct {
    int type, device;
    void *device_pointer, *host_pointer;
} Attributes;

EXPORT int cudaPointerGetAttributes(Attributes *into, const void *at) {
    memset(into, 0, sizeof *into);
    int device = fake_find(at, 1);
    unsigned long page = (unsigned long)at >> 12;
    into->device = device < 0 ? 0 : device;
    if (device >= 0) into->type = cudaMemoryTypeDevice;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < num_registered && device < 0; i++)
        if (registered[i].first <= page && page <= registered[i].last) into->type = cudaMemoryTypeHost;
    pthread_mutex_unlock(&lock);
    into->device_pointer = into->host_pointer = (void *)at;
    return 0;
}

/* --- streams, events and captures */

typedef struct {
    int id, device, capture; /* capture: its number; 0: none */
} Stream;
typedef struct {
    int id, device, capture;
} Event;
typedef struct {
    long kernels;
} Graph;

static int num_streams, num_events, num_captures;
static Stream defaults[NUM_DEVICES];
static Graph *captured[65536];
static int num_capturing;
static __thread int relaxed;

static int is_capturing_anywhere(void) { return num_capturing && !relaxed; }

static Stream *find_stream(void *handle) {
    /* 0, 1 and 2 are the legacy and per-thread default streams of the current device */
    if ((unsigned long)handle > 2) return handle;
    defaults[current].device = current;
    return &defaults[current];
}

static int name_stream(void *handle) {
    Stream *stream = find_stream(handle);
    return stream->device * 10000 + stream->id;
}

static int make_stream(void **into) {
    Stream *made = calloc(1, sizeof *made);
    made->id = __sync_add_and_fetch(&num_streams, 1);
    made->device = fake_use("cudaStreamCreate");
    *into = made;
    return 0;
}
EXPORT int cudaStreamCreate(void **into) { return make_stream(into); }
EXPORT int cudaStreamCreateWithFlags(void **into, unsigned flags) { return make_stream(into); }
EXPORT int cudaStreamCreateWithPriority(void **into, unsigned flags, int priority) { return make_stream(into); }
EXPORT int cudaStreamGetPriority(void *stream, int *priority) { *priority = 0; return 0; }
EXPORT int cudaStreamGetFlags(void *stream, unsigned *flags) { *flags = 1; return 0; }
EXPORT int cudaStreamGetId(void *stream, unsigned long long *id) { *id = name_stream(stream); return 0; }

static int make_event(void **into) {
    Event *made = calloc(1, sizeof *made);
    made->id = __sync_add_and_fetch(&num_events, 1);
    made->device = fake_use("cudaEventCreate");
    *into = made;
    return 0;
}
EXPORT int cudaEventCreate(void **into) { return make_event(into); }
EXPORT int cudaEventCreateWithFlags(void **into, unsigned flags) { return make_event(into); }
EXPORT int cudaEventElapsedTime(float *milliseconds, void *first, void *second) { *milliseconds = 1.0f; return 0; }
EXPORT int cudaEventElapsedTime_v2(float *milliseconds, void *first, void *second) { *milliseconds = 1.0f; return 0; }

EXPORT int cudaEventRecordWithFlags(Event *event, void *handle, unsigned flags) {
    Stream *stream = find_stream(handle);
    fake_count("cudaEventRecord");
    if (event->device != stream->device) return fail(cudaErrorInvalidResourceHandle, "cudaEventRecord");
    event->capture = stream->capture;
    print("\"op\": \"record\", \"event\": %d, \"stream\": %d", event->id, name_stream(handle));
    return 0;
}
EXPORT int cudaEventRecord(Event *event, void *stream) { return cudaEventRecordWithFlags(event, stream, 0); }
EXPORT int cudaStreamWaitEvent(void *handle, Event *event, unsigned flags) {
    Stream *stream = find_stream(handle);
    fake_count("cudaStreamWaitEvent");
    if (event->capture && !stream->capture) stream->capture = event->capture;
    print("\"op\": \"wait\", \"event\": %d, \"stream\": %d", event->id, name_stream(handle));
    return 0;
}
EXPORT int cudaEventQuery(Event *event) {
    if (event->capture && num_capturing && !relaxed) return fail(cudaErrorStreamCaptureUnsupported, "cudaEventQuery");
    print("\"op\": \"query\", \"event\": %d", event->id); /* and it has happened */
    return 0;
}
EXPORT int cudaStreamQuery(void *stream) { return find_stream(stream)->capture ? fail(cudaErrorStreamCaptureUnsupported, "cudaStreamQuery") : 0; }

static int synchronize(const char *call, int stream, int event) {
    char thread[32];
    fake_count(call);
    name_thread(thread, sizeof thread);
    print("\"op\": \"synchronize\", \"call\": \"%s\", \"stream\": %d, \"event\": %d, \"thread\": \"%s\"", call, stream, event, thread);
    return 0;
}
EXPORT int cudaStreamSynchronize(void *handle) {
    if (find_stream(handle)->capture) return fail(cudaErrorStreamCaptureUnsupported, "cudaStreamSynchronize");
    return synchronize("cudaStreamSynchronize", name_stream(handle), 0);
}
EXPORT int cudaDeviceSynchronize(void) {
    if (is_capturing_anywhere()) return fail(cudaErrorStreamCaptureUnsupported, "cudaDeviceSynchronize");
    fake_use("cudaDeviceSynchronize");
    return synchronize("cudaDeviceSynchronize", -1, 0);
}
EXPORT int cudaEventSynchronize(Event *event) {
    if (event->capture && num_capturing) return fail(cudaErrorStreamCaptureUnsupported, "cudaEventSynchronize");
    return synchronize("cudaEventSynchronize", -1, event->id);
}

EXPORT int cudaThreadExchangeStreamCaptureMode(int *mode) {
    int before = relaxed ? cudaStreamCaptureModeRelaxed : cudaStreamCaptureModeGlobal;
    relaxed = *mode == cudaStreamCaptureModeRelaxed;
    *mode = before;
    return 0;
}
EXPORT int cudaStreamBeginCapture(void *handle, int mode) {
    if ((unsigned long)handle <= 2) return fail(cudaErrorStreamCaptureUnsupported, "cudaStreamBeginCapture");
    Stream *stream = handle;
    if (stream->capture || num_captures == 65535) return fail(cudaErrorInvalidValue, "cudaStreamBeginCapture");
    stream->capture = ++num_captures;
    captured[stream->capture] = calloc(1, sizeof(Graph));
    num_capturing++;
    print("\"op\": \"capture\", \"number\": %d", stream->capture);
    return 0;
}
EXPORT int cudaStreamEndCapture(Stream *stream, void **into) {
    if (!stream->capture) return fail(cudaErrorInvalidValue, "cudaStreamEndCapture");
    *into = captured[stream->capture];
    print("\"op\": \"captured\", \"number\": %d, \"kernels\": %ld", stream->capture, captured[stream->capture]->kernels);
    stream->capture = 0;
    num_capturing--;
    return 0;
}
EXPORT int cudaStreamIsCapturing(void *handle, int *status) {
    *status = find_stream(handle)->capture ? 1 : 0;
    return 0;
}
EXPORT int cudaStreamGetCaptureInfo(void *handle, int *status, unsigned long long *id, void **graph, void *nodes, void *edges, size_t *count) {
    Stream *stream = find_stream(handle);
    *status = stream->capture ? 1 : 0;
    if (id) *id = stream->capture;
    if (graph) *graph = stream->capture ? captured[stream->capture] : 0;
    if (count) *count = 0;
    return 0;
}
EXPORT int cudaGraphInstantiate(void **into, void *graph, unsigned long long flags) { *into = graph; return 0; }
EXPORT int cudaGraphInstantiateWithFlags(void **into, void *graph, unsigned long long flags) { *into = graph; return 0; }
EXPORT int cudaGraphGetNodes(Graph *graph, void *nodes, size_t *count) { *count = graph->kernels; return 0; }
EXPORT int cudaGraphLaunch(Graph *graph, void *stream) {
    fake_count("cudaGraphLaunch");
    print("\"op\": \"replay\", \"kernels\": %ld, \"stream\": %d", graph->kernels, name_stream(stream));
    return 0;
}

/* --- launches */

typedef struct {
    unsigned x, y, z;
} Size;
typedef struct {
    const void *function;
    const char *name;
} Kernel;

static Kernel *kernels;
static int num_kernels, room_for_kernels;

EXPORT void __cudaRegisterFunction(void **library, const char *function, char *device, const char *name, int limit, void *t, void *b, void *bd, void *gd, int *w) {
    if (num_kernels == room_for_kernels) {
        room_for_kernels = room_for_kernels ? 2 * room_for_kernels : 65536;
        kernels = realloc(kernels, room_for_kernels * sizeof *kernels);
    }
    kernels[num_kernels++] = (Kernel){function, strdup(name)};
}

static const char *find_name(const void *function) {
    for (int i = 0; i < num_kernels; i++)
        if (kernels[i].function == function) return kernels[i].name;
    return "?";
}

/* Count a launch; the error of one that no H100 takes. */
EXPORT int fake_launch(const char *name, Size grid, Size block, size_t shared, void *handle) {
    Stream *stream = find_stream(handle);
    int device = fake_use(name);
    fake_count(name);
    int good = grid.x && grid.y && grid.z && block.x && block.y && block.z;
    good = good && grid.x <= 2147483647u && grid.y <= 65535 && grid.z <= 65535;
    good = good && block.x <= 1024 && block.y <= 1024 && block.z <= 64;
    good = good && (size_t)block.x * block.y * block.z <= 1024 && shared <= SHARED_BYTES;
    if (!good) {
        print("\"op\": \"refused\", \"kernel\": \"%.200s\", \"grid\": [%u, %u, %u], \"block\": [%u, %u, %u], \"shared\": %zu", name, grid.x, grid.y, grid.z, block.x, block.y, block.z, shared);
        return fail(cudaErrorInvalidConfiguration, "cudaLaunchKernel");
    }
    if (stream->device != device) return fail(cudaErrorInvalidResourceHandle, "cudaLaunchKernel");
    if (stream->capture) captured[stream->capture]->kernels++;
    print("\"op\": \"launch\", \"kernel\": \"%.200s\", \"stream\": %d", name, name_stream(handle));
    return 0;
}

EXPORT int cudaLaunchKernel(const void *function, Size grid, Size block, void **args, size_t shared, void *stream) { return fake_launch(find_name(function), grid, block, shared, stream); }
EXPORT int __cudaLaunchKernel(const void *function, Size grid, Size block, void **args, size_t shared, void *stream) { return fake_launch(find_name(function), grid, block, shared, stream); }
EXPORT int cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **args) {
    Size grid = {config->gridDim.x, config->gridDim.y, config->gridDim.z};
    Size block = {config->blockDim.x, config->blockDim.y, config->blockDim.z};
    return fake_launch(find_name(function), grid, block, config->dynamicSmemBytes, config->stream);
}
EXPORT int __cudaGetKernel(void **into, const void *function) { *into = (void *)function; return 0; }

static __thread Size next_grid, next_block;
static __thread size_t next_shared;
static __thread void *next_stream;
EXPORT unsigned __cudaPushCallConfiguration(Size grid, Size block, size_t shared, void *stream) {
    next_grid = grid, next_block = block, next_shared = shared, next_stream = stream;
    return 0;
}
EXPORT int __cudaPopCallConfiguration(Size *grid, Size *block, size_t *shared, void *stream) {
    *grid = next_grid, *block = next_block, *shared = next_shared, *(void **)stream = next_stream;
    return 0;
}
EXPORT int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *f, int block, size_t shared) { *count = 2; return 0; }
EXPORT int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *f, int block, size_t shared, unsigned flags) { *count = 2; return 0; }
EXPORT int cudaFuncGetAttributes(struct cudaFuncAttributes *into, const void *function) {
    memset(into, 0, sizeof *into);
    into->maxThreadsPerBlock = 1024;
    into->binaryVersion = into->ptxVersion = 90;
    return 0;
}

/* --- copies: real between hosts and devices where they are small, as programs read them */

static int copy(void *to, const void *from, size_t size, int kind, void *handle, const char *call) {
    static const char *kinds[] = {"host to host", "host to device", "device to host", "device to device", "default"};
    char name[64];
    snprintf(name, sizeof name, "%s, %s", call, kinds[kind < 5 ? kind : 4]);
    fake_use(call);
    fake_count(name);
    int one = fake_find(from, size), other = fake_find(to, size);
    if ((kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice) && one < 0 && size) return fail(cudaErrorInvalidValue, call);
    if ((kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice) && other < 0 && size) return fail(cudaErrorInvalidValue, call);
    if (kind != cudaMemcpyDeviceToDevice ? size < (64 << 20) : size < 65536) memcpy(to, from, size);
    Stream *stream = find_stream(handle);
    if (stream->capture) captured[stream->capture]->kernels++;
    print("\"op\": \"copy\", \"call\": \"%s\", \"kind\": %d, \"bytes\": %zu, \"reads\": [[%lu, %zu]], \"writes\": [[%lu, %zu]], \"stream\": %d", call, kind, size, (unsigned long)from, size, (unsigned long)to, size, name_stream(handle));
    return 0;
}
EXPORT int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) { return copy(to, from, size, kind, stream, "cudaMemcpyAsync"); }
EXPORT int cudaMemcpy(void *to, const void *from, size_t size, int kind) { return copy(to, from, size, kind, 0, "cudaMemcpy"); }
EXPORT int cudaMemcpyPeerAsync(void *to, int d, const void *from, int s, size_t size, void *stream) { return copy(to, from, size, cudaMemcpyDeviceToDevice, stream, "cudaMemcpyPeerAsync"); }
EXPORT int cudaMemsetAsync(void *to, int value, size_t size, void *handle) {
    fake_use("cudaMemsetAsync");
    fake_count("cudaMemsetAsync");
    if (size && fake_find(to, size) < 0) return fail(cudaErrorInvalidValue, "cudaMemsetAsync");
    if (size < 65536) memset(to, value, size);
    print("\"op\": \"set\", \"bytes\": %zu, \"writes\": [[%lu, %zu]], \"stream\": %d", size, (unsigned long)to, size, name_stream(handle));
    return 0;
}

EXPORT int cudaGetDriverEntryPointByVersion(const char *name, void **into, unsigned version, unsigned long long flags, int *status) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    *into = library ? dlsym(library, name) : 0;
    if (status) *status = *into ? 0 : 1;
    return 0;
}
EXPORT int cudaGetDriverEntryPoint(const char *name, void **into, unsigned long long flags, int *status) { return cudaGetDriverEntryPointByVersion(name, into, 13000, flags, status); }

/* --- cuBLAS: products are launches */

static int product(const char *name, void *handle) {
    Size one = {1, 1, 1};
    return fake_launch(name, one, one, 0, handle ? *(void **)handle : 0);
}
EXPORT int cublasCreate_v2(void **into) { *into = calloc(1, 64); return 0; }
EXPORT int cublasSetStream_v2(void **handle, void *stream) { *handle = stream; return 0; }
EXPORT int cublasGetMathMode(void *handle, int *mode) { *mode = 0; return 0; }
EXPORT int cublasGetPointerMode_v2(void *handle, int *mode) { *mode = 0; return 0; }
EXPORT int cublasGemmEx(void *handle) { return product("cublasGemmEx", handle); }
EXPORT int cublasGemmStridedBatchedEx(void *handle) { return product("cublasGemmStridedBatchedEx", handle); }
EXPORT int cublasSgemm_v2(void *handle) { return product("cublasSgemm", handle); }
EXPORT int cublasDgemm_v2(void *handle) { return product("cublasDgemm", handle); }
EXPORT int cublasSgemmStridedBatched(void *handle) { return product("cublasSgemmStridedBatched", handle); }
EXPORT int cublasLtCreate(void **into) { *into = calloc(1, 64); return 0; }
EXPORT int cublasLtMatmul(void *handle) { return product("cublasLtMatmul", 0); }
EXPORT int cublasLtMatmulDescCreate(void **into) { *into = calloc(1, 256); return 0; }
EXPORT int cublasLtMatrixLayoutCreate(void **into) { *into = calloc(1, 256); return 0; }
EXPORT int cublasLtMatmulPreferenceCreate(void **into) { *into = calloc(1, 256); return 0; }
EXPORT int cublasLtMatmulAlgoGetHeuristic(void *h, void *op, void *a, void *b, void *c, void *d, void *preference, int room, char *into, int *count) {
    memset(into, 0, 64);
    *count = 1;
    return 0;
}

/* --- NCCL: calls are logged in the order of each process */

typedef struct {
    int rank, size, id, splits;
    char group[64];
} Communicator;
typedef struct {
    char bytes[128];
} UniqueId;

static int num_communicators;
static const int TYPE_BYTES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

EXPORT int ncclGetVersion(int *version) { *version = 22809; return 0; }
/* One rank makes it and sends it to the others, so that it names the communicator on all of them. */
EXPORT int ncclGetUniqueId(UniqueId *into) {
    static int num_ids;
    memset(into, 0, sizeof *into);
    snprintf(into->bytes, sizeof into->bytes, "%d-%d", getpid(), ++num_ids);
    return 0;
}
static int make_communicator(void **into, int size, int rank, const char *group) {
    Communicator *made = calloc(1, sizeof *made);
    *made = (Communicator){rank, size, ++num_communicators};
    snprintf(made->group, sizeof made->group, "%s", group);
    fake_use("ncclCommInitRank");
    print("\"op\": \"communicator\", \"group\": \"%s\", \"size\": %d, \"rank\": %d, \"device\": %d", made->group, size, rank, current);
    *into = made;
    return 0;
}
EXPORT int ncclCommInitRank(void **into, int size, UniqueId id, int rank) { return make_communicator(into, size, rank, id.bytes); }
EXPORT int ncclCommInitRankConfig(void **into, int size, UniqueId id, int rank, void *config) { return make_communicator(into, size, rank, id.bytes); }
EXPORT int ncclCommInitRankScalable(void **into, int size, int rank, int ids, UniqueId *id, void *config) { return make_communicator(into, size, rank, id->bytes); }
EXPORT int ncclCommSplit(Communicator *from, int color, int key, void **into, void *config) {
    char group[64];
    snprintf(group, sizeof group, "%.40s/%d.%d", from->group, ++from->splits, color);
    *into = 0;
    return color < 0 ? 0 : make_communicator(into, -1, key, group); /* NCCL would count the others */
}
EXPORT int ncclCommAbort(Communicator *comm) { print("\"op\": \"abort\", \"group\": \"%s\"", comm->group); return 0; }
EXPORT int ncclCommCount(Communicator *comm, int *count) { *count = comm->size; return 0; }
EXPORT int ncclCommUserRank(Communicator *comm, int *rank) { *rank = comm->rank; return 0; }
EXPORT int ncclCommGetAsyncError(Communicator *comm, int *error) { *error = 0; return 0; }
EXPORT const char *ncclGetErrorString(int error) { return error ? "an error" : "no error"; }
EXPORT const char *ncclGetLastError(void *comm) { return ""; }
EXPORT int ncclGroupStart(void) { print("\"op\": \"group\""); return 0; }
EXPORT int ncclGroupEnd(void) { print("\"op\": \"end\""); return 0; }

static int collective(const char *name, const void *from, size_t reads, void *to, size_t writes, int type, int peer, Communicator *comm, void *stream) {
    size_t each = type >= 0 && type < 12 ? TYPE_BYTES[type] : 1;
    fake_use(name);
    fake_count(name);
    if (find_stream(stream)->capture) captured[find_stream(stream)->capture]->kernels++;
    print("\"op\": \"nccl\", \"name\": \"%s\", \"group\": \"%s\", \"count\": %zu, \"type\": %d, \"peer\": %d, \"reads\": [[%lu, %zu]], \"writes\": [[%lu, %zu]], \"stream\": %d", name, comm->group, reads ? reads : writes, type, peer, (unsigned long)from, reads * each, (unsigned long)to, writes * each, name_stream(stream));
    if ((reads && fake_find(from, reads * each) < 0) || (writes && fake_find(to, writes * each) < 0)) {
        print("\"op\": \"error\", \"call\": \"%s\", \"error\": 4", name);
        return 4; /* ncclInvalidArgument */
    }
    /* small results are those of ranks that all send what this one does, as far as programs read them */
    if (from && to && writes * each <= 65536)
        for (size_t at = 0; at < writes * each; at += reads * each) {
            size_t left = writes * each - at;
            memmove((char *)to + at, from, left < reads * each ? left : reads * each);
        }
    return 0;
}
EXPORT int ncclAllReduce(const void *s, void *r, size_t n, int type, int op, Communicator *c, void *stream) { return collective("AllReduce", s, n, r, n, type, -1, c, stream); }
EXPORT int ncclAllGather(const void *s, void *r, size_t n, int type, Communicator *c, void *stream) { return collective("AllGather", s, n, r, n * (c->size > 0 ? c->size : 1), type, -1, c, stream); }
EXPORT int ncclReduceScatter(const void *s, void *r, size_t n, int type, int op, Communicator *c, void *stream) { return collective("ReduceScatter", s, n * (c->size > 0 ? c->size : 1), r, n, type, -1, c, stream); }
EXPORT int ncclBroadcast(const void *s, void *r, size_t n, int type, int root, Communicator *c, void *stream) { return collective("Broadcast", s, n, r, n, type, root, c, stream); }
EXPORT int ncclReduce(const void *s, void *r, size_t n, int type, int op, int root, Communicator *c, void *stream) { return collective("Reduce", s, n, r, n, type, root, c, stream); }
EXPORT int ncclSend(const void *s, size_t n, int type, int peer, Communicator *c, void *stream) { return collective("Send", s, n, 0, 0, type, peer, c, stream); }
EXPORT int ncclRecv(void *r, size_t n, int type, int peer, Communicator *c, void *stream) { return collective("Recv", 0, 0, r, n, type, peer, c, stream); }
EXPORT int ncclAlltoAll(const void *s, void *r, size_t n, int type, Communicator *c, void *stream) { return collective("AlltoAll", s, n * (c->size > 0 ? c->size : 1), r, n * (c->size > 0 ? c->size : 1), type, -1, c, stream); }
