/* A libcuda.so.1 for machines without NVIDIA's driver: libraries that are linked to the driver load, and find no GPU.
 *
 * Every function answers CUDA_ERROR_NO_DEVICE. Which there are: those that the packages of requirements/cuda-*.txt want
 * from it (`readelf -d` names libcuda.so.1, `nm -D --undefined-only` the functions).
 */

enum { NO_DEVICE = 100 };

static int say(const char **text, const char *what) {
    if (text)
        *text = what;
    return 0;
}

int cuGetErrorName(int error, const char **name) { return (void)error, say(name, "CUDA_ERROR_NO_DEVICE"); }
int cuGetErrorString(int error, const char **text) { return (void)error, say(text, "no GPU: tools/cuda/stub.c"); }

#define REFUSES(name) int name(void) { return NO_DEVICE; }
REFUSES(cuInit)
REFUSES(cuDriverGetVersion)
REFUSES(cuGetExportTable)
REFUSES(cuGetProcAddress_v2)
REFUSES(cuCtxFromGreenCtx)
REFUSES(cuCtxGetCurrent)
REFUSES(cuCtxGetDevice)
REFUSES(cuCtxGetId)
REFUSES(cuCtxPopCurrent_v2)
REFUSES(cuCtxPushCurrent_v2)
REFUSES(cuCtxSetCurrent)
REFUSES(cuDevicePrimaryCtxGetState)
REFUSES(cuDevicePrimaryCtxRetain)
REFUSES(cuDeviceGet)
REFUSES(cuDeviceGetAttribute)
REFUSES(cuDeviceGetCount)
REFUSES(cuDeviceGetDevResource)
REFUSES(cuDevResourceGenerateDesc)
REFUSES(cuDevSmResourceSplitByCount)
REFUSES(cuFuncGetAttribute)
REFUSES(cuFuncSetAttribute)
REFUSES(cuFuncSetCacheConfig)
REFUSES(cuGreenCtxCreate)
REFUSES(cuGreenCtxDestroy)
REFUSES(cuGreenCtxGetDevResource)
REFUSES(cuLaunchCooperativeKernel)
REFUSES(cuLaunchKernel)
REFUSES(cuLaunchKernelEx)
REFUSES(cuLinkAddData_v2)
REFUSES(cuLinkComplete)
REFUSES(cuLinkCreate_v2)
REFUSES(cuMemAddressFree)
REFUSES(cuMemAddressReserve)
REFUSES(cuMemCreate)
REFUSES(cuMemGetAllocationGranularity)
REFUSES(cuMemMap)
REFUSES(cuMemRelease)
REFUSES(cuMemSetAccess)
REFUSES(cuMemUnmap)
REFUSES(cuModuleGetFunction)
REFUSES(cuModuleLoad)
REFUSES(cuModuleLoadData)
REFUSES(cuModuleLoadDataEx)
REFUSES(cuModuleUnload)
REFUSES(cuOccupancyMaxActiveBlocksPerMultiprocessor)
REFUSES(cuPointerGetAttribute)
REFUSES(cuStreamCreate)
REFUSES(cuTensorMapEncodeTiled)
