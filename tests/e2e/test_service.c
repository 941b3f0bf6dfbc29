#include <criterion/criterion.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/options.h"
#include "daemon/request.h"
#include "proto/wire.h"
#include "tests/support/daemon_fixture.h"
#include "tests/support/raw_client.h"

/* What a service manager asks of the daemon, without one.  tests/systemd has the real one. */

static daemon_fixture d;
static char accepted[128];
static const char *with_copy[] = {"--accepted", accepted, NULL};

static void init(void)
{
    daemon_init(&d);
    (void)snprintf(accepted, sizeof accepted, "%s/accepted.json", d.dir);
}

static void fini(void)
{
    daemon_fini(&d);
}

TestSuite(service, .init = init, .fini = fini);

static wire_health_rep health(void)
{
    wire_health_rep rep;
    raw_client c;
    wire_in in;
    frame f;

    cr_assert(raw_connect(&c, d.admin));
    cr_assert(raw_hello(&c));
    cr_assert(raw_send(&c, WIRE_HEALTH, 7, NULL, 0, NULL, 0));
    cr_assert(raw_recv(&c, &f, 5000));
    cr_assert_eq(f.head.status, KVS_OK);
    in = (wire_in){.base = f.body, .len = f.head.body_len};
    (void)wire_get_array(&in, wire_get_u32(&in) + 4u, 1); /* message length, reserved word, message */
    wire_get_health_rep(&in, &rep);
    raw_close(&c);
    return rep;
}

static bool summary_has(const char *text)
{
    wire_status_req q = {.section = WIRE_SECTION_SUMMARY, .ns = WIRE_NONE32};
    uint8_t body[WIRE_status_req_BYTES];
    wire_out o = {.base = body, .cap = sizeof body};
    raw_client c;
    frame f;
    bool has;

    wire_put_status_req(&o, &q);
    cr_assert(raw_connect(&c, d.socket));
    cr_assert(raw_hello(&c));
    cr_assert(raw_send(&c, WIRE_STATUS, 7, body, sizeof body, NULL, 0));
    cr_assert(raw_recv(&c, &f, 5000));
    cr_assert_eq(f.head.status, KVS_OK);
    has = memmem(f.body, f.head.body_len, text, strlen(text)) != NULL;
    raw_close(&c);
    return has;
}

static void start_with_copy(const char *json)
{
    daemon_configure(&d, json);
    daemon_spawn(&d, with_copy);
    cr_assert(daemon_wait_notified(&d, "READY=1", 10000));
}

Test(service, a_file_broken_at_a_restart_does_not_cost_the_service)
{
    start_with_copy("{\"pool\": {\"max_bytes\": \"16MiB\"}, \"limits\": {\"max_clients\": 5}}");
    cr_assert_eq(health().state, WIRE_HEALTH_OK);
    cr_assert_eq(daemon_stop(&d, SIGTERM), EXIT_CODE_OK);

    start_with_copy("{\"limits\": {\"max_clients\": 0}}");
    cr_assert(daemon_wait_log(&d, "config_refused", 1, 5000));
    cr_assert(daemon_wait_log(&d, "old_config", 1, 5000));
    cr_assert_eq(health().state, WIRE_HEALTH_DEGRADED);
    cr_assert_eq(health().reasons, HEALTH_OLD_CONFIG);
    cr_assert(summary_has("limits.max_clients: 0 is outside"), "why it was refused");

    daemon_configure(&d, "{\"pool\": {\"max_bytes\": \"16MiB\"}, \"limits\": {\"max_clients\": 6}}");
    (void)kill(d.pid, SIGHUP);
    cr_assert(daemon_wait_log(&d, "changed=limits.max_clients", 1, 5000));
    cr_assert_eq(health().state, WIRE_HEALTH_OK, "the file is mended");
    cr_assert(summary_has("\"reload_error\":null"));
    cr_assert_eq(daemon_stop(&d, SIGTERM), EXIT_CODE_OK);
}

