// Stands for CANN's libascendcl.so, the runtime below torch_npu: devices, memory, streams, events, graphs.
// Device memory is the host's, and a stream runs what it is given at once.
//
// Compiled against the ACL headers that the torch_npu wheel carries: a signature that differs from theirs
// is a compile error. Functions that torch_npu links to and that are not here are made by build.sh as stubs
// that report a failure.
//
// Environment, read when asked:
//   FAKE_NPU_SOC       the SoC's name: Ascend910A (saturates, no FP32 products), Ascend910B1 (inf, HF32)
//   FAKE_NPU_COUNT     cards in the machine
//   FAKE_NPU_HBM_MB    memory of each card
//   FAKE_CANN_VERSION  what CANN says it is
//   FAKE_TRACE         print functions that are stubs, and operands of the matrix unit, to stderr
//   FAKE_LAX           let an operator that nobody implements fail instead of ending the process with 97
#include <acl/acl.h>
#include <acl/acl_op_compiler.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kMaxDevices = 64;
constexpr aclError kNotSupported = 500004;

struct Block { int device; size_t bytes; };
struct Event { Clock::time_point recorded; };
struct Stream { int id; uint32_t overflow_switch = 0; };

std::mutex memory_mutex;
std::map<void*, Block> blocks;
size_t used_bytes[kMaxDevices];

std::mutex fault_mutex;
std::string fault_operator;
int fault_code = 0;
long fault_after = 0;

// A capture keeps the calls of operators and copies; a replay makes them again.
struct Graph { std::vector<std::function<int()>> calls; };
Graph* capturing = nullptr;
bool capture_is_valid = true;

std::atomic<int> next_stream{1};
int64_t system_options[64];

// As in CANN, the current device and the text of the last error belong to a thread.
thread_local int current_device = -1;
thread_local std::string last_message;

long number(const char* name, long otherwise) {
  const char* text = getenv(name);
  return text && *text ? atol(text) : otherwise;
}

std::string text(const char* name, const char* otherwise) {
  const char* found = getenv(name);
  return found && *found ? found : otherwise;
}

size_t memory_bytes() { return static_cast<size_t>(number("FAKE_NPU_HBM_MB", 4096)) << 20; }
int device() { return current_device < 0 ? 0 : current_device; }

// The cards of ASCEND_RT_VISIBLE_DEVICES: a comma list, read up to its first bad entry.
// This parsing is ours, not CANN's.
std::vector<int> visible_devices() {
  const int count = static_cast<int>(number("FAKE_NPU_COUNT", 2));
  std::vector<int> visible;
  const char* listed = getenv("ASCEND_RT_VISIBLE_DEVICES");
  if (!listed) {
    for (int i = 0; i < count; i++) visible.push_back(i);
    return visible;
  }
  std::string rest = listed;
  while (true) {
    const size_t comma = rest.find(',');
    const std::string entry = rest.substr(0, comma);
    const bool digits = !entry.empty() && entry.find_first_not_of("0123456789") == std::string::npos;
    if (!digits || atoi(entry.c_str()) >= count) break;
    visible.push_back(atoi(entry.c_str()));
    if (comma == std::string::npos) break;
    rest = rest.substr(comma + 1);
  }
  return visible;
}

}  // namespace

