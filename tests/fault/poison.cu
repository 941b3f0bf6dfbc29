// Preloaded into the daemon by tests/gpu/test_gpu_service.c: once the file named by KVS_POISON is there, a kernel writes to
// an address that nobody has.  That breaks the context of the whole process, as a wild kernel of ours would, for good.
// No client can do this to the daemon, so that the product needs no such switch.
#include <csignal>
#include <cstdlib>
#include <ctime>
#include <pthread.h>
#include <unistd.h>

#include <cuda_runtime.h>

namespace
{

__global__ void wild()
{
    *reinterpret_cast<volatile int *>(16) = 1;
}

void *wait_and_poison(void *file)
{
    const timespec pause = {0, 2000000};

    while (access(static_cast<const char *>(file), F_OK) != 0)
        (void)nanosleep(&pause, nullptr);
    wild<<<1, 1>>>();
    (void)cudaDeviceSynchronize();
    return nullptr;
}

__attribute__((constructor)) void start()
{
    char *file = getenv("KVS_POISON");
    sigset_t all, before;
    pthread_t t;

    (void)unsetenv("LD_PRELOAD");
    if (file == nullptr)
        return;
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before); // signals are the daemon's
    (void)pthread_create(&t, nullptr, wait_and_poison, file);
    (void)pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

} // namespace
