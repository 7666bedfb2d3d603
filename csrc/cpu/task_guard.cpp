#include "task_guard.h"

#include "status.h"

#if defined(_WIN32)

// Windows has no such signals: a fault ends the process there, as it did.
int strata::guarded(int (*task)(void*), void* context) { return task(context); }

#else

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>

#include <cstdint>
#include <cstdio>
#include <cstring>

namespace strata {
namespace {

// Where a guarded task is left, on its thread's stack. What the handler writes is read after the jump.
struct Exit {
    sigjmp_buf back;
    volatile int signal;
    void* volatile address;
};

// The thread's innermost Exit. A key of the thread library instead of thread_local, because the handler may read it on
// any thread: memory of thread_local variables of a loaded library is made at first use, and a handler must not do that.
pthread_key_t key;
struct sigaction before_bus, before_segv;

bool is_of_an_instruction(const siginfo_t* info) {
#if defined(BUS_MCEERR_AO)
    if (info->si_signo == SIGBUS && info->si_code == BUS_MCEERR_AO) return false;  // memory that nobody has touched yet
#endif
    return info->si_code > 0;  // else sent by a process
}

// The handler that was there before. Without one the default action follows: by itself where an instruction faults, which
// it does again.
void hand_on(int signal, siginfo_t* info, void* context) {
    const struct sigaction& before = signal == SIGBUS ? before_bus : before_segv;
    if ((before.sa_flags & SA_SIGINFO) != 0) {
        before.sa_sigaction(signal, info, context);
    } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
        before.sa_handler(signal);
    } else if (before.sa_handler == SIG_DFL || is_of_an_instruction(info)) {
        sigaction(signal, &before, nullptr);
        if (!is_of_an_instruction(info)) raise(signal);
    }
}

void on_fault(int signal, siginfo_t* info, void* context) {
    auto* exit = static_cast<Exit*>(pthread_getspecific(key));
    if (exit == nullptr || !is_of_an_instruction(info)) {
        hand_on(signal, info, context);
        return;
    }
    exit->signal = signal;
    exit->address = info->si_addr;
    siglongjmp(exit->back, 1);
}

bool install() {
    if (pthread_key_create(&key, nullptr) != 0) return false;
    struct sigaction ours = {};
    ours.sa_sigaction = &on_fault;
    // NODEFER: the jump leaves the handler without its return, so the signal must not be blocked in it.
    ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    sigemptyset(&ours.sa_mask);
    return sigaction(SIGBUS, nullptr, &before_bus) == 0 && sigaction(SIGSEGV, nullptr, &before_segv) == 0 &&
           sigaction(SIGBUS, &ours, nullptr) == 0 && sigaction(SIGSEGV, &ours, nullptr) == 0;
}

// The name of the file that is mapped at `address`, without its folders, and the byte of it. False: none is.
bool find_file(uintptr_t address, char* name, size_t size, unsigned long* byte) {
    FILE* maps = std::fopen("/proc/self/maps", "re");
    if (maps == nullptr) return false;
    bool found = false;
    char line[4096];
    while (!found && std::fgets(line, sizeof line, maps) != nullptr) {
        unsigned long begin = 0, end = 0, offset = 0;
        int path = 0;
        if (std::sscanf(line, "%lx-%lx %*s %lx %*s %*s %n", &begin, &end, &offset, &path) < 3) continue;
        if (address < begin || address >= end) continue;
        line[std::strcspn(line, "\n")] = '\0';
        const char* slash = std::strrchr(line + path, '/');
        if (slash == nullptr) break;  // memory without a file
        std::snprintf(name, size, "%s", slash + 1);
        *byte = offset + (address - begin);
        found = true;
    }
    std::fclose(maps);
    return found;
}

int explain(int signal, uintptr_t address) {
    char file[256];
    unsigned long byte = 0;
    const bool is_file = find_file(address, file, sizeof file, &byte);
    if (signal == SIGBUS && is_file)
        return fail(kFileFault, "%s cannot be read at byte %lu: it was cut while it was in use, or its drive failed", file,
                    byte);
    if (signal == SIGBUS)
        return fail(kMemoryFault, "the memory at address %#lx failed", static_cast<unsigned long>(address));
    return fail(kMemoryFault, "a native task touched address %#lx, %s%s", static_cast<unsigned long>(address),
                is_file ? "which it may not, in " : "which is not mapped or not allowed", is_file ? file : "");
}

}  // namespace

int guarded(int (*task)(void*), void* context) {
    static const bool is_installed = install();
    if (!is_installed) return task(context);
    Exit exit;
    void* const outer = pthread_getspecific(key);
    if (sigsetjmp(exit.back, 0) != 0) {  // 0: saving the mask would be a system call
        pthread_setspecific(key, outer);
        return explain(exit.signal, reinterpret_cast<uintptr_t>(exit.address));
    }
    pthread_setspecific(key, &exit);
    const int status = task(context);
    pthread_setspecific(key, outer);
    return status;
}

}  // namespace strata

#endif
