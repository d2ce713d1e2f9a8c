/* The CUDA driver (libcuda.so.1) of the machine that runtime.c describes.

torch reaches it for contexts, memory in segments that grow, and kernels that are loaded from cubins:
Triton's and functron's own. Names that torch looks up and that are not here answer "success". */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "fake.h"

#define EXPORT __attribute__((visibility("default")))

typedef struct {
    unsigned x, y, z;
} Size;
int fake_launch(const char *name, Size grid, Size block, size_t shared, void *stream);

#define INVALID_VALUE 1
#define OUT_OF_MEMORY 2
#define NOT_FOUND 500

static int succeed(void) { return 0; }

EXPORT int cuInit(unsigned flags) { return 0; }
/* NVRTC asks for a table of the driver's own, and calls it unseen where it is not refused. */
EXPORT int cuGetExportTable(void **into, const void *id) { *into = 0; return NOT_FOUND; }
EXPORT int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
EXPORT int cuDeviceGetCount(int *count) { *count = NUM_DEVICES; return 0; }
EXPORT int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
EXPORT int cuDeviceGetName(char *into, int room, int device) { strncpy(into, "NVIDIA H100 80GB HBM3", room); return 0; }
EXPORT int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = DEVICE_BYTES; return 0; }
EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device) {
    switch (attribute) {
    case 1: *value = 1024; break;           /* threads of a block */
    case 10: *value = 32; break;            /* of a warp */
    case 16: *value = NUM_PROCESSORS; break;
    case 75: *value = 9; break;
    case 76: *value = 0; break;
    case 97: *value = SHARED_BYTES; break;
    default: *value = 1;
    }
    return 0;
}

/* A context's handle is 0x1000 and its device. */
static void *context_of(int device) { return (void *)(0x1000l + device); }
EXPORT int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    if (flags) *flags = 0;
    *active = fake_is_open(device);
    return 0;
}
EXPORT int cuDevicePrimaryCtxRetain(void **context, int device) { *context = context_of(device); return 0; }
EXPORT int cuDevicePrimaryCtxRelease_v2(int device) { return 0; }
EXPORT int cuCtxGetCurrent(void **context) {
    *context = fake_is_open(fake_current()) ? context_of(fake_current()) : 0;
    return 0;
}
EXPORT int cuCtxSetCurrent(void *context) {
    if (context) fake_set_current((int)((long)context - 0x1000));
    return 0;
}
EXPORT int cuCtxGetDevice(int *device) { *device = fake_current(); return 0; }
EXPORT int cuCtxPushCurrent_v2(void *context) { return cuCtxSetCurrent(context); }
EXPORT int cuCtxPopCurrent_v2(void **context) { *context = context_of(fake_current()); return 0; }
EXPORT int cuCtxGetLimit(size_t *value, int limit) { *value = 1 << 20; return 0; }
EXPORT int cuCtxSetLimit(int limit, size_t value) { return 0; }
EXPORT int cuThreadExchangeStreamCaptureMode(int *mode) { return 0; }
EXPORT int cuGetErrorString(int error, const char **text) { *text = error == OUT_OF_MEMORY ? "out of memory" : "an error"; return 0; }
EXPORT int cuGetErrorName(int error, const char **text) { return cuGetErrorString(error, text); }

/* --- kernels: a function is its name */

EXPORT int cuLibraryLoadData(void **library, const void *code, void *o, void *ov, unsigned n, void *l, void *lv, unsigned m) {
    *library = (void *)0x2000;
    return code ? 0 : INVALID_VALUE;
}
EXPORT int cuLibraryUnload(void *library) { return 0; }
EXPORT int cuLibraryGetKernel(void **kernel, void *library, const char *name) { *kernel = strdup(name); return 0; }
EXPORT int cuKernelGetFunction(void **function, void *kernel) { *function = kernel; return 0; }
EXPORT int cuModuleLoadData(void **module, const void *code) { *module = (void *)0x2000; return 0; }
EXPORT int cuModuleLoad(void **module, const char *file) { *module = (void *)0x2000; return 0; }
EXPORT int cuModuleLoadDataEx(void **module, const void *code, unsigned n, void *o, void *v) { *module = (void *)0x2000; return 0; }
EXPORT int cuModuleGetFunction(void **function, void *module, const char *name) { *function = strdup(name); return 0; }
EXPORT int cuModuleUnload(void *module) { return 0; }
EXPORT int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = attribute == 0 ? 1024 : 0; return 0; }
EXPORT int cuFuncSetAttribute(void *function, int attribute, int value) {
    return attribute == 8 && value > SHARED_BYTES ? INVALID_VALUE : 0;
}
EXPORT int cuFuncSetCacheConfig(void *function, int config) { return 0; }
EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, void *f, int block, size_t shared) { *count = 2; return 0; }
EXPORT int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *stream, void **args, void **extra) {
    char name[256] = "own: ";
    Size grid = {gx, gy, gz}, block = {bx, by, bz};
    strncat(name, function, 200);
    return fake_launch(name, grid, block, shared, stream);
}

