#ifndef KVS_TESTS_SUPPORT_DAEMON_FIXTURE_H
#define KVS_TESTS_SUPPORT_DAEMON_FIXTURE_H

/* The real daemon, found beside the test program, in a folder of its own.
 *
 * Knows the daemon's command line, its notification of readiness, and /proc.  Does not know requests.  One
 * thread. Owns the process and the folder. */

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

typedef struct daemon_fixture {
    pid_t pid;               /* 0: none runs */
    int notify_fd;           /* what the service manager would hear */
    unsigned max_fds;        /* RLIMIT_NOFILE of the next start; 0: as here */
    uint64_t max_file_bytes; /* RLIMIT_FSIZE of the next start; 0: as here */
    unsigned closed_fds;     /* bit i: descriptor i (0..2) is closed at each start and run */
    bool no_memory;          /* the kernel refuses the pool's memory at the next start */
    int listen_fd[2];        /* handed over at the next start as "client" and "admin", closed here then; -1: none */
    int *stored_fd; /* [2] the manager's store, "kvs-arena" and "kvs-table", handed over at each start; -1: empty.
                       * NULL: it has none */
    char dir[64];
    char socket[96], admin[96], metrics[96], config[96], log[96]; /* paths in it */
} daemon_fixture;

void daemon_init(daemon_fixture *d);
/* Stop what runs, remove the folder. */
void daemon_fini(daemon_fixture *d);

/* Write the configuration file: JSON text. */
void daemon_configure(const daemon_fixture *d, const char *json);
/* Start it with the file, the paths and up to 15 more arguments (NULL-terminated; NULL: none); do not wait.
 */
void daemon_spawn(daemon_fixture *d, const char *const *more);
/* daemon_spawn and wait for READY=1.  False: it has ended, or the time is up. */
bool daemon_start(daemon_fixture *d, const char *json);

/* Wait until the service manager has heard `word` (as "READY=1"). */
bool daemon_wait_notified(const daemon_fixture *d, const char *word, int timeout_ms);
/* Wait for its end: exit status, 128 + signal, or -1 when the time is up. */
int daemon_wait(daemon_fixture *d, int timeout_ms);
int daemon_stop(daemon_fixture *d, int signum); /* kill and daemon_wait */

bool daemon_alive(const daemon_fixture *d); /* started, and has not ended by itself */

/* What it has logged since the first start. */
unsigned daemon_log_count(const daemon_fixture *d, const char *text);
bool daemon_wait_log(const daemon_fixture *d, const char *text, unsigned n, int timeout_ms);

unsigned daemon_fds(const daemon_fixture *d);
/* Wait until it has at most n descriptors; false: it keeps more. */
bool daemon_wait_fds(const daemon_fixture *d, unsigned n, int timeout_ms);
uint64_t daemon_private_kib(const daemon_fixture *d); /* anonymous memory */
uint64_t daemon_cpu_ms(const daemon_fixture *d);
uint64_t daemon_sleeps(const daemon_fixture *d); /* how often its threads have gone to sleep so far */

/* Run the daemon's program with these arguments (NULL-terminated) to its end.  Its stdout and stderr go to
 * `out`. */
int daemon_run(const daemon_fixture *d, const char *const *args, char *out, size_t cap);

#endif
