// A CUDA driver that runs nothing, and remembers what it was asked: for test_launch.py.
#include <dlfcn.h>
#include <cstring>
#include <string>

using u32 = unsigned int;
using u64 = unsigned long long;

struct Launch {
    u32 grid[3], block[3], shared;
    u64 stream, function, arguments[16];
};
static Launch last;
static std::string kinds = "";  // of the arguments to come: a letter each, f for floats
static int launches = 0, loads = 0, attribute = -1;
static bool current = true;

extern "C" {
void expect(const char* arguments) { kinds = arguments; }
void lose_context() { current = false; }
const Launch* launched() { return &last; }
int number_of_launches() { return launches; }
int number_of_loads() { return loads; }
int dynamic_shared_bytes() { return attribute; }

int cuInit(u32) { return 0; }
int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
int cuDeviceGet(int* device, int index) { return *device = index, 0; }
int cuDevicePrimaryCtxRetain(void** context, int) { return *context = (void*)3, 0; }
int cuCtxSetCurrent(void* context) { return current = context == (void*)3, 0; }
int cuThreadExchangeStreamCaptureMode(int* mode) { return *mode = 0, 0; }
int cuLibraryLoadData(void** library, const void* code, void*, void*, u32, void*, void*, u32) {
    ++loads;
    *library = (void*)5;
    return std::memcmp(code, "\177ELF", 4) ? 200 : 0;
}
int cuLibraryGetKernel(void** kernel, void*, const char* name) {
    *kernel = (void*)7;
    return std::strcmp(name, "sum_of_nothing") ? 0 : 500;
}
int cuKernelGetFunction(void** function, void*) { return *function = (void*)11, 0; }
int cuFuncGetAttribute(int* value, int name, void*) { return *value = name == 0 ? 256 : name == 1 ? 1024 : -1, 0; }
int cuFuncSetAttribute(void*, int name, int value) { return attribute = name == 8 ? value : -1, 0; }
int cuLaunchKernel(void* function, u32 gx, u32 gy, u32 gz, u32 bx, u32 by, u32 bz, u32 shared, void* stream,
                   void** parameters, void** extra) {
    if (!current) return 201;
    ++launches;
    last = {{gx, gy, gz}, {bx, by, bz}, shared, (u64)stream, (u64)function, {}};
    for (size_t i = 0; i < kinds.size(); ++i) std::memcpy(&last.arguments[i], parameters[i], kinds[i] == 'f' ? 4 : 8);
    return extra ? 1 : 0;
}
int cuGetProcAddress_v2(const char* name, void** function, int, u64, int* status) {
    *function = dlsym(dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_LAZY), name);
    if (status) *status = *function ? 0 : 1;
    return *function ? 0 : 500;
}
int cuGetProcAddress(const char* name, void** function, int version, u64 flags) {
    return cuGetProcAddress_v2(name, function, version, flags, nullptr);
}
}