/* --- memory in segments that grow: pages of a card, mapped into reserved addresses */

typedef struct {
    size_t size;
    int device;
} Pages;

EXPORT int cuMemGetAllocationGranularity(size_t *bytes, const void *properties, int option) { *bytes = 2 << 20; return 0; }
EXPORT int cuMemAddressReserve(void **into, size_t size, size_t align, void *at, unsigned long long flags) {
    void *found = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) return OUT_OF_MEMORY;
    *into = found;
    return 0;
}
EXPORT int cuMemAddressFree(void *at, size_t size) { munmap(at, size); return 0; }
EXPORT int cuMemCreate(Pages **into, size_t size, const void *properties, unsigned long long flags) {
    int device = fake_use("cuMemCreate");
    if (!fake_take(device, (long)size)) return OUT_OF_MEMORY;
    *into = malloc(sizeof **into);
    **into = (Pages){size, device};
    return 0;
}
EXPORT int cuMemRelease(Pages *pages) { return 0; } /* goes when it is unmapped */
EXPORT int cuMemMap(void *at, size_t size, size_t offset, Pages *pages, unsigned long long flags) {
    fake_add_region(at, size, pages->device);
    return 0;
}
EXPORT int cuMemUnmap(void *at, size_t size) {
    int device = 0;
    size_t found = fake_drop_region(at, &device);
    fake_take(device, -(long)found);
    return 0;
}
EXPORT int cuMemSetAccess(void *at, size_t size, const void *access, size_t count) { return 0; }
/* torch looks for all of these before it makes a segment; none hands memory to another process here */
#define REFUSED(name) EXPORT int name(void) { return 801; }
REFUSED(cuMemGetAddressRange)
REFUSED(cuMemExportToShareableHandle)
REFUSED(cuMemImportFromShareableHandle)
REFUSED(cuMemRetainAllocationHandle)
REFUSED(cuMemGetAllocationPropertiesFromHandle)
REFUSED(cuMemsetD32Async)
REFUSED(cuStreamWriteValue32)
/* NVML, for the same: no device is in a fabric */
EXPORT int nvmlInit_v2(void) { return 0; }
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) { *device = (void *)0x3000; return 0; }
EXPORT int nvmlDeviceGetGpuFabricInfoV(void *device, void *about) { return 0; }
EXPORT int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *each) { *count = 0; return 0; }
#define NOT_SUPPORTED(name) EXPORT int name(void) { return 3; }
NOT_SUPPORTED(nvmlDeviceGetNvLinkRemoteDeviceType)
NOT_SUPPORTED(nvmlDeviceGetNvLinkRemotePciInfo_v2)
NOT_SUPPORTED(nvmlSystemGetCudaDriverVersion_v2)
EXPORT int cuPointerGetAttribute(void *into, int attribute, void *at) { *(void **)into = at; return 0; }

EXPORT int cuGetProcAddress_v2(const char *name, void **into, int version, unsigned long long flags, int *status) {
    void *library = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_NOW);
    void *found = library ? dlsym(library, name) : 0;
    if (library && !found) {
        char longer[128];
        strncpy(longer, name, 120);
        longer[120] = 0;
        found = dlsym(library, strcat(longer, "_v2"));
    }
    *into = found ? found : (void *)succeed;
    if (status) *status = 0;
    return 0;
}
EXPORT int cuGetProcAddress(const char *name, void **into, int version, unsigned long long flags) { return cuGetProcAddress_v2(name, into, version, flags, 0); }
