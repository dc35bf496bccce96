/* A libcuda that launches nothing: it keeps the last launch through cuLaunchKernelEx (0: Triton's launcher) and through
   cuLaunchKernel (1: a direct launch), and puts into a tensor map what it is made from. */
#include <stdint.h>
#include <string.h>

int sizes[128], parameters; /* of the kernel that is launched */
int launches[2];
unsigned char bytes[2][16384];
unsigned dimensions[2][8];
uint64_t handles[2][2];

static int keep(int way, const unsigned *config, uint64_t function, uint64_t stream, void **params) {
  int offset = 0;
  memcpy(dimensions[way], config, 28);
  handles[way][0] = function;
  handles[way][1] = stream;
  for (int i = 0; i < parameters; offset += sizes[i++]) memcpy(bytes[way] + offset, params[i], sizes[i]);
  launches[way]++;
  return 0;
}

int cuLaunchKernelEx(const unsigned *config, void *function, void **params, void **extra) {
  dimensions[0][7] = *(const unsigned *)((const char *)config + 48); /* attributes: none */
  return keep(0, config, (uint64_t)function, *(const uint64_t *)((const char *)config + 32), params);
}

int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **params, void **extra) {
  unsigned config[7] = {x, y, z, bx, by, bz, shared};
  return extra ? 1 : keep(1, config, (uint64_t)function, (uint64_t)stream, params);
}

int cuTensorMapEncodeTiled(void *map, int dtype, unsigned rank, void *address, const uint64_t *shape,
                           const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int interleave,
                           int swizzle, int promotion, int fill) {
  int third = rank > 2;
  uint64_t words[16] = {(uint64_t)address, ~0ull, dtype, rank, shape[0], shape[1], third ? shape[2] : 0, strides[0],
                        third ? strides[1] : 0, box[0], box[1], third ? box[2] : 0,
                        steps[0] | steps[1] << 8 | (third ? steps[2] : 0) << 16, interleave, swizzle,
                        promotion | fill << 8};
  memcpy(map, words, 128);
  return 0;
}

int cuGetErrorString(int error, const char **text) { return *text = "stub", 0; }
int cuDriverGetVersion(int *version) { return *version = 13000, 0; }
int cuCtxGetCurrent(void **context) { return *context = (void *)1, 0; }
int cuPointerGetAttribute(uint64_t *value, int which, uint64_t pointer) { return *value = pointer, 0; }
#define UNUSED(name) int name(void) { return 1; }
UNUSED(cuDeviceGet) UNUSED(cuDevicePrimaryCtxRetain) UNUSED(cuDevicePrimaryCtxRelease) UNUSED(cuCtxSetCurrent)
UNUSED(cuModuleLoadData) UNUSED(cuModuleGetFunction) UNUSED(cuModuleUnload) UNUSED(cuFuncGetAttribute)
UNUSED(cuFuncSetAttribute) UNUSED(cuFuncSetCacheConfig) UNUSED(cuDeviceGetAttribute) UNUSED(cuDeviceGetCount)
UNUSED(cuOccupancyMaxActiveClusters) UNUSED(cuCtxGetLimit) UNUSED(cuCtxSetLimit) UNUSED(cuInit) UNUSED(cuCtxGetDevice)
UNUSED(cuStreamIsCapturing) UNUSED(cuModuleGetGlobal) UNUSED(cuTensorMapEncodeIm2col)
