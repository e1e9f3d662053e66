// A tool for tests: writes every NVTX domain, name and range of a process as a line to the file $NVTX_TEST_LOG.
// Lines are tab-separated: what, domain, range id, thread, category, payload, message. Loaded by NVTX_INJECTION64_PATH.
#include <nvtx3/nvToolsExt.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>

namespace {
std::mutex guard;
FILE* out = nullptr;
std::atomic<uint64_t> next{1};

void say(const char* what, const void* domain, uint64_t id, const nvtxEventAttributes_t* a, const char* text) {
  std::string message = text ? text : "";
  std::string payload;
  unsigned category = 0;
  if (a) {
    category = a->category;
    if (a->messageType == NVTX_MESSAGE_TYPE_ASCII) message = a->message.ascii;
    if (a->messageType == NVTX_MESSAGE_TYPE_REGISTERED)
      message = *reinterpret_cast<const std::string*>(a->message.registered);
    if (a->payloadType == NVTX_PAYLOAD_TYPE_INT64) payload = std::to_string(a->payload.llValue);
    if (a->payloadType == NVTX_PAYLOAD_TYPE_UNSIGNED_INT64) payload = std::to_string(a->payload.ullValue);
  }
  std::lock_guard<std::mutex> lock(guard);
  fprintf(out, "%s\t%s\t%llu\t%ld\t%u\t%s\t%s\n", what,
          domain ? reinterpret_cast<const std::string*>(domain)->c_str() : "", (unsigned long long)id,
          (long)syscall(SYS_gettid), category, payload.c_str(), message.c_str());
  fflush(out);
}

std::string narrow(const wchar_t* text) {
  std::string result;
  for (; *text; ++text) result += static_cast<char>(*text);
  return result;
}

// A domain and a registered string are their own names here, never freed: handles must stay valid.
nvtxDomainHandle_t create(const char* name) { return reinterpret_cast<nvtxDomainHandle_t>(new std::string(name)); }
nvtxDomainHandle_t create_wide(const wchar_t* name) { return create(narrow(name).c_str()); }
nvtxStringHandle_t reg(nvtxDomainHandle_t, const char* text) {
  return reinterpret_cast<nvtxStringHandle_t>(new std::string(text));
}
nvtxStringHandle_t reg_wide(nvtxDomainHandle_t d, const wchar_t* text) { return reg(d, narrow(text).c_str()); }
void category(nvtxDomainHandle_t domain, uint32_t id, const char* name) { say("category", domain, id, nullptr, name); }
void category_wide(nvtxDomainHandle_t d, uint32_t id, const wchar_t* name) { category(d, id, narrow(name).c_str()); }
nvtxRangeId_t start(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* attributes) {
  uint64_t id = next++;
  say("start", domain, id, attributes, nullptr);
  return id;
}
void end(nvtxDomainHandle_t domain, nvtxRangeId_t id) { say("end", domain, id, nullptr, nullptr); }
int push(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* attributes) {
  say("push", domain, 0, attributes, nullptr);
  return 0;
}
int pop(nvtxDomainHandle_t domain) {
  say("pop", domain, 0, nullptr, nullptr);
  return 0;
}

template <typename Function>
void put(NvtxFunctionTable table, int id, Function function) {
  *table[id] = reinterpret_cast<NvtxFunctionPointer>(function);
}
}  // namespace

extern "C" int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get) {
  out = fopen(getenv("NVTX_TEST_LOG"), "a");
  auto callbacks = static_cast<const NvtxExportTableCallbacks*>(get(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned size = 0;
  if (!out || !callbacks || !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size)) return 0;
  put(table, NVTX_CBID_CORE2_DomainCreateA, create);
  put(table, NVTX_CBID_CORE2_DomainCreateW, create_wide);
  put(table, NVTX_CBID_CORE2_DomainRegisterStringA, reg);
  put(table, NVTX_CBID_CORE2_DomainRegisterStringW, reg_wide);
  put(table, NVTX_CBID_CORE2_DomainNameCategoryA, category);
  put(table, NVTX_CBID_CORE2_DomainNameCategoryW, category_wide);
  put(table, NVTX_CBID_CORE2_DomainRangeStartEx, start);
  put(table, NVTX_CBID_CORE2_DomainRangeEnd, end);
  put(table, NVTX_CBID_CORE2_DomainRangePushEx, push);
  put(table, NVTX_CBID_CORE2_DomainRangePop, pop);
  return 1;
}