Test(service, the_copy_is_what_was_in_use)
{
    char out[8192];
    const char *print[] = {"--config", accepted, "--print-config", NULL};
    struct stat st;

    start_with_copy("{\"pool\": {\"max_bytes\": \"16MiB\"}, \"limits\": {\"max_clients\": 5}}");
    daemon_configure(&d, "{\"pool\": {\"max_bytes\": \"16MiB\", \"max_slots\": 5}, \"limits\": {\"max_clients\": 9}}");
    (void)kill(d.pid, SIGHUP);
    cr_assert(daemon_wait_log(&d, "needs_restart=pool.max_slots", 1, 5000));
    cr_assert_eq(daemon_stop(&d, SIGTERM), EXIT_CODE_OK);
    cr_assert_eq(daemon_run(&d, print, out, sizeof out), 0);
    cr_assert_not_null(strstr(out, "\"max_clients\": 9"), "a reload is accepted");
    cr_assert_not_null(strstr(out, "\"max_slots\": 0"), "a cap that was never tried is not");
    cr_assert_eq(stat(accepted, &st), 0);
    cr_assert_eq(st.st_mode & 0777, 0600);
}

Test(service, without_a_good_copy_a_broken_file_is_an_error_of_the_file)
{
    FILE *f = fopen(accepted, "we");

    cr_assert_not_null(f);
    (void)fputs("{\"pool\": ", f);
    (void)fclose(f);
    daemon_configure(&d, "{\"limits\": {\"max_clients\": 0}}");
    daemon_spawn(&d, with_copy);
    cr_assert_eq(daemon_wait(&d, 10000), EXIT_CODE_CONFIG);
    cr_assert_eq(daemon_log_count(&d, "limits.max_clients"), 1);
}

/* The file is well formed, but what it asks for cannot be had here. */
Test(service, a_file_with_which_it_does_not_come_up_does_not_cost_the_service_either)
{
    static const char GOOD[] = "{\"pool\": {\"max_bytes\": \"16MiB\"}, \"limits\": {\"max_clients\": 5}}";
    static const char *const BAD[] = {"{\"pool\": {\"max_bytes\": \"16MiB\", \"path\": \"/proc\"}}",
                                      "{\"tenants\": [{\"name\": \"a\", \"path\": \"/nonexistent-folder/a\"}]}"};
    char note[160];

    (void)snprintf(note, sizeof note, "%s.failed", accepted);
    start_with_copy(GOOD);
    cr_assert_eq(daemon_stop(&d, SIGTERM), EXIT_CODE_OK);
    for (unsigned i = 0; i < 2; i++) {
        daemon_configure(&d, BAD[i]);
        daemon_spawn(&d, with_copy);
        cr_assert_eq(daemon_wait(&d, 10000), EXIT_CODE_SYSTEM, "worth another start");
        cr_assert_eq(daemon_log_count(&d, "config_put_aside"), i + 1);
        cr_assert_eq(access(note, F_OK), 0);
        daemon_spawn(&d, with_copy);
        cr_assert(daemon_wait_log(&d, "ready socket", 2 + 2 * i, 10000));
        cr_assert_eq(daemon_log_count(&d, "the last start with it failed: "), 2 * i + 1);
        cr_assert_eq(daemon_log_count(&d, "old_config"), 2 * i + 1);
        cr_assert_eq(health().reasons, HEALTH_OLD_CONFIG);
        cr_assert_eq(daemon_stop(&d, SIGTERM), EXIT_CODE_OK);
        daemon_spawn(&d, with_copy); /* and again: it has not become better */
        cr_assert(daemon_wait_log(&d, "ready socket", 3 + 2 * i, 10000));
        cr_assert_eq(health().reasons, HEALTH_OLD_CONFIG);
        daemon_configure(&d, GOOD);
        (void)kill(d.pid, SIGHUP);
        cr_assert(daemon_wait_log(&d, "reloaded", i + 1, 5000));
        cr_assert_eq(health().state, WIRE_HEALTH_OK);
        cr_assert_neq(access(note, F_OK), 0);
        cr_assert_eq(daemon_stop(&d, SIGTERM), EXIT_CODE_OK);
    }
    cr_assert_eq(unlink(accepted), 0);
    daemon_configure(&d, BAD[0]);
    daemon_spawn(&d, with_copy);
    cr_assert_eq(daemon_wait(&d, 10000), EXIT_CODE_CONFIG, "there is nothing to fall back on");
}

