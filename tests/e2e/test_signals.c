#include <criterion/criterion.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "daemon/options.h"
#include "tests/support/daemon_fixture.h"
#include "tests/support/raw_client.h"

static daemon_fixture d;

static void init(void)
{
    daemon_init(&d);
}

static void fini(void)
{
    daemon_fini(&d);
}

TestSuite(signals, .init = init, .fini = fini);

static void join(raw_client *c)
{
    cr_assert(raw_connect(c, d.socket));
    cr_assert(raw_hello(c));
}

Test(signals, term_and_int_end_it_with_status_0_and_leave_no_file)
{
    static const int SIGNALS[] = {SIGTERM, SIGINT};

    for (unsigned i = 0; i < 2; i++) {
        raw_client c;

        cr_assert(daemon_start(&d, NULL));
        join(&c);
        (void)kill(d.pid, SIGNALS[i]);
        cr_assert(daemon_wait_notified(&d, "STOPPING=1", 5000));
        cr_assert_eq(daemon_wait(&d, 10000), EXIT_CODE_OK);
        cr_assert(raw_wait_end(&c, 1000));
        raw_close(&c);
        cr_assert_neq(access(d.socket, F_OK), 0);
        cr_assert_neq(access(d.admin, F_OK), 0);
    }
    cr_assert_eq(daemon_log_count(&d, "handles_leaked"), 0);
}

Test(signals, a_stop_right_after_exec_is_remembered)
{
    daemon_spawn(&d, NULL);
    cr_assert(daemon_wait_log(&d, "starting", 1, 10000));
    cr_assert_eq(daemon_stop(&d, SIGTERM), EXIT_CODE_OK);
}

Test(signals, none_but_a_stop_is_ever_fatal)
{
    static const int SIGNALS[] = {SIGHUP, SIGUSR1, SIGUSR2, SIGPIPE, SIGWINCH};
    raw_client c;

    daemon_spawn(&d, NULL);
    cr_assert(daemon_wait_log(&d, "starting", 1, 10000));
    for (unsigned i = 0; i < 20; i++)
        for (unsigned k = 0; k < 5; k++)
            cr_assert_eq(kill(d.pid, SIGNALS[k]), 0);
    cr_assert(daemon_wait_notified(&d, "READY=1", 10000));
    join(&c);
    for (unsigned i = 0; i < 100; i++)
        for (unsigned k = 0; k < 5; k++)
            cr_assert_eq(kill(d.pid, SIGNALS[k]), 0);
    cr_assert(raw_ping(&c, 9));
    raw_close(&c);
    (void)kill(d.pid, SIGTERM);
    for (unsigned i = 0; i < 50; i++)
        (void)kill(d.pid, SIGHUP);
    cr_assert_eq(daemon_wait(&d, 10000), EXIT_CODE_OK);
}

Test(signals, hang_up_applies_what_may_change)
{
    cr_assert(daemon_start(&d, "{\"pool\": {\"max_bytes\": \"16MiB\"}, \"limits\": {\"max_clients\": 5}}"));
    daemon_configure(&d, "{\"pool\": {\"max_bytes\": \"32MiB\"}, \"limits\": {\"max_clients\": 1}}");
    (void)kill(d.pid, SIGHUP);
    cr_assert(daemon_wait_notified(&d, "RELOADING=1", 5000));
    cr_assert(daemon_wait_notified(&d, "READY=1", 5000));
    cr_assert(daemon_wait_log(&d, "changed=limits.max_clients needs_restart=pool.max_bytes", 1, 5000));
    {
        raw_client first, second;

        join(&first);
        cr_assert(raw_connect(&second, d.socket));
        cr_assert(!raw_hello(&second), "the new limit holds");
        raw_close(&first);
        raw_close(&second);
    }
    cr_assert_eq(daemon_stop(&d, SIGTERM), EXIT_CODE_OK);
}

Test(signals, hang_up_with_a_bad_file_keeps_the_old_one)
{
    raw_client c;

    cr_assert(daemon_start(&d, NULL));
    daemon_configure(&d, "{\"limits\": {\"max_clients\": 0}}");
    (void)kill(d.pid, SIGHUP);
    cr_assert(daemon_wait_log(&d, "reload_refused", 1, 5000));
    cr_assert_eq(daemon_log_count(&d, "limits.max_clients"), 1);
    join(&c);
    raw_close(&c);
    cr_assert_eq(daemon_stop(&d, SIGTERM), EXIT_CODE_OK);
}

static const char BAD[] = "{\"pool\": {\"max_bites\": 1}}";

Test(signals, a_bad_configuration_ends_with_its_own_status)
{
    char out[1024];

    daemon_configure(&d, BAD);
    daemon_spawn(&d, NULL);
    cr_assert_eq(daemon_wait(&d, 10000), EXIT_CODE_CONFIG);
    cr_assert_eq(daemon_log_count(&d, "max_bites"), 1);
    cr_assert_eq(
        daemon_run(&d, (const char *[]){"--config", d.config, "--check-config", NULL}, out, sizeof out),
        EXIT_CODE_CONFIG);
    cr_assert_not_null(strstr(out, "max_bites"), "%s", out);
    cr_assert_eq(daemon_run(&d, (const char *[]){"--config", "/nonexistent.json", NULL}, out, sizeof out),
                 EXIT_CODE_CONFIG);
    cr_assert_not_null(strstr(out, "/nonexistent.json"), "%s", out);
}

Test(signals, the_command_line_prints_and_ends)
{
    static const struct {
        const char *args[4], *says;
        int code;
    } LINES[] = {
        {{"--version"}, "kvstrided ", EXIT_CODE_OK},
        {{"--help"}, "Exit codes", EXIT_CODE_OK},
        {{"--print-schema"}, "max_bytes", EXIT_CODE_OK},
        {{"--print-table"}, "pool.max_bytes", EXIT_CODE_OK},
        {{"--print-config", "--set", "limits.max_clients=77"}, "77", EXIT_CODE_OK},
        {{"--check-config", "--set", "limits.max_clients=0"}, "limits.max_clients", EXIT_CODE_CONFIG},
        {{"--set", "device.kind=cuda", "--check-config"}, "good", EXIT_CODE_OK},
        {{"--nonsense"}, "--nonsense", EXIT_CODE_USAGE},
        {{"--set"}, "--set", EXIT_CODE_USAGE}};
    char out[65536];

    for (size_t i = 0; i < sizeof LINES / sizeof LINES[0]; i++) {
        cr_assert_eq(daemon_run(&d, LINES[i].args, out, sizeof out), LINES[i].code, "%s: %s",
                     LINES[i].args[0], out);
        cr_assert_not_null(strstr(out, LINES[i].says), "%s: %s", LINES[i].args[0], out);
    }
}

Test(signals, what_it_prints_as_configuration_it_takes_back)
{
    char out[65536];

    cr_assert_eq(daemon_run(&d, (const char *[]){"--print-config", "--set", "pool.max_bytes=8MiB", NULL}, out,
                            sizeof out),
                 EXIT_CODE_OK);
    daemon_configure(&d, out);
    cr_assert_eq(
        daemon_run(&d, (const char *[]){"--config", d.config, "--check-config", NULL}, out, sizeof out),
        EXIT_CODE_OK, "%s", out);
}