extern "C" {

// ---- What tests and the stand-in for libopapi.so call; no part of ACL ----

// From now on `op` fails with `code`, after `after` more calls of it; code 0 ends that. "" is every operator,
// "sync" a synchronisation, "memcpy" a copy; "replay" a graph that computes nothing and reports nothing.
// A fault stays until it is ended.
void fakeacl_set_fault(const char* op, int code, long after) {
  std::lock_guard<std::mutex> lock(fault_mutex);
  fault_operator = op ? op : "";
  fault_code = code;
  fault_after = after;
}

// What `op` returns: 0, or the code of a fault that is due.
int fakeacl_check_fault(const char* op) {
  std::lock_guard<std::mutex> lock(fault_mutex);
  if (fault_code == 0 || (!fault_operator.empty() && fault_operator != op)) return 0;
  if (fault_after > 0) {
    fault_after--;
    return 0;
  }
  last_message = fault_code == ACL_ERROR_RT_MEMORY_ALLOCATION
      ? "EL0004: Failed to allocate memory."
      : "EZ9999: Inner Error!\nEZ9999: [PID: " + std::to_string(getpid()) + "] simulated fault in " + op +
            ", retCode=" + std::to_string(fault_code);
  return fault_code;
}

void fakeacl_set_message(const char* message) { last_message = message; }
long fakeacl_used_bytes(int of_device) { return static_cast<long>(used_bytes[of_device]); }

// ---- Start, versions, names ----

aclError aclInit(const char*) { return 0; }
aclError aclFinalize() { return 0; }
void aclAppLog(aclLogLevel, const char*, const char*, uint32_t, const char*, ...) {}

const char* aclGetRecentErrMsg() {
  static thread_local std::string handed_out;
  handed_out = last_message;
  last_message.clear();
  return handed_out.c_str();
}

const char* aclrtGetSocName() {
  static const std::string name = text("FAKE_NPU_SOC", "Ascend910A");
  return name.c_str();
}

// Only "does it have infinities" is asked: a 910B with a digit behind it does, a 910B without is an old 910.
aclError aclGetCannAttribute(aclCannAttr, int32_t* value) {
  const std::string soc = aclrtGetSocName();
  *value = (soc.rfind("Ascend910B", 0) == 0 && soc.size() > strlen("Ascend910B")) || soc.rfind("Ascend910_93", 0) == 0;
  return 0;
}

aclError aclGetCannAttributeList(const aclCannAttr** list, size_t* count) {
  static const aclCannAttr attribute = ACL_CANN_ATTR_INF_NAN;
  *list = &attribute;
  *count = 1;
  return 0;
}

aclError aclsysGetVersionStr(char*, char* version) {
  strcpy(version, text("FAKE_CANN_VERSION", "8.2.RC1").c_str());
  return 0;
}

aclError aclsysGetCANNVersion(aclCANNPackageName, aclCANNPackageVersion* version) {
  memset(version, 0, sizeof *version);
  strcpy(version->version, text("FAKE_CANN_VERSION", "8.2.RC1").c_str());
  return 0;
}

// Waiting is refused while a stream is captured, and spoils the capture: nothing has run that one could wait for.
static aclError waited() {
  if (!capturing) return fakeacl_check_fault("sync");
  capture_is_valid = false;
  last_message = "EE9999: waiting on a stream that is captured";
  return ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT;
}

// ---- Devices ----

aclError aclrtGetDeviceCount(uint32_t* count) {
  *count = visible_devices().size();
  return *count ? 0 : ACL_ERROR_RT_NO_DEVICE;
}

aclError aclrtSetDevice(int32_t chosen) {
  if (chosen < 0 || chosen >= static_cast<int>(visible_devices().size())) return ACL_ERROR_RT_INVALID_DEVICEID;
  current_device = chosen;
  return 0;
}

aclError aclrtGetDevice(int32_t* current) {
  *current = current_device;
  return current_device < 0 ? ACL_ERROR_RT_CONTEXT_NULL : 0;
}

// A context is a device and a base, so that it is never null.
aclError aclrtGetCurrentContext(aclrtContext* context) {
  *context = reinterpret_cast<void*>(static_cast<intptr_t>(0x1000 + device()));
  return current_device < 0 ? ACL_ERROR_RT_CONTEXT_NULL : 0;
}

aclError aclrtSetCurrentContext(aclrtContext context) {
  current_device = static_cast<int>(reinterpret_cast<intptr_t>(context)) - 0x1000;
  return 0;
}

aclError aclrtGetPrimaryCtxState(int32_t of_device, uint32_t* flags, int32_t* active) {
  if (flags) *flags = 0;
  *active = of_device == current_device;
  return 0;
}

aclError aclrtResetDevice(int32_t) { return 0; }
aclError aclrtSynchronizeDevice() { return waited(); }
aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return waited(); }
aclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t, int32_t) { *can = 1; return 0; }
aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr, int64_t* value) { *value = 30; return 0; }
aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo, int64_t* value) { *value = 30; return 0; }
aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode) { return 0; }
aclError aclrtSetOpExecuteTimeOut(uint32_t) { return 0; }
aclError aclrtSetOpWaitTimeout(uint32_t) { return 0; }

aclError aclrtGetDeviceUtilizationRate(int32_t, aclrtUtilizationInfo* rate) {
  memset(rate, 0, sizeof *rate);
  return 0;
}

aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t* value) {
  *value = system_options[static_cast<int>(option) & 63];
  return 0;
}

aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  system_options[static_cast<int>(option) & 63] = value;
  return 0;
}

aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) { return aclrtSetSysParamOpt(option, value); }

// ---- Memory ----