Test(service, a_refused_reload_is_in_the_status_line)
{
    cr_assert(daemon_start(&d, NULL));
    daemon_configure(&d, "{\"limits\": {\"max_clients\": 0}}");
    (void)kill(d.pid, SIGHUP);
    cr_assert(daemon_wait_notified(&d, "reload refused: ", 5000));
}

Test(service, the_status_line_shows_the_pool_growing_and_grown)
{
    cr_assert(daemon_start(&d, "{\"pool\": {\"max_bytes\": \"512MiB\"}}"));
    cr_assert(daemon_wait_notified(&d, "STATUS=serving; pool: 512 MiB pinned", 20000));
}

Test(service, a_loop_that_stands_gives_no_sign_of_life)
{
    (void)setenv("WATCHDOG_USEC", "300000", 1);
    cr_assert(daemon_start(&d, NULL));
    for (int i = 0; i < 3; i++)
        cr_assert(daemon_wait_notified(&d, "WATCHDOG=1", 5000));
    (void)kill(d.pid, SIGSTOP);
    while (daemon_wait_notified(&d, "WATCHDOG=1", 0))
        ;
    cr_assert(!daemon_wait_notified(&d, "WATCHDOG=1", 600));
    (void)kill(d.pid, SIGCONT);
    cr_assert(daemon_wait_notified(&d, "WATCHDOG=1", 5000));
}

Test(service, nobody_is_fed_who_did_not_ask)
{
    (void)unsetenv("WATCHDOG_USEC");
    cr_assert(daemon_start(&d, NULL));
    cr_assert(!daemon_wait_notified(&d, "WATCHDOG=1", 300));
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
/* VmFlags of a mapping end with "dd" where the kernel leaves it out of a core file. */
static uint64_t kib_in_a_core(void)
{
    char path[64], line[512];
    uint64_t rss = 0, sum = 0;
    FILE *f;

    (void)snprintf(path, sizeof path, "/proc/%d/smaps", (int)d.pid);
    f = fopen(path, "re");
    cr_assert_not_null(f);
    while (fgets(line, sizeof line, f) != NULL) {
        (void)sscanf(line, "Rss: %lu kB", &rss);
        if (strncmp(line, "VmFlags:", 8) == 0 && strstr(line, " dd") == NULL)
            sum += rss;
    }
    (void)fclose(f);
    return sum;
}

static bool cores_land_in_the_working_folder(void)
{
    FILE *f = fopen("/proc/sys/kernel/core_pattern", "re");
    char text[128] = "";

    if (f != NULL) {
        (void)!fgets(text, sizeof text, f);
        (void)fclose(f);
    }
    return strcmp(text, "core\n") == 0;
}

Test(service, a_core_file_does_not_hold_the_pool)
{
    struct rlimit lim;
    struct stat st;
    char name[32];
    pid_t pid;

    (void)chdir(d.dir);
    (void)getrlimit(RLIMIT_CORE, &lim);
    lim.rlim_cur = lim.rlim_max;
    (void)setrlimit(RLIMIT_CORE, &lim);
    cr_assert(daemon_start(&d, "{\"pool\": {\"max_bytes\": \"1GiB\"}}"));
    cr_assert(daemon_wait_notified(&d, "pool: 1 GiB pinned", 30000));
    cr_assert_lt(kib_in_a_core(), 64 << 10);
    pid = d.pid;
    cr_assert_eq(daemon_stop(&d, SIGABRT), 128 + SIGABRT);
    if (lim.rlim_max != RLIM_INFINITY || !cores_land_in_the_working_folder())
        return; /* the kernel writes none here; what it would hold was counted above */
    (void)snprintf(name, sizeof name, "core.%d", (int)pid); /* so with kernel.core_uses_pid */
    cr_assert(stat("core", &st) == 0 || stat(name, &st) == 0);
    cr_assert_gt(st.st_size, 0);
    cr_assert_lt(st.st_size, 64 << 20, "%lld bytes", (long long)st.st_size);
}
#endif
