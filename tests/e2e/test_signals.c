#include <criterion/criterion.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/options.h"
#include "kernels/device_cuda.h"
#include "proto/layout.h"
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
    static const int SIGNALS[] = {SIGHUP, SIGUSR1, SIGUSR2, SIGPIPE, SIGWINCH, SIGXFSZ};
    raw_client c;

    daemon_spawn(&d, NULL);
    cr_assert(daemon_wait_log(&d, "starting", 1, 10000));
    for (unsigned i = 0; i < 20; i++)
        for (unsigned k = 0; k < sizeof SIGNALS / sizeof *SIGNALS; k++)
            cr_assert_eq(kill(d.pid, SIGNALS[k]), 0);
    cr_assert(daemon_wait_notified(&d, "READY=1", 10000));
    join(&c);
    for (unsigned i = 0; i < 100; i++)
        for (unsigned k = 0; k < sizeof SIGNALS / sizeof *SIGNALS; k++)
            cr_assert_eq(kill(d.pid, SIGNALS[k]), 0);
    cr_assert(raw_ping(&c, 9));
    raw_close(&c);
    (void)kill(d.pid, SIGTERM);
    for (unsigned i = 0; i < 50; i++)
        (void)kill(d.pid, SIGHUP);
    cr_assert_eq(daemon_wait(&d, 10000), EXIT_CODE_OK);
}

Test(signals, a_service_manager_that_does_not_read_stops_nothing)
{
    raw_client c;

    cr_assert(daemon_start(&d, NULL));
    join(&c);
    for (unsigned i = 1; i <= 600; i++) { /* more than the manager's queue holds; each reload tells it twice */
        (void)kill(d.pid, SIGHUP);
        cr_assert(raw_ping(&c, i));
    }
    raw_close(&c);
    cr_assert(daemon_wait_notified(&d, "RELOADING=1", 5000));
    (void)kill(d.pid, SIGTERM);
    cr_assert(daemon_wait_notified(&d, "STOPPING=1", 5000), "what waited gets through");
    cr_assert_eq(daemon_wait(&d, 10000), EXIT_CODE_OK);
}

