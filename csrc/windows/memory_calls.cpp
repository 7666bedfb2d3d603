#define WIN32_LEAN_AND_MEAN
#define NOMINMAX
#define _WIN32_WINNT 0x0A00

#include "memory_calls.h"

#include <windows.h>

#include <dxgi1_4.h>

#include <algorithm>

namespace {

int last_error() { return static_cast<int>(GetLastError()); }

// A COM object that is released at the end of its scope.
template <class Interface>
class Owned {
  public:
    Owned() = default;
    ~Owned() {
        if (object_ != nullptr) object_->Release();
    }
    Owned(const Owned&) = delete;
    Owned& operator=(const Owned&) = delete;
    Interface* operator->() const { return object_; }
    void** out() { return reinterpret_cast<void**>(&object_); }
    Interface** typed() { return &object_; }

  private:
    Interface* object_ = nullptr;
};

int ask_adapter(HMODULE library, uint32_t index, uint64_t* budget, uint64_t* used) {
    using CreateFactory = HRESULT(WINAPI*)(REFIID, void**);
    const auto create = reinterpret_cast<CreateFactory>(
        reinterpret_cast<void*>(GetProcAddress(library, "CreateDXGIFactory1")));
    if (create == nullptr) return last_error();
    Owned<IDXGIFactory1> factory;
    if (FAILED(create(__uuidof(IDXGIFactory1), factory.out()))) return ERROR_NOT_SUPPORTED;
    Owned<IDXGIAdapter1> adapter;
    if (FAILED(factory->EnumAdapters1(index, adapter.typed()))) return ERROR_NOT_FOUND;
    Owned<IDXGIAdapter3> newer;
    if (FAILED(adapter->QueryInterface(__uuidof(IDXGIAdapter3), newer.out()))) return ERROR_NOT_SUPPORTED;
    DXGI_QUERY_VIDEO_MEMORY_INFO info{};
    if (FAILED(newer->QueryVideoMemoryInfo(0, DXGI_MEMORY_SEGMENT_GROUP_NON_LOCAL, &info))) return ERROR_NOT_SUPPORTED;
    *budget = info.Budget;
    *used = info.CurrentUsage;
    return ERROR_SUCCESS;
}

}  // namespace

int strata_windows_ram(uint64_t* total, uint64_t* available) {
    MEMORYSTATUSEX status{};
    status.dwLength = sizeof status;
    if (!GlobalMemoryStatusEx(&status)) return last_error();
    *total = status.ullTotalPhys;
    *available = std::min<uint64_t>(status.ullAvailPhys, status.ullAvailPageFile);
    JOBOBJECT_EXTENDED_LIMIT_INFORMATION job{};
    if (QueryInformationJobObject(nullptr, JobObjectExtendedLimitInformation, &job, sizeof job, nullptr)) {
        const DWORD flags = job.BasicLimitInformation.LimitFlags;
        if (flags & JOB_OBJECT_LIMIT_PROCESS_MEMORY) *total = std::min<uint64_t>(*total, job.ProcessMemoryLimit);
        if (flags & JOB_OBJECT_LIMIT_JOB_MEMORY) *total = std::min<uint64_t>(*total, job.JobMemoryLimit);
        *available = std::min(*available, *total);
    }
    return ERROR_SUCCESS;
}

uint32_t strata_windows_page_bytes() {
    SYSTEM_INFO info;
    GetSystemInfo(&info);
    return info.dwPageSize;
}

int strata_windows_cpus(uint32_t* count) {
    DWORD_PTR mine = 0, all = 0;
    if (!GetProcessAffinityMask(GetCurrentProcess(), &mine, &all)) return last_error();
    *count = 0;
    for (; mine != 0; mine &= mine - 1) ++*count;
    return ERROR_SUCCESS;
}

int strata_windows_take(size_t nbytes, void** address) {
    *address = VirtualAlloc(nullptr, nbytes, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
    return *address != nullptr ? ERROR_SUCCESS : last_error();
}

int strata_windows_free(void* address) { return VirtualFree(address, 0, MEM_RELEASE) ? ERROR_SUCCESS : last_error(); }

int strata_windows_lock(void* address, size_t nbytes) {
    SIZE_T least = 0, most = 0;
    DWORD flags = 0;
    if (!GetProcessWorkingSetSizeEx(GetCurrentProcess(), &least, &most, &flags)) return last_error();
    const DWORD soft = QUOTA_LIMITS_HARDWS_MIN_DISABLE | QUOTA_LIMITS_HARDWS_MAX_DISABLE;
    if (!SetProcessWorkingSetSizeEx(GetCurrentProcess(), least + nbytes, std::max(most, least) + nbytes, soft))
        return last_error();
    if (VirtualLock(address, nbytes)) return ERROR_SUCCESS;
    const int error = last_error();
    SetProcessWorkingSetSizeEx(GetCurrentProcess(), least, most, soft);
    return error;
}

int strata_windows_unlock(void* address, size_t nbytes) {
    return VirtualUnlock(address, nbytes) ? ERROR_SUCCESS : last_error();
}

int strata_windows_prefetch(void* address, size_t nbytes) {
    WIN32_MEMORY_RANGE_ENTRY range{address, nbytes};
    return PrefetchVirtualMemory(GetCurrentProcess(), 1, &range, 0) ? ERROR_SUCCESS : last_error();
}

int strata_windows_map(const wchar_t* path, void** address, uint64_t* nbytes) {
    *address = nullptr;
    *nbytes = 0;
    const HANDLE file =
        CreateFileW(path, GENERIC_READ, FILE_SHARE_READ, nullptr, OPEN_EXISTING, FILE_ATTRIBUTE_NORMAL, nullptr);
    if (file == INVALID_HANDLE_VALUE) return last_error();
    int error = ERROR_SUCCESS;
    LARGE_INTEGER size{};
    if (!GetFileSizeEx(file, &size)) {
        error = last_error();
    } else if (size.QuadPart != 0) {
        const HANDLE mapping = CreateFileMappingW(file, nullptr, PAGE_READONLY, 0, 0, nullptr);
        if (mapping == nullptr) {
            error = last_error();
        } else {
            *address = MapViewOfFile(mapping, FILE_MAP_READ, 0, 0, 0);
            if (*address == nullptr) error = last_error();
            CloseHandle(mapping);  // the view keeps it
        }
        if (error == ERROR_SUCCESS) *nbytes = static_cast<uint64_t>(size.QuadPart);
    }
    CloseHandle(file);
    return error;
}

int strata_windows_unmap(void* address) { return UnmapViewOfFile(address) ? ERROR_SUCCESS : last_error(); }

int strata_windows_adapter_budget(const wchar_t* library, uint32_t index, uint64_t* budget, uint64_t* used) {
    const HMODULE loaded = LoadLibraryW(library);
    if (loaded == nullptr) return last_error();
    const int error = ask_adapter(loaded, index, budget, used);
    FreeLibrary(loaded);
    return error;
}
