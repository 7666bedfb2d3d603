// Calls everything of memory_calls.h once and says what it found; status 1 at the first surprise. Run by
// `make test-windows` under wine, in the folder that holds fake_dxgi.dll.
#define WIN32_LEAN_AND_MEAN
#include <windows.h>

#include <cstdio>
#include <cstring>

#include "memory_calls.h"

namespace {

int failures = 0;

void expect(bool holds, const char* what) {
    std::printf("%s %s\n", holds ? "ok    " : "FAILED", what);
    failures += holds ? 0 : 1;
}

void test_machine() {
    uint64_t total = 0, available = 0;
    uint32_t cpus = 0;
    expect(strata_windows_ram(&total, &available) == 0, "RAM is told");
    expect(available > 0 && available <= total && total < (1ull << 50), "the budget is finite");
    expect(strata_windows_page_bytes() == 4096, "pages of 4 KiB");
    expect(strata_windows_cpus(&cpus) == 0 && cpus >= 1, "processors are counted");
}

void test_memory() {
    const size_t nbytes = size_t{8} << 20;
    void* address = nullptr;
    expect(strata_windows_take(nbytes, &address) == 0 && address != nullptr, "memory is taken");
    expect(static_cast<char*>(address)[nbytes - 1] == 0, "it is zero");
    std::memset(address, 7, nbytes);
    expect(strata_windows_lock(address, nbytes) == 0, "it is locked beyond the first working set");
    expect(strata_windows_unlock(address, nbytes) == 0, "it is unlocked");
    expect(strata_windows_free(address) == 0, "it is freed");
    void* none = nullptr;
    expect(strata_windows_take(size_t{1} << 62, &none) != 0 && none == nullptr, "too much is refused with a number");
}

void test_file() {
    const wchar_t* path = L"strata-test.bin";
    const HANDLE file = CreateFileW(path, GENERIC_WRITE, 0, nullptr, CREATE_ALWAYS, 0, nullptr);
    char data[10000];
    std::memset(data, 5, sizeof data);
    DWORD written = 0;
    WriteFile(file, data, sizeof data, &written, nullptr);
    CloseHandle(file);
    void* address = nullptr;
    uint64_t nbytes = 0;
    expect(strata_windows_map(path, &address, &nbytes) == 0 && nbytes == sizeof data, "a file is mapped");
    const int prefetched = strata_windows_prefetch(address, sizeof data);
    expect(prefetched == 0 || prefetched == ERROR_CALL_NOT_IMPLEMENTED || prefetched == ERROR_INVALID_PARAMETER,
           "read-ahead is asked for");
    expect(std::memcmp(address, data, sizeof data) == 0, "its bytes are the file's");
    expect(strata_windows_unmap(address) == 0, "it is unmapped");
    DeleteFileW(path);
    expect(strata_windows_map(path, &address, &nbytes) == ERROR_FILE_NOT_FOUND, "a missing file has its number");
}

void test_budget() {
    uint64_t budget = 0, used = 0;
    const wchar_t* fake = L"fake_dxgi.dll";
    const HMODULE library = LoadLibraryW(fake);
    expect(library != nullptr, "the fake library loads");
    expect(strata_windows_adapter_budget(fake, 0, &budget, &used) == 0, "the first adapter answers");
    expect(budget == 64ull << 30 && used == 1ull << 30, "the non-local segment's budget and use");
    expect(strata_windows_adapter_budget(fake, 1, &budget, &used) == 0 && budget == 48ull << 30, "the second is smaller");
    expect(strata_windows_adapter_budget(fake, 2, &budget, &used) == ERROR_NOT_FOUND, "there is no third");
    expect(strata_windows_adapter_budget(L"no-such.dll", 0, &budget, &used) != 0, "a missing library is an error");
    using Count = long (*)();
    const auto alive = reinterpret_cast<Count>(reinterpret_cast<void*>(GetProcAddress(library, "objects_alive")));
    expect(alive != nullptr && alive() == 0, "every object was released");
}

}  // namespace

int main() {
    test_machine();
    test_memory();
    test_file();
    test_budget();
    std::printf("%d failures\n", failures);
    return failures == 0 ? 0 : 1;
}