Test(signals, hang_up_applies_what_may_change)
{
    cr_assert(daemon_start(&d, "{\"pool\": {\"max_bytes\": \"16MiB\"}, \"limits\": {\"max_clients\": 5}}"));
    daemon_configure(&d, "{\"pool\": {\"max_bytes\": \"16MiB\", \"max_slots\": 5}, \"limits\": {\"max_clients\": 1}}");
    (void)kill(d.pid, SIGHUP);
    cr_assert(daemon_wait_notified(&d, "RELOADING=1", 5000));
    cr_assert(daemon_wait_notified(&d, "READY=1", 5000));
    cr_assert(daemon_wait_log(&d, "changed=limits.max_clients needs_restart=pool.max_slots", 1, 5000));
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

static kvs_status ask_reload(void)
{
    static const uint8_t BODY[8]; /* flags 0: no dry run */
    raw_client c;
    frame f;

    cr_assert(raw_connect(&c, d.admin) && raw_hello(&c));
    cr_assert(raw_send(&c, WIRE_RELOAD, 7, BODY, sizeof BODY, NULL, 0));
    cr_assert(raw_recv(&c, &f, 5000));
    raw_close(&c);
    return (kvs_status)f.head.status;
}

/* How many reloads have failed so far, by the summary. */
static unsigned failed_reloads(void)
{
    static const uint8_t BODY[24] = {[8] = 0xff, [9] = 0xff, [10] = 0xff, [11] = 0xff}; /* section 0, no namespace */
    static const char NAME[] = "\"reloads_failed\":";
    unsigned n = 0;
    const char *at;
    raw_client c;
    frame f;

    cr_assert(raw_connect(&c, d.admin) && raw_hello(&c));
    cr_assert(raw_send(&c, WIRE_STATUS, 8, BODY, sizeof BODY, NULL, 0));
    cr_assert(raw_recv(&c, &f, 5000));
    cr_assert_eq(f.head.status, KVS_OK);
    at = memmem(f.body, f.head.body_len, NAME, sizeof NAME - 1);
    cr_assert_not_null(at);
    n = (unsigned)atoi(at + sizeof NAME - 1); /* a comma follows */
    raw_close(&c);
    return n;
}

/* Case 140, with the bad files of cases 127 to 139. */
Test(signals, a_reload_of_whatever_bad_file_keeps_the_old_one_and_is_counted)
{
    static const char *const BAD[] = {
        "",
        " \n",
        "\xef\xbb\xbf",
        "{\"limits\": {\"max_clients\": 3}",
        "{\"limits\": {\"max_clients\": 3}}}",
        "{\"limits\": {\"max_clients\": 3}} {}",
        "{\"limits\": {\"max_clients\": 3,}}",
        "{'limits': {}}",
        "{\"limits\": {\"max_clients\": 3}} // three",
        "[]",
        "7",
        "{\"limits\": {\"max_clients\": 1e999}}",
        "{\"limits\": {\"max_clients\": 1.5}}",
        "{\"limits\": {\"max_clients\": -1}}",
        "{\"limits\": {\"max_clients\": \"3\"}}",
        "{\"limits\": {\"max_clients\": null}}",
        "{\"limits\": {\"max_clients\": 3, \"max_clients\": 4}}",
        "{\"limits\": {\"max_client\": 3}}",
        "{\"pool\": {\"max_bytes\": \"64GB\"}}",
        "{\"pool\": {\"max_bytes\": 0}}",
        NULL, /* no file at all */
    };
    enum { N = sizeof BAD / sizeof BAD[0] };
    raw_client c;

    cr_assert(daemon_start(&d, "{\"pool\": {\"max_bytes\": \"16MiB\"}, \"limits\": {\"max_clients\": 2}}"));
    join(&c);
    for (unsigned i = 0; i < N; i++) {
        if (BAD[i] != NULL)
            daemon_configure(&d, BAD[i]);
        else
            cr_assert_eq(unlink(d.config), 0);
        cr_assert_eq(ask_reload(), KVS_E_CONFIG, "%s", BAD[i]);
        (void)kill(d.pid, SIGHUP);
        while (daemon_alive(&d) && failed_reloads() < 2 * i + 2)
            ;
        cr_assert(raw_ping(&c, 9));
    }
    cr_assert_eq(failed_reloads(), 2 * N);
    cr_assert_eq(daemon_log_count(&d, "reloaded file="), 0);
    daemon_configure(&d, "{\"pool\": {\"max_bytes\": \"16MiB\"}, \"limits\": {\"max_clients\": 3}}");
    cr_assert_eq(ask_reload(), KVS_OK);
    cr_assert(raw_ping(&c, 9));
    raw_close(&c);
    cr_assert_eq(daemon_stop(&d, SIGTERM), EXIT_CODE_OK);
}

/* One reply of this op and id; its fixed part begins behind the message. */
static wire_in reply_of(raw_client *c, uint16_t op, uint64_t id, frame *f)
{
    wire_in in;

    cr_assert(raw_recv(c, f, 5000), "no reply to op %u", op);
    cr_assert_eq(f->head.op, op);
    cr_assert_eq(f->head.id, id);
    cr_assert_eq(f->head.status, KVS_OK, "op %u: %s", op, kvs_status_name(f->head.status));
    for (unsigned i = 0; i < f->head.n_fds; i++)
        (void)close(f->fds[i]);
    in = (wire_in){.base = f->body, .len = f->head.body_len};
    (void)wire_get_array(&in, wire_get_u32(&in) + 4u, 1); /* message length, reserved word, message */
    return in;
}

static uint32_t open_namespace(raw_client *c)
{
    uint8_t canon[4096];
    kvs_namespace ns;
    kvs_plane planes[2];
    wire_open_rep rep;
    size_t len;
    frame f;
    wire_in in;

    cr_assert_eq(kvs_namespace_mla("model", "", KVS_FORMAT_mla_bf16, 2, 16, planes, &ns, NULL), KVS_OK);
    cr_assert_eq(kvs_namespace_encode(&ns, canon, sizeof canon, &len, NULL), KVS_OK);
    memset(canon + len, 0, 8);
    cr_assert(raw_send(c, WIRE_OPEN, 2, canon, (uint32_t)((len + 7) & ~(size_t)7), NULL, 0));
    in = reply_of(c, WIRE_OPEN, 2, &f);
    wire_get_open_rep(&in, &rep);
    return rep.ns;
}

static uint32_t create_region(raw_client *c, uint32_t ns)
{
    wire_region_create_req req = {.ns = ns, .kind = WIRE_REGION_SLOTS, .n_slots = 2};
    uint8_t body[64];
    wire_out o = {.base = body, .cap = sizeof body};
    wire_region_rep rep;
    frame f;
    wire_in in;

    wire_put_region_create_req(&o, &req);
    cr_assert(raw_send(c, WIRE_REGION_CREATE, 3, body, (uint32_t)o.len, NULL, 0));
    in = reply_of(c, WIRE_REGION_CREATE, 3, &f);
    wire_get_region_rep(&in, &rep);
    return rep.region;
}

/* A STORE that waits for a counter which nobody will ever advance: id 5. */
static void store_and_wait(raw_client *c)
{
    wire_store_req req = {
        .ns = open_namespace(c), .n = 1, .after_counter = 0, .after_value = 1, .signal_counter = WIRE_NONE32};
    wire_slot_take_req take = {.n = 1};
    uint8_t body[256], key[32] = {1};
    wire_out o = {.base = body, .cap = sizeof body};
    frame f;
    wire_in in;

    req.region = take.region = create_region(c, req.ns);
    wire_put_slot_take_req(&o, &take);
    cr_assert(raw_send(c, WIRE_SLOT_TAKE, 4, body, (uint32_t)o.len, NULL, 0));
    in = reply_of(c, WIRE_SLOT_TAKE, 4, &f);
    (void)wire_get_u64(&in);
    {
        wire_slot_ref slot;

        wire_get_slot_ref(&in, &slot);
        o.len = 0;
        wire_put_store_req(&o, &req);
        wire_put_bytes(&o, key, sizeof key);
        wire_put_slot_ref(&o, &slot);
    }
    cr_assert(raw_send(c, WIRE_STORE, 5, body, (uint32_t)o.len, NULL, 0));
    cr_assert(raw_ping(c, 6), "it waits, and the daemon does not");
}

/* Symptom: what waited for a counter kept the daemon until the drain timed out, and the socket ended without a reply. */
Test(signals, a_stop_answers_what_waits_for_a_counter_and_ends)
{
    raw_client c;
    frame f;

    cr_assert(daemon_start(&d, "{\"pool\": {\"max_bytes\": \"16MiB\"}, \"drain\": {\"timeout_ms\": 600000}}"));
    join(&c);
    store_and_wait(&c);
    (void)kill(d.pid, SIGTERM);
    cr_assert(raw_recv(&c, &f, 5000));
    cr_assert_eq(f.head.id, 5);
    cr_assert_eq(f.head.status, KVS_E_CANCELLED);
    cr_assert(raw_wait_end(&c, 5000));
    cr_assert_eq(daemon_wait(&d, 10000), EXIT_CODE_OK);
    raw_close(&c);
}

/* Does any client leave replies unread?  A reply of STATUS, section clients. */
static bool holds_back(wire_in in)
{
    static const char FIELD[] = "\"out_bytes\":";
    const uint8_t *at = in.base + in.pos, *end = in.base + in.len;

    while ((at = memmem(at, (size_t)(end - at), FIELD, sizeof FIELD - 1)) != NULL) {
        at += sizeof FIELD - 1;
        if (*at != '0')
            return true;
    }
    return false;
}

static void ask(raw_client *c, uint32_t section, uint64_t id)
{
    uint8_t body[WIRE_status_req_BYTES];
    wire_out o = {.base = body, .cap = sizeof body};

    wire_put_status_req(&o, &(wire_status_req){.section = section, .ns = WIRE_NONE32});
    cr_assert(raw_send(c, WIRE_STATUS, id, body, sizeof body, NULL, 0));
}

/* Ask for more than a socket holds and read none of it, until the daemon has to keep some. */
static void read_nothing(raw_client *c)
{
    raw_client admin;
    bool held = false;
    frame f;

    for (uint64_t i = 0; i < 400; i++)
        ask(c, WIRE_SECTION_SUMMARY, 10 + i);
    cr_assert(raw_connect(&admin, d.admin));
    cr_assert(raw_hello(&admin));
    for (uint64_t i = 0; !held; i++) {
        ask(&admin, WIRE_SECTION_CLIENTS, 10 + i);
        held = holds_back(reply_of(&admin, WIRE_STATUS, 10 + i, &f));
    }
    raw_close(&admin);
}

Test(signals, a_stop_waits_for_unread_replies_no_longer_than_configured)
{
    uint64_t start;
    raw_client c;

    cr_assert(daemon_start(&d, "{\"pool\": {\"max_bytes\": \"16MiB\"}, \"drain\": {\"timeout_ms\": 300}}"));
    join(&c);
    read_nothing(&c);
    start = raw_now_ms();
    cr_assert_eq(daemon_stop(&d, SIGTERM), EXIT_CODE_OK);
    cr_assert_geq(raw_now_ms() - start, 290);
    cr_assert_leq(raw_now_ms() - start, 5000);
    cr_assert_eq(daemon_log_count(&d, "drain_timeout"), 1);
    raw_close(&c);
}

Test(signals, a_second_stop_waits_for_nothing)
{
    raw_client c, other;

    cr_assert(daemon_start(&d, "{\"pool\": {\"max_bytes\": \"16MiB\"}, \"drain\": {\"timeout_ms\": 600000}}"));
    join(&c);
    join(&other);
    read_nothing(&c);
    (void)kill(d.pid, SIGTERM);
    cr_assert(daemon_wait_notified(&d, "STOPPING=1", 5000));
    cr_assert(raw_ping(&other, 7) || !other.ended, "who is in stays in while it drains");
    cr_assert_eq(daemon_stop(&d, SIGTERM), EXIT_CODE_OK);
    cr_assert_eq(daemon_log_count(&d, "drain_cut_short"), 1);
    raw_close(&c);
    raw_close(&other);
}

Test(signals, a_client_that_leaves_with_a_request_waiting_leaves_nothing)
{
    unsigned before;
    raw_client c;

    cr_assert(daemon_start(&d, NULL));
    before = daemon_fds(&d);
    for (unsigned i = 0; i < 20; i++) {
        join(&c);
        store_and_wait(&c);
        raw_close(&c);
    }
    cr_assert(daemon_wait_fds(&d, before, 1000), "back within a second");
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
    cr_assert_eq(daemon_run(&d, (const char *[]){"--config", d.config, "--check-config", NULL}, out, sizeof out),
                 EXIT_CODE_CONFIG);
    cr_assert_not_null(strstr(out, "max_bites"), "%s", out);
    cr_assert_eq(daemon_run(&d, (const char *[]){"--config", "/nonexistent.json", NULL}, out, sizeof out),
                 EXIT_CODE_CONFIG);
    cr_assert_not_null(strstr(out, "/nonexistent.json"), "%s", out);
}

Test(signals, a_pool_that_gets_no_memory_at_all_ends_with_a_system_fault_that_names_both_sizes)
{
    d.no_memory = true;
    daemon_configure(&d, "{\"pool\": {\"max_bytes\": \"16MiB\"}}");
    daemon_spawn(&d, NULL);
    cr_assert(!daemon_wait_notified(&d, "READY=1", 10000));
    cr_assert_eq(daemon_wait(&d, 10000), EXIT_CODE_SYSTEM);
    cr_assert_eq(daemon_log_count(&d, " start_failed "), 1);
    cr_assert_eq(daemon_log_count(&d, "not even the first 16777216 bytes of 16777216"), 1);
    cr_assert_eq(daemon_log_count(&d, "are available"), 2, "also where the piece failed");
    cr_assert_eq(daemon_log_count(&d, " pool_above_memory "), 0);
    daemon_configure(&d, "{\"pool\": {\"max_bytes\": \"4000GiB\"}}");
    daemon_spawn(&d, NULL);
    cr_assert_eq(daemon_wait(&d, 10000), EXIT_CODE_SYSTEM);
    cr_assert_eq(daemon_log_count(&d, " pool_above_memory pool_max_bytes=4294967296000 memory_bytes="), 1);
    daemon_configure(&d, "{\"pool\": {\"max_bytes\": \"16MiB\"}}");
    d.no_memory = false;
    cr_assert(daemon_start(&d, NULL), "with memory it starts");
    cr_assert_eq(daemon_stop(&d, SIGTERM), EXIT_CODE_OK);
}

/* Symptom: it died of SIGXFSZ without a word. */
Test(signals, a_limit_of_files_below_the_pool_ends_with_a_system_fault_that_names_it)
{
    d.max_file_bytes = 8 << 20;
    daemon_configure(&d, "{\"pool\": {\"max_bytes\": \"16MiB\", \"reserve_bytes\": \"32MiB\"}}");
    daemon_spawn(&d, NULL);
    cr_assert_eq(daemon_wait(&d, 10000), EXIT_CODE_SYSTEM);
    cr_assert_eq(
        daemon_log_count(&d, "kvs-arena: cannot size it to 33554432 bytes: RLIMIT_FSIZE allows files of 8388608"), 1);
    cr_assert_eq(daemon_log_count(&d, "LimitFSIZE="), 1);
}

Test(signals, without_a_gpu_cuda_is_refused_and_auto_takes_the_cpu_with_a_reason)
{
    uint32_t n = 0;

    if (device_cuda_count(&n, NULL) == KVS_OK)
        cr_skip("this machine has a GPU");
    daemon_configure(&d, "{\"device\": {\"kind\": \"cuda\"}, \"pool\": {\"max_bytes\": \"16MiB\"}}");
    daemon_spawn(&d, NULL);
    cr_assert(!daemon_wait_notified(&d, "READY=1", 10000));
    cr_assert_eq(daemon_wait(&d, 10000), EXIT_CODE_SYSTEM);
    cr_assert_eq(daemon_log_count(&d, "device.kind: cuda: cuda device: "), 1);
    cr_assert(daemon_start(&d, "{\"device\": {\"kind\": \"auto\"}, \"pool\": {\"max_bytes\": \"16MiB\"}}"));
    cr_assert_eq(daemon_log_count(&d, " kind=cpu reason="), 1);
    cr_assert_eq(daemon_stop(&d, SIGTERM), EXIT_CODE_OK);
    cr_assert(daemon_start(&d, "{\"device\": {\"kind\": \"cpu\"}, \"pool\": {\"max_bytes\": \"16MiB\"}}"));
    cr_assert_eq(daemon_log_count(&d, " kind=cpu reason="), 1, "cpu was asked for: there is nothing to say");
    cr_assert_eq(daemon_stop(&d, SIGTERM), EXIT_CODE_OK);
}

Test(signals, the_command_line_prints_and_ends)
{
    static const struct {
        const char *args[4], *says;
        int code;
    } LINES[] = {{{"--version"}, "kvstrided ", EXIT_CODE_OK},
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
        cr_assert_eq(daemon_run(&d, LINES[i].args, out, sizeof out), LINES[i].code, "%s: %s", LINES[i].args[0], out);
        cr_assert_not_null(strstr(out, LINES[i].says), "%s: %s", LINES[i].args[0], out);
    }
}

/* Symptom: exit status 0, and nobody had read a word. */
Test(signals, what_it_cannot_print_is_a_failure)
{
    static const char *const LINES[][2] = {
        {"--help"}, {"--version"}, {"--print-table"}, {"--print-config"}, {"--check-config"}};
    char out[65536];

    for (d.closed_fds = 2; d.closed_fds < 8; d.closed_fds++)
        for (size_t i = 0; i < sizeof LINES / sizeof LINES[0] && (d.closed_fds & 2) != 0; i++) {
            cr_assert_eq(daemon_run(&d, LINES[i], out, sizeof out), EXIT_CODE_SYSTEM, "%s", LINES[i][0]);
            cr_assert_str_eq(out, (d.closed_fds & 4) != 0 ? "" : "kvstrided: standard output cannot be written\n");
        }
}

Test(signals, descriptors_that_it_was_started_without_become_none_of_its_own)
{
    raw_client c;

    d.closed_fds = 7;
    cr_assert(daemon_start(&d, NULL));
    for (int fd = 0; fd < 3; fd++) {
        char path[64], target[64] = "";

        (void)snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)d.pid, fd);
        cr_assert(readlink(path, target, sizeof target - 1) > 0);
        cr_assert_str_eq(target, "/dev/null", "%d", fd);
    }
    join(&c);
    (void)kill(d.pid, SIGHUP);
    cr_assert(daemon_wait_notified(&d, "RELOADING=1", 5000));
    cr_assert(raw_ping(&c, 1));
    raw_close(&c);
    cr_assert_eq(daemon_stop(&d, SIGTERM), EXIT_CODE_OK);
}

