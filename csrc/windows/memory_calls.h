// The Windows calls of the memory room behind a plain C interface: RAM, limits, mappings, locking, and the budget that
// the display driver grants for memory shared with the system.
//
// Marked: never run on the real system. Compiled with mingw-w64 and run under wine by `make test-windows`; the budget is
// asked of a library with DXGI's real signatures. It must not know what the memory is used for.
#pragma once

#include <cstddef>
#include <cstdint>

#define STRATA_WINDOWS_API extern "C" __declspec(dllexport)

// Each returns 0, or GetLastError()'s number.

// All RAM and what programs can still take, both under the limit of this process's job, if it has one.
STRATA_WINDOWS_API int strata_windows_ram(uint64_t* total, uint64_t* available);
STRATA_WINDOWS_API uint32_t strata_windows_page_bytes();
// Processors of this process's affinity.
STRATA_WINDOWS_API int strata_windows_cpus(uint32_t* count);

// Zeroed memory of whole pages, and its end.
STRATA_WINDOWS_API int strata_windows_take(size_t nbytes, void** address);
STRATA_WINDOWS_API int strata_windows_free(void* address);
// Keeps whole pages in RAM: the working set is raised by `nbytes` first, for Windows locks no more than fits in it.
STRATA_WINDOWS_API int strata_windows_lock(void* address, size_t nbytes);
STRATA_WINDOWS_API int strata_windows_unlock(void* address, size_t nbytes);
// Asks the system to bring a range of a mapped file into RAM (Windows 8 and later).
STRATA_WINDOWS_API int strata_windows_prefetch(void* address, size_t nbytes);

// A file mapped for reading; `path` is UTF-16. An empty file maps to null.
STRATA_WINDOWS_API int strata_windows_map(const wchar_t* path, void** address, uint64_t* nbytes);
STRATA_WINDOWS_API int strata_windows_unmap(void* address);

// Budget and current use, in bytes, of the memory that adapter `index` shares with the system (the non-local segment),
// asked of `library` (dxgi.dll, or a test's own). ERROR_NOT_FOUND: no such adapter.
STRATA_WINDOWS_API int strata_windows_adapter_budget(const wchar_t* library, uint32_t index, uint64_t* budget,
                                                     uint64_t* used);