// Fresh memory is filled with 0xA5: a card's is never zero, and what was not computed must not look right.
aclError aclrtMalloc(void** pointer, size_t bytes, aclrtMemMallocPolicy) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  *pointer = nullptr;
  if (used_bytes[device()] + bytes > memory_bytes()) {
    last_message = "EL0004: Failed to allocate memory.";
    return ACL_ERROR_RT_MEMORY_ALLOCATION;
  }
  if (posix_memalign(pointer, 512, bytes + 512)) return ACL_ERROR_RT_MEMORY_ALLOCATION;
  memset(*pointer, 0xA5, bytes);
  blocks[*pointer] = {device(), bytes};
  used_bytes[device()] += bytes;
  return 0;
}

aclError aclrtMallocAlign32(void** pointer, size_t bytes, aclrtMemMallocPolicy policy) {
  return aclrtMalloc(pointer, bytes, policy);
}

aclError aclrtFree(void* pointer) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  const auto found = blocks.find(pointer);
  if (found == blocks.end()) return ACL_ERROR_RT_PARAM_INVALID;
  used_bytes[found->second.device] -= found->second.bytes;
  blocks.erase(found);
  free(pointer);
  return 0;
}

// Pinned memory of the host.
aclError aclrtMallocHost(void** pointer, size_t bytes) {
  return posix_memalign(pointer, 64, bytes ? bytes : 64) ? ACL_ERROR_RT_MEMORY_ALLOCATION : 0;
}

aclError aclrtFreeHost(void* pointer) {
  free(pointer);
  return 0;
}

// Of this process alone: one process does not see what another has taken.
aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free_bytes, size_t* total_bytes) {
  *total_bytes = memory_bytes();
  *free_bytes = *total_bytes - used_bytes[device()];
  return 0;
}

aclError aclrtMemcpy(void* to, size_t, const void* from, size_t bytes, aclrtMemcpyKind) {
  memmove(to, from, bytes);
  return fakeacl_check_fault("memcpy");
}

aclError aclrtMemcpyAsync(void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind kind, aclrtStream) {
  if (!capturing) return aclrtMemcpy(to, room, from, bytes, kind);
  capturing->calls.push_back([=] { return aclrtMemcpy(to, room, from, bytes, kind); });
  return 0;
}

aclError aclrtMemset(void* to, size_t, int32_t value, size_t bytes) {
  memset(to, value, bytes);
  return 0;
}

aclError aclrtMemsetAsync(void* to, size_t room, int32_t value, size_t bytes, aclrtStream) {
  if (!capturing) return aclrtMemset(to, room, value, bytes);
  capturing->calls.push_back([=] { return aclrtMemset(to, room, value, bytes); });
  return 0;
}

aclError aclrtPointerGetAttributes(const void* pointer, aclrtPtrAttributes* attributes) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  memset(attributes, 0, sizeof *attributes);
  attributes->location.type = ACL_MEM_LOCATION_TYPE_HOST;
  for (const auto& [start, block] : blocks) {
    if (pointer >= start && pointer < static_cast<char*>(start) + block.bytes) {
      attributes->location.type = ACL_MEM_LOCATION_TYPE_DEVICE;
      attributes->location.id = block.device;
    }
  }
  return 0;
}

// ---- Streams and events: all that was queued has run already ----

aclError aclrtCreateStream(aclrtStream* stream) {
  *stream = new Stream{next_stream++};
  return 0;
}

aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) { return aclrtCreateStream(stream); }

aclError aclrtDestroyStream(aclrtStream stream) {
  delete static_cast<Stream*>(stream);
  return 0;
}

aclError aclrtDestroyStreamForce(aclrtStream stream) { return aclrtDestroyStream(stream); }
aclError aclrtSynchronizeStream(aclrtStream) { return waited(); }
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream, int32_t) { return waited(); }
aclError aclrtStreamQuery(aclrtStream, aclrtStreamStatus* status) { *status = ACL_STREAM_STATUS_COMPLETE; return 0; }
aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t) { return 0; }
aclError aclrtSetStreamAttribute(aclrtStream, aclrtStreamAttr, aclrtStreamAttrValue*) { return 0; }
aclError aclrtStreamWaitEvent(aclrtStream, aclrtEvent) { return 0; }

aclError aclrtStreamGetId(aclrtStream stream, int32_t* id) {
  *id = stream ? static_cast<Stream*>(stream)->id : 0;
  return 0;
}

aclError aclrtSetStreamOverflowSwitch(aclrtStream stream, uint32_t value) {
  if (stream) static_cast<Stream*>(stream)->overflow_switch = value;
  return 0;
}