/* Symptom: the control characters of words and paths came through to the terminal. */
Test(signals, the_command_line_shows_no_control_characters)
{
    static const char *const LINES[][4] = {{"--set", "x\033[31m"},
                                           {"--non\033[31msense"},
                                           {"word\302\23331m"},
                                           {"--config", "/nonexistent\033[31m.json", "--check-config"},
                                           {"--config", "/nonexistent\033[31m\233.json"},
                                           {"--set", "pool.max_bytes=\033[31m", "--check-config"},
                                           {"--set", "po\302\23331mol.max_bytes=1", "--check-config"},
                                           {"--set", "socket.path=/\177\302\233", "--print-config"}};
    char out[65536], odd[128];
    FILE *f;

    for (size_t i = 0; i < sizeof LINES / sizeof LINES[0]; i++) {
        (void)daemon_run(&d, LINES[i], out, sizeof out);
        cr_assert_neq(out[0], '\0');
        cr_assert(strpbrk(out, "\033\177\233") == NULL, "%s %s: %s", LINES[i][0], LINES[i][1], out);
    }
    (void)snprintf(odd, sizeof odd, "%s/odd\033[31m\302\233.json", d.dir);
    f = fopen(odd, "we");
    cr_assert(f != NULL && fputs("{}", f) >= 0 && fclose(f) == 0);
    (void)daemon_run(&d, (const char *[]){"--config", odd, "--check-config", NULL}, out, sizeof out);
    cr_assert_not_null(strstr(out, "/odd?[31m??.json: good\n"), "%s", out);
}

