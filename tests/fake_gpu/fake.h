/* The card that the stand-in is, and what its two libraries know of each other. */

#include <stddef.h>

#define NUM_DEVICES 8
#define NUM_PROCESSORS 132
#define DEVICE_BYTES 85017493504ul /* 79.2 GiB, as torch.cuda.mem_get_info says of an H100 */
#define CONTEXT_BYTES (512ul << 20)
#define SHARED_BYTES 232448

void fake_count(const char *name);
int fake_use(const char *call);
int fake_is_open(int device);
int fake_current(void);
void fake_set_current(int device);
int fake_take(int device, long size);
void fake_add_region(void *start, size_t size, int device);
size_t fake_drop_region(void *start, int *device);
int fake_find(const void *at, size_t size);
