/* A stub driver for machines without one, which is built under two names. As libcuda.so.1 it lets the libraries of CUDA
   wheels load and returns "no device" from every call. As libnvidia-ml.so.1 it lists one H100, so that engines plan for
   it. */
#include <string.h>

#define NO_DEVICE(name) int name(void) { return 100; }
NO_DEVICE(cuInit) NO_DEVICE(cuDriverGetVersion) NO_DEVICE(cuGetErrorName) NO_DEVICE(cuGetErrorString)
NO_DEVICE(cuGetExportTable) NO_DEVICE(cuGetProcAddress) NO_DEVICE(cuGetProcAddress_v2)
NO_DEVICE(cuCtxFromGreenCtx) NO_DEVICE(cuCtxGetCurrent) NO_DEVICE(cuCtxGetDevice) NO_DEVICE(cuCtxPopCurrent_v2)
NO_DEVICE(cuCtxPushCurrent_v2) NO_DEVICE(cuCtxSetCurrent) NO_DEVICE(cuDevResourceGenerateDesc)
NO_DEVICE(cuDevSmResourceSplitByCount) NO_DEVICE(cuDeviceGet) NO_DEVICE(cuDeviceGetAttribute)
NO_DEVICE(cuDeviceGetCount) NO_DEVICE(cuDeviceGetDevResource) NO_DEVICE(cuDeviceGetName)
NO_DEVICE(cuDevicePrimaryCtxGetState) NO_DEVICE(cuDevicePrimaryCtxRelease_v2) NO_DEVICE(cuDevicePrimaryCtxRetain)
NO_DEVICE(cuFuncGetAttribute) NO_DEVICE(cuFuncSetAttribute) NO_DEVICE(cuFuncSetCacheConfig)
NO_DEVICE(cuGreenCtxCreate) NO_DEVICE(cuGreenCtxDestroy) NO_DEVICE(cuGreenCtxGetDevResource)
NO_DEVICE(cuLaunchCooperativeKernel) NO_DEVICE(cuLaunchKernel) NO_DEVICE(cuLaunchKernelEx)
NO_DEVICE(cuLinkAddData_v2) NO_DEVICE(cuLinkComplete) NO_DEVICE(cuLinkCreate_v2)
NO_DEVICE(cuMemAddressFree) NO_DEVICE(cuMemAddressReserve) NO_DEVICE(cuMemCreate)
NO_DEVICE(cuMemGetAllocationGranularity) NO_DEVICE(cuMemMap) NO_DEVICE(cuMemRelease) NO_DEVICE(cuMemSetAccess)
NO_DEVICE(cuMemUnmap) NO_DEVICE(cuModuleGetFunction) NO_DEVICE(cuModuleLoad) NO_DEVICE(cuModuleLoadData)
NO_DEVICE(cuModuleLoadDataEx) NO_DEVICE(cuModuleUnload) NO_DEVICE(cuOccupancyMaxActiveBlocksPerMultiprocessor)
NO_DEVICE(cuPointerGetAttribute) NO_DEVICE(cuStreamCreate) NO_DEVICE(cuTensorMapEncodeTiled)

struct memory { unsigned long long total, free, used; };
static int copy_text(char *text, const char *value, unsigned size) { strncpy(text, value, size); return 0; }
int nvmlInit(void) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return "not in this driver"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { return copy_text(text, "580.0", size); }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = "device"; return index ? 2 : 0; }
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) { *major = 9; *minor = 0; return 0; }
int nvmlDeviceGetName(void *device, char *text, unsigned size) { return copy_text(text, "NVIDIA H100 80GB HBM3", size); }
int nvmlDeviceGetUUID(void *device, char *text, unsigned size) { return copy_text(text, "GPU-0", size); }
int nvmlDeviceGetMemoryInfo(void *device, struct memory *memory) {
  memory->total = memory->free = 80ull << 30;
  memory->used = 0;
  return 0;
}
