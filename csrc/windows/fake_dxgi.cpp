// A stand-in for dxgi.dll with the real signatures: two adapters, the second with the smaller budget, counted releases.
// For csrc/windows/test_memory_calls.cpp alone.
#define WIN32_LEAN_AND_MEAN
#define _WIN32_WINNT 0x0A00

#include <windows.h>

#include <dxgi1_4.h>

#include <cstring>

namespace {

long alive = 0;

struct Counted {
    ULONG references = 1;
    Counted() { ++alive; }
    ~Counted() { --alive; }
};

// The interfaces derive from one another; every method that the memory room never calls says so.
struct Adapter final : IDXGIAdapter3, Counted {
    explicit Adapter(UINT number) : number(number) {}
    UINT number;

    HRESULT WINAPI QueryInterface(REFIID id, void** out) override {
        if (!IsEqualGUID(id, __uuidof(IDXGIAdapter3)) && !IsEqualGUID(id, __uuidof(IUnknown))) return E_NOINTERFACE;
        AddRef();
        *out = static_cast<IDXGIAdapter3*>(this);
        return S_OK;
    }
    ULONG WINAPI AddRef() override { return ++references; }
    ULONG WINAPI Release() override {
        const ULONG left = --references;
        if (left == 0) delete this;
        return left;
    }
    HRESULT WINAPI QueryVideoMemoryInfo(UINT node, DXGI_MEMORY_SEGMENT_GROUP group,
                                        DXGI_QUERY_VIDEO_MEMORY_INFO* info) override {
        if (node != 0) return E_INVALIDARG;
        std::memset(info, 0, sizeof *info);
        if (group == DXGI_MEMORY_SEGMENT_GROUP_NON_LOCAL) {
            info->Budget = (number == 0 ? 64ull : 48ull) << 30;
            info->CurrentUsage = (1ull + number) << 30;
        }
        return S_OK;
    }
    HRESULT WINAPI SetPrivateData(REFGUID, UINT, const void*) override { return E_NOTIMPL; }
    HRESULT WINAPI SetPrivateDataInterface(REFGUID, const IUnknown*) override { return E_NOTIMPL; }
    HRESULT WINAPI GetPrivateData(REFGUID, UINT*, void*) override { return E_NOTIMPL; }
    HRESULT WINAPI GetParent(REFIID, void**) override { return E_NOTIMPL; }
    HRESULT WINAPI EnumOutputs(UINT, IDXGIOutput**) override { return E_NOTIMPL; }
    HRESULT WINAPI GetDesc(DXGI_ADAPTER_DESC*) override { return E_NOTIMPL; }
    HRESULT WINAPI CheckInterfaceSupport(REFGUID, LARGE_INTEGER*) override { return E_NOTIMPL; }
    HRESULT WINAPI GetDesc1(DXGI_ADAPTER_DESC1*) override { return E_NOTIMPL; }
    HRESULT WINAPI GetDesc2(DXGI_ADAPTER_DESC2*) override { return E_NOTIMPL; }
    HRESULT WINAPI RegisterHardwareContentProtectionTeardownStatusEvent(HANDLE, DWORD*) override { return E_NOTIMPL; }
    void WINAPI UnregisterHardwareContentProtectionTeardownStatus(DWORD) override {}
    HRESULT WINAPI SetVideoMemoryReservation(UINT, DXGI_MEMORY_SEGMENT_GROUP, UINT64) override { return E_NOTIMPL; }
    HRESULT WINAPI RegisterVideoMemoryBudgetChangeNotificationEvent(HANDLE, DWORD*) override { return E_NOTIMPL; }
    void WINAPI UnregisterVideoMemoryBudgetChangeNotification(DWORD) override {}
};

struct Factory final : IDXGIFactory1, Counted {
    HRESULT WINAPI QueryInterface(REFIID, void**) override { return E_NOINTERFACE; }
    ULONG WINAPI AddRef() override { return ++references; }
    ULONG WINAPI Release() override {
        const ULONG left = --references;
        if (left == 0) delete this;
        return left;
    }
    HRESULT WINAPI EnumAdapters1(UINT index, IDXGIAdapter1** out) override {
        if (index > 1) return DXGI_ERROR_NOT_FOUND;
        *out = new Adapter(index);
        return S_OK;
    }
    HRESULT WINAPI SetPrivateData(REFGUID, UINT, const void*) override { return E_NOTIMPL; }
    HRESULT WINAPI SetPrivateDataInterface(REFGUID, const IUnknown*) override { return E_NOTIMPL; }
    HRESULT WINAPI GetPrivateData(REFGUID, UINT*, void*) override { return E_NOTIMPL; }
    HRESULT WINAPI GetParent(REFIID, void**) override { return E_NOTIMPL; }
    HRESULT WINAPI EnumAdapters(UINT, IDXGIAdapter**) override { return E_NOTIMPL; }
    HRESULT WINAPI MakeWindowAssociation(HWND, UINT) override { return E_NOTIMPL; }
    HRESULT WINAPI GetWindowAssociation(HWND*) override { return E_NOTIMPL; }
    HRESULT WINAPI CreateSwapChain(IUnknown*, DXGI_SWAP_CHAIN_DESC*, IDXGISwapChain**) override { return E_NOTIMPL; }
    HRESULT WINAPI CreateSoftwareAdapter(HMODULE, IDXGIAdapter**) override { return E_NOTIMPL; }
    BOOL WINAPI IsCurrent() override { return TRUE; }
};

}  // namespace

extern "C" __declspec(dllexport) HRESULT WINAPI CreateDXGIFactory1(REFIID id, void** out) {
    if (!IsEqualGUID(id, __uuidof(IDXGIFactory1))) return E_NOINTERFACE;
    *out = static_cast<IDXGIFactory1*>(new Factory);
    return S_OK;
}

extern "C" __declspec(dllexport) long objects_alive() { return alive; }