/* Symptom: a pool of 900 GiB was good on a machine of 23, and only the start warned. */
Test(signals, a_check_of_the_configuration_warns_of_a_pool_above_memory_as_a_start_does)
{
    char out[2048];

    cr_assert_eq(
        daemon_run(&d, (const char *[]){"--check-config", "--set", "pool.max_bytes=4000GiB", NULL}, out, sizeof out),
        EXIT_CODE_OK, "%s", out);
    cr_assert_eq(strncmp(out, "warn pool_above_memory pool_max_bytes=4294967296000 memory_bytes=", 65), 0, "%s", out);
    cr_assert_not_null(strstr(out, ": good\n"), "%s", out);
    cr_assert_eq(
        daemon_run(&d, (const char *[]){"--check-config", "--set", "pool.max_bytes=8MiB", NULL}, out, sizeof out),
        EXIT_CODE_OK, "%s", out);
    cr_assert_null(strstr(out, "warn"), "%s", out);
}

Test(signals, what_it_prints_as_configuration_it_takes_back)
{
    char out[65536];

    cr_assert_eq(
        daemon_run(&d, (const char *[]){"--print-config", "--set", "pool.max_bytes=8MiB", NULL}, out, sizeof out),
        EXIT_CODE_OK);
    daemon_configure(&d, out);
    cr_assert_eq(daemon_run(&d, (const char *[]){"--config", d.config, "--check-config", NULL}, out, sizeof out),
                 EXIT_CODE_OK, "%s", out);
}