aclError aclrtGetStreamOverflowSwitch(aclrtStream stream, uint32_t* value) {
  *value = stream ? static_cast<Stream*>(stream)->overflow_switch : 0;
  return 0;
}

aclError aclrtLaunchHostFunc(aclrtStream, aclrtHostFunc function, void* argument) {
  function(argument);
  return 0;
}

aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t) { *event = new Event; return 0; }
aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t) { *event = new Event; return 0; }
aclError aclrtDestroyEvent(aclrtEvent event) { delete static_cast<Event*>(event); return 0; }
aclError aclrtResetEvent(aclrtEvent, aclrtStream) { return 0; }
aclError aclrtSynchronizeEvent(aclrtEvent) { return waited(); }

aclError aclrtRecordEvent(aclrtEvent event, aclrtStream) {
  static_cast<Event*>(event)->recorded = Clock::now();
  return 0;
}

aclError aclrtQueryEventStatus(aclrtEvent, aclrtEventRecordedStatus* status) {
  *status = ACL_EVENT_RECORDED_STATUS_COMPLETE;
  return 0;
}

aclError aclrtQueryEventWaitStatus(aclrtEvent, aclrtEventWaitStatus* status) {
  *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
  return 0;
}

aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent from, aclrtEvent to) {
  const auto passed = static_cast<Event*>(to)->recorded - static_cast<Event*>(from)->recorded;
  *milliseconds = std::chrono::duration<float, std::milli>(passed).count();
  return 0;
}

aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t* microseconds) {
  *microseconds = static_cast<Event*>(event)->recorded.time_since_epoch().count() / 1000;
  return 0;
}

}  // extern "C"

// ---- Graphs ----

void fakeacl_record(std::function<int()> call) { capturing->calls.push_back(std::move(call)); }

extern "C" {

int fakeacl_capturing() { return capturing != nullptr; }
aclError aclmdlRIDestroy(aclmdlRI graph) { delete static_cast<Graph*>(graph); return 0; }
aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode*) { return 0; }

aclError aclmdlRICaptureBegin(aclrtStream, aclmdlRICaptureMode) {
  capturing = new Graph;
  capture_is_valid = true;
  return 0;
}

aclError aclmdlRICaptureGetInfo(aclrtStream, aclmdlRICaptureStatus* status, aclmdlRI* graph) {
  const auto active = capture_is_valid ? ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE : ACL_MODEL_RI_CAPTURE_STATUS_INVALIDATED;
  *status = capturing ? active : ACL_MODEL_RI_CAPTURE_STATUS_NONE;
  *graph = capturing;
  return 0;
}

aclError aclmdlRICaptureEnd(aclrtStream, aclmdlRI* graph) {
  if (!capture_is_valid) {
    delete capturing;
    capturing = nullptr;
  }
  *graph = capturing;
  capturing = nullptr;
  return capture_is_valid ? 0 : ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT;
}

aclError aclmdlRIExecuteAsync(aclmdlRI graph, aclrtStream) {
  // A fault of "replay" computes nothing and says nothing, as operators do that torch_npu's queue drops.
  if (fakeacl_check_fault("replay")) return 0;
  for (const auto& call : static_cast<Graph*>(graph)->calls) {
    if (const int code = call()) return code;
  }
  return 0;
}

}  // extern "C"

// ---- The older way to run an operator, by name. Nothing is implemented, and that is said aloud. ----

namespace {

aclError unknown_operator(const char* op) {
  fprintf(stderr, "[simulated card] operator %s reached the aclop path: write its aclnn form in opapi.cpp\n", op);
  if (!getenv("FAKE_LAX")) _exit(97);
  return kNotSupported;
}

}  // namespace

extern "C" {

aclError aclopCompileAndExecute(
    const char* op, int, const aclTensorDesc* const[], const aclDataBuffer* const[], int,
    const aclTensorDesc* const[], aclDataBuffer* const[], const aclopAttr*, aclopEngineType, aclopCompileType,
    const char*, aclrtStream) {
  return unknown_operator(op);
}

// The form for results whose shape the operator decides.
aclError aclopCompileAndExecuteV2(
    const char* op, int, aclTensorDesc*[], aclDataBuffer*[], int, aclTensorDesc*[], aclDataBuffer*[], aclopAttr*,
    aclopEngineType, aclopCompileType, const char*, aclrtStream) {
  return unknown_operator(op);
}

}  // extern "C"
