/* Threads that log, change the level and flush at once; the thread sanitizer watches.  Lines go to /dev/null,
 * and so does the sanitizer's text, but not its exit status; TSAN_OPTIONS=log_path=stdout shows it. */
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <unistd.h>

#include "daemon/log.h"

enum { THREADS = 4, ROUNDS = 2000 };

static void *work(void *arg)
{
    static const char *const EVENTS[] = {"one", "two", "three"};
    const int id = *(const int *)arg;
    char word[32];

    for (int i = 0; i < ROUNDS; i++) {
        log_event(LOG_LEVEL_INFO, EVENTS[i % 3], " thread=%d name=%s", id, log_quote(word, sizeof word, "a\nb", 3));
        if (i % 64 == id)
            log_set_level(i % 2 == 0 ? LOG_LEVEL_INFO : LOG_LEVEL_DEBUG);
        if (i % 128 == id)
            log_flush(i % 3 == 0);
    }
    return NULL;
}

int main(void)
{
    pthread_t threads[THREADS];
    int ids[THREADS], saved = dup(STDERR_FILENO), null = open("/dev/null", O_WRONLY | O_CLOEXEC), failed = 0;

    if (saved < 0 || null < 0)
        return 1;
    if (dup2(null, STDERR_FILENO) < 0)
        return 1;
    log_open(LOG_LEVEL_INFO, true);
    for (int i = 0; i < THREADS; i++) {
        ids[i] = i;
        failed += pthread_create(&threads[i], NULL, work, &ids[i]) != 0;
    }
    for (int i = 0; i < THREADS && failed == 0; i++)
        failed += pthread_join(threads[i], NULL) != 0;
    (void)dup2(saved, STDERR_FILENO);
    (void)printf("%d passed, %d failed\n", THREADS - failed, failed);
    return failed == 0 ? 0 : 1;
}
