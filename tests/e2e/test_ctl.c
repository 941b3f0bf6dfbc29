/* The real kvstridectl, against the real daemon and daemons of its own. */
#include <criterion/criterion.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "config/json.h"
#include "proto/client/kvstride.h"
#include "proto/text.h"
#include "tests/support/daemon_fixture.h"

enum { MAX_WORDS = 24, SLOTS = 64, CALL_MS = 30000, PATIENCE_MS = 30000, MANY = 5000 };

static daemon_fixture d;
static kvs_err err;

#define OK(call) cr_assert_eq((call), KVS_OK, "%s: %s", #call, err.msg)

/* ---- running it ---- */

/* What one run left; the texts are replaced by the next one. */
static struct {
    int code; /* exit status, or 128 + signal */
    char out[1 << 20], err[1 << 14];
} ran;

static void program_path(char *buf, size_t cap)
{
    ssize_t n = readlink("/proc/self/exe", buf, cap - 16);

    cr_assert(n > 0);
    buf[n] = '\0';
    for (int up = 0; up < 3; up++)
        *strrchr(buf, '/') = '\0';
    (void)strcat(buf, "/kvstridectl");
}

/* Start it with words separated by spaces ("~" stands for an empty one), its output going to these descriptors. */
static pid_t start(const char *words, int out, int errors)
{
    char program[4096], copy[4096], *save = NULL;
    char *argv[MAX_WORDS] = {program};
    int n = 1;
    pid_t pid;

    program_path(program, sizeof program);
    (void)snprintf(copy, sizeof copy, "%s", words);
    for (char *w = strtok_r(copy, " ", &save); w != NULL && n < MAX_WORDS - 1; w = strtok_r(NULL, " ", &save))
        argv[n++] = strcmp(w, "~") == 0 ? w + 1 : w;
    pid = fork();
    cr_assert(pid >= 0);
    if (pid == 0) {
        (void)dup2(errors, STDERR_FILENO);
        if (dup2(out, STDOUT_FILENO) < 0) { /* -1: it has none, nor an input */
            (void)close(STDIN_FILENO);
            (void)close(STDOUT_FILENO);
        }
        (void)execv(program, argv);
        _exit(127);
    }
    return pid;
}

static int end_of(pid_t pid)
{
    int status = 0;

    cr_assert_eq(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static void take(int fd, char *text, size_t cap)
{
    ssize_t n = pread(fd, text, cap - 1, 0);

    cr_assert(n >= 0 && (size_t)n < cap - 1, "more output than there is room for");
    text[n] = '\0';
    (void)close(fd);
}

__attribute__((format(printf, 1, 2))) static int run(const char *fmt, ...)
{
    int out = memfd_create("out", MFD_CLOEXEC), errors = memfd_create("err", MFD_CLOEXEC);
    char words[4096];
    va_list ap;

    va_start(ap, fmt);
    (void)vsnprintf(words, sizeof words, fmt, ap);
    va_end(ap);
    ran.code = end_of(start(words, out, errors));
    take(out, ran.out, sizeof ran.out);
    take(errors, ran.err, sizeof ran.err);
    return ran.code;
}

#define RUNS(want, ...)                                                                                                \
    do {                                                                                                               \
        int got_ = run(__VA_ARGS__);                                                                                   \
        cr_assert_eq(got_, (want), "exit %d, not %d; stdout: %.300s stderr: %.600s", got_, (want), ran.out, ran.err);  \
    } while (0)
#define SAYS(where, text) cr_assert_not_null(strstr(ran.where, (text)), "'%s' is not in: %.900s", (text), ran.where)

/* The run's output as one document; the caller ends it. */
static json *answer(void)
{
    json *j = NULL;

    cr_assert_eq(json_parse(ran.out, strlen(ran.out), &j, &err), KVS_OK, "%s: %.300s", err.msg, ran.out);
    return j;
}

static const json_node *member(const json *j, const char *key)
{
    const json_node *n = json_type_of(json_root(j)) == JSON_OBJECT ? json_member(json_root(j), key) : NULL;

    cr_assert_not_null(n, "no member %s in %.300s", key, ran.out);
    return n;
}

static int64_t number(const json *j, const char *key)
{
    int64_t v = -1;

    cr_assert(json_whole(member(j, key), &v), "%s is no whole number", key);
    return v;
}

static unsigned count(const char *text, char c)
{
    unsigned n = 0;

    for (; *text != '\0'; text++)
        n += *text == c;
    return n;
}

/* ---- a daemon with blocks in it ---- */

typedef struct engine {
    kvs_client *c;
    kvs_ns *ns;
    kvs_region *region;
    kvs_slot slots[SLOTS];
} engine;

static void engine_open(engine *e, const char *model)
{
    kvs_options o = KVS_OPTIONS_INIT;
    kvs_plane plane;
    kvs_namespace desc;

    o.path = d.socket;
    o.name = "test engine";
    OK(kvs_connect(&e->c, &o, &err));
    OK(kvs_namespace_mla(model, "", KVS_FORMAT_mla_bf16, 1, 1, &plane, &desc, &err));
    OK(kvs_open(e->c, &desc, &e->ns, CALL_MS, &err));
    OK(kvs_region_create(e->ns, 0, SLOTS, &e->region, CALL_MS, &err));
    OK(kvs_slot_take(e->region, SLOTS, e->slots, CALL_MS, &err));
}

/* Key i of a test: its number, then sevens. */
static void key_fill(uint8_t key[32], uint32_t i)
{
    memset(key, 7, 32);
    memcpy(key, &i, sizeof i);
}

static const char *key_text(uint32_t i)
{
    static char hex[65];
    uint8_t key[32];

    key_fill(key, i);
    for (int b = 0; b < 32; b++)
        (void)snprintf(hex + 2 * b, 3, "%02x", key[b]);
    return hex;
}

static void engine_store(engine *e, uint32_t first, uint32_t n)
{
    static uint8_t keys[MANY][32];
    static kvs_slot slots[MANY];
    static kvs_status results[MANY];
    kvs_store_args a = {.ns = e->ns, .region = e->region, .n = n, .keys = keys[0], .slots = slots, .results = results};

    cr_assert(n <= MANY);
    for (uint32_t i = 0; i < n; i++) {
        key_fill(keys[i], first + i);
        slots[i] = e->slots[i % SLOTS];
    }
    OK(kvs_store(&a, CALL_MS, &err));
}

static void up(void)
{
    daemon_init(&d);
    cr_assert(daemon_start(&d, "{\"pool\": {\"max_bytes\": \"16MiB\"}}"));
}

static void down(void)
{
    cr_assert_eq(daemon_stop(&d, SIGTERM), 0);
    daemon_fini(&d);
}

/* ---- words ---- */

static const char *const COMMANDS[] = {"status",  "ping",  "health",  "ls",     "namespaces", "leases",
                                       "clients", "watch", "fsck",    "drop",   "reset",      "replay",
                                       "bench",   "demo",  "tenants", "reload", "drain",      "calibrate"};
enum { N_COMMANDS = sizeof COMMANDS / sizeof *COMMANDS };

Test(ctl_words, helps_with_every_command)
{
    RUNS(0, "--help");
    SAYS(out, "Exit status: 0 done");
    cr_assert_str_empty(ran.err);
    for (int i = 0; i < N_COMMANDS; i++) {
        char line[32];

        RUNS(0, "--help");
        (void)snprintf(line, sizeof line, "\n  %s ", COMMANDS[i]);
        SAYS(out, line);
        RUNS(0, "%s --help", COMMANDS[i]);
        (void)snprintf(line, sizeof line, "usage: kvstridectl %s ", COMMANDS[i]);
        SAYS(out, line);
        SAYS(out, "--json");
    }
    RUNS(0, "help replay");
    SAYS(out, "usage: kvstridectl replay ");
    RUNS(0, "help");
    SAYS(out, "usage: kvstridectl COMMAND");
    RUNS(2, "help shake");
    SAYS(err, "unknown command 'shake'");
    RUNS(0, "replay -h");
    SAYS(out, "--blocks N");
    cr_assert_null(strstr(ran.out, "--pinned"), "an option of another command is shown");
}

/* Of GPU 255 there is none anywhere. */
Test(ctl_words, calibrates_nothing_without_a_gpu_and_says_so_by_a_code_of_its_own)
{
    RUNS(5, "calibrate --gpu 255 --folder /tmp");
    cr_assert_str_empty(ran.out);
    SAYS(err, "kvstridectl: calibrate: cuda device: ");
    RUNS(5, "calibrate --gpu 255 --json");
    SAYS(out, "\"status\":\"E_UNSUPPORTED\"");
    if (access("/dev/nvidiactl", F_OK) != 0) {
        RUNS(5, "bench --engine compute");
        cr_assert_str_empty(ran.out);
    }
    RUNS(2, "bench --engine nothing");
    RUNS(0, "calibrate --help");
    SAYS(out, "Exit 5 without a GPU");
}

Test(ctl_words, says_its_version)
{
    RUNS(0, "--version");
    cr_assert_str_eq(ran.out, "kvstridectl " KVS_VERSION "\n");
}

Test(ctl_words, refuses_wrong_words_and_names_them)
{
    static const char *const CASES[][2] = {
        {"~", "unknown command ''"},
        {"shake", "unknown command 'shake'"},
        {"shake --help", "unknown command 'shake'"},
        {"helth", "unknown command 'helth'; did you mean health?"},
        {"x", "unknown command 'x'\n"},
        {"a\033[2Jb", "unknown command 'a?[2Jb'\n"},
        {"--shake ping", "unknown option --shake\n"},
        {"status --jsn", "unknown option --jsn; did you mean --json?"},
        {"keys --limt=5", "unknown option --limt=5; did you mean --limit?"},
        {"ping --shake=5", "unknown option --shake=5"},
        {"-xy ping", "unknown option -x"},
        {"ping --json=yes", "--json takes no value"},
        {"ping --socket", "--socket needs a value"},
        {"ping --pinned", "ping does not take --pinned"},
        {"demo --socket /x", "demo does not take --socket"},
        {"bench --blocks 5", "bench does not take --blocks"},
        {"ping more words", "too many words: 'more'"},
        {"stats --seconds 3", "--seconds says when --interval N ends, and there is none"},
        {"replay", "replay needs --trace"},
        {"replay --trace x", "replay needs --trace"},
        {"replay --trace x --blocks 5 --socket y", "replay needs --trace"},
        {"drop --ns 0", "drop needs --ns N and at least one key"},
        {"drop 00", "drop needs --ns N and at least one key"},
        {"drop --ns 0 00", "'00' is not a key of 64 hex digits"},
        {"drop --ns 0 0g00000000000000000000000000000000000000000000000000000000000000", "is not a key"},
    };

    for (size_t i = 0; i < sizeof CASES / sizeof *CASES; i++) {
        RUNS(2, "%s", CASES[i][0]);
        SAYS(err, CASES[i][1]);
        SAYS(err, strncmp(CASES[i][0], "replay", 6) == 0 ? "Try 'kvstridectl replay --help'" : "--help'.");
        cr_assert_str_empty(ran.out);
    }
    RUNS(2, " ");
    SAYS(err, "no command");
}

Test(ctl_words, refuses_numbers_out_of_range_and_says_the_range)
{
    static const char *const BAD[] = {"~", "-1", "+1", "1x", "0x1", "1.5", "1e3", "99999999999999999999", "x"};
    static const char *const ENDS[][2] = {
        {"ping --timeout-ms 0", "1..3600000"},   {"ping --timeout-ms 3600001", "1..3600000"},
        {"ls --ns 4294967295", "0..4294967294"}, {"ls --limit 4294967296", "0..4294967295"},
        {"watch --seconds 0", "1..86400"},       {"watch --seconds 86401", "1..86400"},
        {"replay --blocks 0", "1..4294967294"},  {"replay --layers 0", "1.."},
        {"replay --layers 1000000", "1.."},      {"replay --tokens 1000000", "1.."},
        {"replay --clients 65", "1..64"},        {"replay --clients 0", "1..64"},
    };

    for (size_t i = 0; i < sizeof BAD / sizeof *BAD; i++) {
        RUNS(2, "ls --ns %s", BAD[i]);
        SAYS(err, "is not a whole number of 0..4294967294");
    }
    for (size_t i = 0; i < sizeof ENDS / sizeof *ENDS; i++) {
        RUNS(2, "%s", ENDS[i][0]);
        SAYS(err, ENDS[i][1]);
    }
}

/* Symptom: the bench ran for minutes and ended with "No such file or directory" and exit status 3. */
Test(ctl_words, refuses_a_drawing_that_cannot_be_written_before_it_measures)
{
    RUNS(2, "bench --svg /nonexistent-folder/bench.svg");
    SAYS(err, "/nonexistent-folder/bench.svg: No such file");
    cr_assert_str_empty(ran.out);
}

/* ---- no daemon ---- */

static void expect_tame(const char *text)
{
    kvs_err why = {0};

    for (size_t len; *text != '\0'; text += text[len] == '\n' ? len + 1 : len) {
        len = strcspn(text, "\n");
        cr_assert_eq(text_check("line", (const uint8_t *)text, len, &why), KVS_OK, "%s: %s", why.msg, text);
    }
}

Test(ctl_away, exits_3_when_nothing_listens)
{
    json *j;

    for (int i = 0; i < 9; i++) { /* those of a running daemon, but drop */
        RUNS(3, "%s --socket /tmp/kvs-nobody-here.sock", COMMANDS[i]);
        SAYS(err,
             "/tmp/kvs-nobody-here.sock: nothing listens there (No such file or directory); is kvstrided running?\n");
        cr_assert_str_empty(ran.out);
    }
    RUNS(3, "status --json --socket /tmp/kvs-nobody-here.sock");
    j = answer();
    cr_assert_str_eq(json_string(member(j, "status")), "E_AWAY");
    cr_assert_not_null(strstr(json_string(member(j, "error")), "nothing listens"));
    json_destroy(j);
    cr_assert_eq(unsetenv("KVSTRIDE_ADMIN_SOCKET"), 0);
    if (access("/run/kvstrided", F_OK) == 0)
        cr_skip_test("a daemon may be installed here");
    RUNS(3, "status");
    SAYS(err, "; is kvstrided running?  --socket or $KVSTRIDE_ADMIN_SOCKET names another one");
}

/* Symptom: the control characters of a path came through to the terminal. */
Test(ctl_away, shows_no_control_characters_of_paths_and_words)
{
    static const char *const CASES[] = {
        "status --socket /tmp/a\033[31mb",
        "status --socket /tmp/a\302\23331mb",
        "status --json --socket /tmp/a\033[31mb",
        "status --json --socket /tmp/a\302\23331mb",
        "status --json --socket /tmp/a\177\nb",
        "replay --blocks 5 --trace /nonexistent/a\033[31mb",
        "bench --svg /nonexistent/a\033[31m\233\177.svg",
        "bench --engine a\033[31mb",
        "calibrate --gpu 255 --folder /nonexistent/a\033[31mb",
        "\302\23331mb",
        "status --\302\23331mb",
        "ping \302\23331mb",
        "ls --ns \233",
        "drop --ns 0 \302\23331m",
    };

    for (size_t i = 0; i < sizeof CASES / sizeof *CASES; i++) {
        (void)run("%s", CASES[i]);
        cr_assert_neq(ran.code, 0);
        expect_tame(ran.out);
        expect_tame(ran.err);
        cr_assert_neq(ran.err[0], '\0');
    }
    RUNS(3, "status --socket /tmp/a\033[31mb");
    SAYS(err, "/tmp/a?[31mb: nothing listens there");
}

Test(ctl_away, exits_2_when_the_path_is_none)
{
    RUNS(2, "ping --socket /tmp/%0120d.sock", 0);
    SAYS(err, "socket path");
    RUNS(2, "ping --socket ~");
}

/* ---- a running daemon ---- */

TestSuite(ctl, .init = up, .fini = down);

Test(ctl, exits_3_when_the_socket_may_not_be_opened)
{
    pid_t pid;
    int null = open("/dev/null", O_RDWR | O_CLOEXEC), errors = memfd_create("err", MFD_CLOEXEC);
    char words[160];

    (void)snprintf(words, sizeof words, "ping --socket %s", d.admin);
    cr_assert_eq(chmod(d.admin, 0), 0);
    pid = fork();
    if (pid == 0) {
        if (getuid() == 0 && setuid(65534) != 0)
            _exit(99);
        _exit(end_of(start(words, null, errors)));
    }
    ran.code = end_of(pid);
    take(errors, ran.err, sizeof ran.err);
    (void)close(null);
    if (ran.code == 127)
        cr_skip_test("the build folder is not open to others");
    cr_assert_eq(ran.code, 3, "exit %d: %s", ran.code, ran.err);
    SAYS(err, "Permission denied; an admin socket is for root and the daemon's own user");
}

/* Symptom: "section: 7 is for the admin socket", and nothing about how to name that one. */
Test(ctl, says_which_socket_it_needs_on_one_of_engines)
{
    static const char *const WORDS[][2] = {
        {"ls", "section: keys"},          {"stats", "section: metrics"}, {"tenants", "section: tenants"},
        {"fsck", "section: fsck"},        {"leases", "section: leases"}, {"clients", "section: clients"},
        {"namespaces", "section: names"}, {"reload", "op: RELOAD"},      {"drain", "op: DRAIN"}};

    for (size_t i = 0; i < sizeof WORDS / sizeof *WORDS; i++) {
        RUNS(4, "%s --socket %s", WORDS[i][0], d.socket);
        SAYS(err, WORDS[i][1]);
        SAYS(err, " is for the admin socket; this is that of tenant default; --socket or $KVSTRIDE_ADMIN_SOCKET names "
                  "the admin socket, by default /run/kvstrided/admin.sock\n");
    }
}

Test(ctl, exits_4_when_the_daemon_refuses)
{
    RUNS(4, "ls --socket %s", d.socket);
    SAYS(err, "admin socket");
    RUNS(4, "clients --json --socket %s", d.socket);
    SAYS(out, "\"status\":\"E_DENIED\"");
    RUNS(4, "ls --socket %s --ns 77", d.admin);
    cr_assert_str_eq(ran.out, "", "no titles above a refusal");
    SAYS(err, "ns: 77 is no namespace of this daemon; 'kvstridectl namespaces' lists them");
    RUNS(4, "drop --socket %s --ns 77 %s", d.admin, key_text(0));
    RUNS(4, "reset --socket %s --ns 77", d.admin);
}

Test(ctl, shows_every_report_as_text_and_as_json)
{
    static const char *const CASES[][3] = {
        {"status", "version", "health"}, {"ping", "ok", " us\n"},
        {"health", "state", "ok  up "},  {"namespaces", "namespaces", "alpaca"},
        {"leases", "leases", "leases"},  {"clients", "clients", "test engine"},
        {"fsck", "ok", "problem"},       {"tenants", "tenants", "default"},
    };
    engine e;

    engine_open(&e, "alpaca");
    engine_store(&e, 0, 3);
    for (size_t i = 0; i < sizeof CASES / sizeof *CASES; i++) {
        json *j;

        RUNS(0, "%s --socket %s", CASES[i][0], d.admin);
        SAYS(out, CASES[i][2]);
        cr_assert_str_empty(ran.err);
        RUNS(0, "--json --timeout-ms 20000 --socket %s %s", d.admin, CASES[i][0]);
        j = answer();
        (void)member(j, CASES[i][1]);
        cr_assert_eq(count(ran.out, '\n'), 1, "one document, one line");
        cr_assert_str_empty(ran.err);
        json_destroy(j);
    }
    kvs_close(e.c);
}

Test(ctl, reloads_and_says_what_applies_and_what_needs_a_restart)
{
    json *j;

    daemon_configure(&d,
                     "{\"pool\": {\"max_bytes\": \"16MiB\", \"checksum\": false}, \"socket\": {\"mode\": \"0600\"}}");
    RUNS(0, "reload --dry-run --json --socket %s", d.admin);
    j = answer();
    cr_assert_eq(json_size(member(j, "applied")), 1);
    cr_assert_eq(json_size(member(j, "needs_restart")), 1);
    SAYS(out, "\"dry_run\":true");
    json_destroy(j);
    cr_assert_eq(daemon_log_count(&d, " reloaded "), 0);
    RUNS(0, "reload --socket %s", d.admin);
    SAYS(out, "pool.checksum");
    SAYS(out, "socket.mode");
    cr_assert(daemon_wait_log(&d, "changed=pool.checksum needs_restart=socket.mode", 1, 5000));
    daemon_configure(&d, "{\"pool\": {\"max_byte\": 1}}");
    RUNS(4, "reload --socket %s", d.admin);
    SAYS(err, "did you mean \"max_bytes\"?");
    RUNS(4, "reload --json --socket %s", d.admin);
    SAYS(out, "\"status\":\"E_CONFIG\"");
    RUNS(0, "status --json --socket %s", d.admin);
    SAYS(out, "\"reloads\":3,\"reloads_failed\":2");
    daemon_configure(&d, "{\"pool\": {\"max_bytes\": \"16MiB\"}, \"tenants\": [{\"name\": \"far\", \"path\": "
                         "\"/nonexistent-folder/far\"}]}");
    RUNS(4, "reload --dry-run --socket %s", d.admin);
    SAYS(err, "tenants.far.path: folder of socket /nonexistent-folder/far: No such file");
    RUNS(4, "reload --socket %s", d.admin);
    RUNS(4, "reload --socket %s", d.socket);
}

Test(ctl, drains_and_takes_work_again)
{
    engine e;
    uint8_t key[32];
    uint32_t hits;

    engine_open(&e, "alpaca");
    key_fill(key, 0);
    RUNS(0, "drain --socket %s", d.admin);
    SAYS(out, "no new work");
    cr_assert_eq(kvs_lookup(e.ns, key, 1, &hits, NULL, CALL_MS, &err), KVS_E_STATE);
    RUNS(1, "health --socket %s", d.admin);
    SAYS(out, "draining  up ");
    SAYS(out, " s  no new work is taken\n");
    RUNS(1, "health --json --socket %s", d.admin);
    SAYS(out, "\"reasons\":16,\"why\":\"no new work is taken\"");
    RUNS(0, "drain --off --json --socket %s", d.admin);
    SAYS(out, "{\"drained\":false}");
    OK(kvs_lookup(e.ns, key, 1, &hits, NULL, CALL_MS, &err));
    RUNS(0, "health --socket %s", d.admin);
    cr_assert_eq(ran.out[strlen(ran.out) - 2], 's', "nothing is wrong, nothing is said: %s", ran.out);
    cr_assert_eq(daemon_log_count(&d, "info drain on=1 conn="), 1, "the log says who did it");
    cr_assert_eq(daemon_log_count(&d, "info drain on=0 conn="), 1);
    kvs_close(e.c);
}

Test(ctl, finds_the_admin_socket_in_the_environment)
{
    cr_assert_eq(setenv("KVSTRIDE_ADMIN_SOCKET", d.admin, 1), 0);
    RUNS(0, "ping");
    RUNS(3, "ping --socket /tmp/kvs-nobody-here.sock");
}

Test(ctl, lists_a_thousand_blocks_and_says_that_there_are_more)
{
    engine e, other;
    json *j;

    engine_open(&e, "alpaca");
    engine_open(&other, "vicuna");
    engine_store(&e, 0, MANY);
    engine_store(&other, 0, 3);
    RUNS(0, "ls --socket %s", d.admin);
    cr_assert_eq(count(ran.out, '\n'), 1 + 1000);
    SAYS(err, "the first 1000 only");
    RUNS(0, "ls --limit 0 --socket %s", d.admin);
    cr_assert_eq(count(ran.out, '\n'), 1 + MANY + 3);
    cr_assert_str_empty(ran.err);
    RUNS(0, "ls --limit 7 --ns 0 --json --socket %s", d.admin);
    j = answer();
    cr_assert_eq(json_size(json_root(j)), 7);
    cr_assert_not_null(json_member(json_first(json_root(j)), "key"));
    json_destroy(j);
    /* One more than a page of the daemon, and exactly as many as there are: nothing is missing, nothing is said. */
    RUNS(0, "ls --limit %d --ns 0 --json --socket %s", MANY, d.admin);
    j = answer();
    cr_assert_eq(json_size(json_root(j)), MANY);
    cr_assert_str_empty(ran.err);
    json_destroy(j);
    RUNS(0, "ls --ns 1 --socket %s", d.admin);
    cr_assert_eq(count(ran.out, '\n'), 1 + 3);
    kvs_close(e.c);
    kvs_close(other.c);
}

Test(ctl, lists_an_empty_pool_as_an_empty_list)
{
    RUNS(0, "ls --json --socket %s", d.admin);
    cr_assert_str_eq(ran.out, "[]\n");
    RUNS(0, "ls --socket %s", d.admin);
    cr_assert_str_eq(ran.out, "none\n");
}

Test(ctl, drops_blocks_and_exits_4_for_one_that_is_not_there)
{
    engine e;
    json *j;

    engine_open(&e, "alpaca");
    engine_store(&e, 0, 3);
    RUNS(0, "drop --ns 0 --socket %s %s", d.admin, key_text(2));
    SAYS(out, "  dropped\n");
    RUNS(4, "drop --ns 0 --json --socket %s %s", d.admin, key_text(2));
    j = answer();
    cr_assert_str_eq(json_string(json_member(json_first(json_root(j)), "key")), key_text(2));
    cr_assert_str_eq(json_string(json_member(json_first(json_root(j)), "status")), "E_NOT_FOUND");
    json_destroy(j);
    RUNS(0, "ls --socket %s", d.admin);
    cr_assert_eq(count(ran.out, '\n'), 1 + 2);
    cr_assert_eq(daemon_log_count(&d, "info drop ns=0 keys=1 done=1 conn="), 1, "the log says who did it");
    cr_assert_eq(daemon_log_count(&d, "info drop ns=0 keys=1 done=0 conn="), 1);
    kvs_close(e.c);
}

Test(ctl, reset_keeps_what_is_pinned_and_exits_4)
{
    engine e;
    uint8_t key[32];
    json *j;

    engine_open(&e, "alpaca");
    engine_store(&e, 0, 5);
    key_fill(key, 0);
    OK(kvs_pin(e.ns, key, 1, NULL, CALL_MS, &err));
    RUNS(4, "reset --json --socket %s", d.admin);
    j = answer();
    cr_assert_eq(number(j, "dropped"), 4);
    cr_assert_eq(number(j, "kept"), 1);
    json_destroy(j);
    RUNS(4, "drop --ns 0 --socket %s %s", d.admin, key_text(0));
    SAYS(out, "  kept: leased or pinned\n");
    RUNS(4, "reset --ns 0 --socket %s", d.admin);
    SAYS(out, "kept 1 pinned (--pinned drops them too)");
    RUNS(4, "reset --json --ns 0 --socket %s", d.admin);
    SAYS(out, "\"ns\":0,\"tenant\":\"default\",\"model\":\"alpaca\",\"dropped\":0");
    RUNS(0, "reset --ns 0 --pinned --socket %s", d.admin);
    SAYS(out, "namespace 0, tenant default, model alpaca: dropped 1, ");
    RUNS(0, "ls --json --socket %s", d.admin);
    cr_assert_str_eq(ran.out, "[]\n");
    cr_assert_eq(daemon_log_count(&d, "info reset ns=all dropped=4 aborted=0 kept=1 leases=0 conn="), 1);
    cr_assert_eq(daemon_log_count(&d, "info reset ns=0 dropped=1 aborted=0 kept=0 leases=0 conn="), 1);
    RUNS(4, "reset --ns 9 --socket %s", d.admin);
    cr_assert_eq(daemon_log_count(&d, " pin ns="), 0, "what clients do is no news");
    kvs_close(e.c);
}

/* Read from fd until `text` has come. */
static void read_until(int fd, char *buf, size_t cap, const char *text)
{
    size_t len = 0;

    buf[0] = '\0';
    while (strstr(buf, text) == NULL) {
        struct pollfd p = {.fd = fd, .events = POLLIN};
        ssize_t n;

        cr_assert_eq(poll(&p, 1, PATIENCE_MS), 1, "no '%s' in time, only: %.400s", text, buf);
        n = read(fd, buf + len, cap - 1 - len);
        cr_assert(n > 0, "it ended before '%s': %.400s", text, buf);
        len += (size_t)n;
        buf[len] = '\0';
    }
}

Test(ctl, watch_shows_a_block_as_it_is_stored_and_stops_when_nobody_reads)
{
    int out[2], errors[2];
    char words[160], text[8192];
    engine e;
    pid_t pid;

    engine_open(&e, "alpaca");
    cr_assert(pipe2(out, O_CLOEXEC) == 0 && pipe2(errors, O_CLOEXEC) == 0);
    (void)snprintf(words, sizeof words, "watch --json --seconds 60 --socket %s", d.admin);
    pid = start(words, out[1], errors[1]);
    (void)close(out[1]);
    (void)close(errors[1]);
    read_until(errors[0], text, sizeof text, "watching");
    engine_store(&e, 5, 1);
    read_until(out[0], text, sizeof text, "\n");
    cr_assert_not_null(strstr(text, "\"event\":\"stored\""), "%s", text);
    cr_assert_not_null(strstr(text, key_text(5)), "%s", text);
    (void)close(out[0]);
    cr_assert_eq(end_of(pid), 0);
    (void)close(errors[0]);
    kvs_close(e.c);
}

Test(ctl, watch_stops_after_its_seconds)
{
    RUNS(0, "watch --quiet --seconds 1 --socket %s", d.admin);
    cr_assert_str_empty(ran.out);
    cr_assert_str_empty(ran.err);
}

Test(ctl, is_quiet_when_the_reader_has_read_enough)
{
    int out[2], errors = memfd_create("err", MFD_CLOEXEC);
    char words[160], text[4096];
    engine e;
    pid_t pid;

    engine_open(&e, "alpaca");
    engine_store(&e, 0, MANY); /* far more than a pipe takes */
    cr_assert_eq(pipe2(out, O_CLOEXEC), 0);
    (void)snprintf(words, sizeof words, "ls --limit 0 --socket %s", d.admin);
    pid = start(words, out[1], errors);
    (void)close(out[1]);
    read_until(out[0], text, sizeof text, "\n");
    (void)close(out[0]);
    cr_assert_eq(end_of(pid), 0);
    take(errors, ran.err, sizeof ran.err);
    cr_assert_str_empty(ran.err);
    kvs_close(e.c);
}

Test(ctl, exits_1_when_its_output_cannot_be_written)
{
    int full = open("/dev/full", O_WRONLY | O_CLOEXEC), errors = memfd_create("err", MFD_CLOEXEC);
    char words[160];

    (void)snprintf(words, sizeof words, "status --socket %s", d.admin);
    cr_assert_eq(end_of(start(words, full, errors)), 1);
    take(errors, ran.err, sizeof ran.err);
    SAYS(err, "standard output cannot be written");
    (void)close(full);
}

/* Symptom: exit status 0, and what it had to say went into the socket. */
Test(ctl, exits_1_when_it_has_no_output)
{
    static const char *const CASES[] = {"--help", "--version", "status",      "ls",
                                        "fsck",   "health",    "ping --json", "stats --interval 1 --seconds 60"};
    char words[160];

    for (size_t i = 0; i < sizeof CASES / sizeof *CASES; i++) {
        int errors = memfd_create("err", MFD_CLOEXEC), code;

        (void)snprintf(words, sizeof words, "%s%s%s", CASES[i], CASES[i][0] == '-' ? "" : " --socket ",
                       CASES[i][0] == '-' ? "" : d.admin);
        code = end_of(start(words, -1, errors));
        take(errors, ran.err, sizeof ran.err);
        cr_assert_eq(code, 1, "%s: exit %d; %s", words, code, ran.err);
        cr_assert_str_eq(ran.err, "kvstridectl: standard output cannot be written\n", "%s: %s", words, ran.err);
    }
}

/* Symptom: SIGXFSZ ended it without a word. */
Test(ctl_words, exits_1_when_its_output_may_not_grow)
{
    int out = memfd_create("out", MFD_CLOEXEC), errors = memfd_create("err", MFD_CLOEXEC);
    struct rlimit was;

    cr_assert_eq(getrlimit(RLIMIT_FSIZE, &was), 0);
    cr_assert_eq(setrlimit(RLIMIT_FSIZE, &(struct rlimit){100, was.rlim_max}), 0);
    cr_assert_eq(end_of(start("--help", out, errors)), 1);
    cr_assert_eq(setrlimit(RLIMIT_FSIZE, &was), 0);
    take(errors, ran.err, sizeof ran.err);
    SAYS(err, "standard output cannot be written");
    (void)close(out);
}

/* ---- replay ---- */

static char trace_path[] = "/tmp/kvs-trace-XXXXXX";

static void trace_up(void)
{
    int fd = mkstemp(trace_path);

    cr_assert(fd >= 0);
    (void)close(fd);
}

static void trace_down(void)
{
    (void)unlink(trace_path);
}

static void trace_is(const char *text)
{
    FILE *f = fopen(trace_path, "w");

    cr_assert(f != NULL && fputs(text, f) >= 0 && fclose(f) == 0);
}

TestSuite(ctl_replay, .init = trace_up, .fini = trace_down);

Test(ctl_replay, hits_what_a_small_lru_must_hit)
{
    static const struct {
        const char *trace;
        int blocks, references, hits;
    } CASES[] = {
        {"{\"hash_ids\":[1,2,3]}\n{\"hash_ids\":[1,2,4]}\n{\"hash_ids\":[1,2,3]}\n", 3, 9, 4},
        /* 1 was used after 2: 3 takes the place of 2. */
        {"{\"hash_ids\":[1]}\n{\"hash_ids\":[2]}\n{\"hash_ids\":[1]}\n{\"hash_ids\":[3]}\n{\"hash_ids\":[1]}\n"
         "{\"hash_ids\":[2]}\n",
         2, 6, 2},
        /* 4 takes the place of the deepest block of the prefix. */
        {"{\"hash_ids\":[1,2,3]}\n\n{\"hash_ids\":[4]}\n{\"hash_ids\":[1,2,3]}", 3, 7, 2},
        {"{\"hash_ids\":[]}\n{\"hash_ids\":[1]}\n{\"hash_ids\":[1]}\n", 1, 2, 1},
    };

    for (size_t i = 0; i < sizeof CASES / sizeof *CASES; i++) {
        json *j;

        trace_is(CASES[i].trace);
        RUNS(0, "replay --json --trace %s --blocks %d --layers 3 --tokens 2", trace_path, CASES[i].blocks);
        j = answer();
        cr_assert_eq(number(j, "blocks"), CASES[i].references);
        cr_assert_eq(number(j, "hit_blocks"), CASES[i].hits, "case %zu: %s", i, ran.out);
        cr_assert_float_eq(json_number(member(j, "hit_rate")), (double)CASES[i].hits / CASES[i].references, 1e-9);
        cr_assert_eq(number(j, "loaded_bytes"), CASES[i].hits * 3 * 2 * 1152);
        cr_assert_eq(number(j, "stored_bytes"), (CASES[i].references - CASES[i].hits) * 3 * 2 * 1152);
        cr_assert_eq(number(j, "mismatches"), 0);
        (void)number(j, "requests");
        (void)member(j, "seconds");
        json_destroy(j);
    }
    RUNS(0, "replay --trace %s --blocks 1", trace_path);
    SAYS(out, "hit_rate      0.5000\n");
}

/* `requests` of chats that grow turn by turn over `ids` shared blocks. */
static void long_trace(int requests)
{
    FILE *f = fopen(trace_path, "w");

    cr_assert_not_null(f);
    for (int r = 0; r < requests; r++) {
        (void)fprintf(f, "{\"timestamp\": %d, \"hash_ids\": [0, 1", r);
        for (int i = 0; i < r / 7 % 90; i++)
            (void)fprintf(f, ", %d", 100 + 1000 * (r % 7) + i);
        (void)fprintf(f, "]}\n");
    }
    cr_assert_eq(fclose(f), 0);
}

Test(ctl_replay, verifies_every_byte_with_one_client_and_with_eight)
{
    long_trace(400);
    for (int clients = 1; clients <= 8; clients += 7) {
        json *j;

        RUNS(0, "replay --json --trace %s --blocks 150 --clients %d", trace_path, clients);
        j = answer();
        cr_assert_eq(number(j, "clients"), clients);
        cr_assert_eq(number(j, "requests"), 400);
        cr_assert_eq(number(j, "mismatches"), 0);
        cr_assert(number(j, "hit_blocks") > 0, "a trace of repeats that never hits proves nothing");
        json_destroy(j);
    }
}

Test(ctl_replay, plays_against_a_running_daemon)
{
    json *j;

    up();
    trace_is("{\"hash_ids\":[1,2,3]}\n{\"hash_ids\":[1,2,3]}\n");
    RUNS(0, "replay --json --trace %s --socket %s", trace_path, d.socket);
    j = answer();
    cr_assert_eq(number(j, "hit_blocks"), 3);
    json_destroy(j);
    RUNS(0, "replay --json --trace %s --socket %s", trace_path, d.socket);
    j = answer();
    cr_assert_eq(number(j, "hit_blocks"), 6);
    json_destroy(j);
    down();
    RUNS(3, "replay --trace %s --socket /tmp/kvs-nobody-here.sock", trace_path);
}

Test(ctl_replay, refuses_bad_traces_with_file_and_line)
{
    static const char *const CASES[][2] = {
        {"", "no requests"},
        {"{\"hash_ids\":[1]}\n{\"hash_ids\":[1}\n", "line 2"},
        {"{\"hash_ids\":[1]}\n\n[1]\n", "line 3"},
        {"{\"hash_ids\":[-1]}\n", "hash_ids[0]"},
        {"{\"hash_ids\":7}\n", "line 1"},
    };

    for (size_t i = 0; i < sizeof CASES / sizeof *CASES; i++) {
        trace_is(CASES[i][0]);
        RUNS(2, "replay --trace %s --blocks 5", trace_path);
        SAYS(err, CASES[i][1]);
        SAYS(err, trace_path);
    }
    RUNS(2, "replay --trace /tmp/kvs-no-such-trace --blocks 5");
    SAYS(err, "No such file");
    RUNS(2, "replay --json --trace /tmp --blocks 5");
    SAYS(out, "\"E_CONFIG\"");
    trace_is("{\"hash_ids\":[1]}\n");
    RUNS(2, "replay --trace %s --blocks 4294967294 --layers 61 --tokens 64", trace_path);
    SAYS(err, "blocks of 4497408 bytes are more than");
}

/* ---- terminals ---- */

/* Everything a run says to a terminal that both outputs are. */
static int run_on_terminal(const char *words, char *text, size_t cap)
{
    int master, terminal;
    size_t len = 0;
    ssize_t n;
    pid_t pid;

    if (openpty(&master, &terminal, NULL, NULL, NULL) != 0)
        cr_skip_test("no terminal to be had here: %s", strerror(errno));
    (void)fcntl(master, F_SETFD, FD_CLOEXEC);
    pid = start(words, terminal, terminal);
    (void)close(terminal);
    while ((n = read(master, text + len, cap - 1 - len)) > 0)
        len += (size_t)n;
    text[len] = '\0';
    (void)close(master);
    return end_of(pid);
}

Test(ctl_replay, shows_progress_on_a_terminal_only)
{
    static char text[1 << 16];
    char words[160];

    long_trace(50);
    (void)snprintf(words, sizeof words, "replay --trace %s --blocks 100", trace_path);
    cr_assert_eq(run_on_terminal(words, text, sizeof text), 0);
    cr_assert_not_null(strstr(text, "replay: "), "%s", text);
    cr_assert_not_null(strstr(text, " of 50 ("), "%s", text);
    (void)snprintf(words, sizeof words, "replay --quiet --trace %s --blocks 100", trace_path);
    cr_assert_eq(run_on_terminal(words, text, sizeof text), 0);
    cr_assert_null(strstr(text, "replay: "), "%s", text);
    RUNS(0, "replay --trace %s --blocks 100", trace_path);
    cr_assert_str_empty(ran.err);
}

Test(ctl_demo, verifies_everything_and_marks_it_on_a_terminal)
{
    static char text[1 << 16];
    json *j;

    RUNS(0, "demo");
    SAYS(out, "Everything was verified");
    SAYS(out, "in-process, by the same");
    cr_assert_null(strchr(ran.out, '\033'), "colours without a terminal");
    RUNS(0, "demo --json");
    j = answer();
    cr_assert(json_bool(member(j, "verified")));
    cr_assert_eq(number(j, "hits"), 5);
    cr_assert_eq(number(j, "decodes_in_process"), 9, "three layers each: engine A, engine B, after the restart");
    cr_assert_eq(number(j, "replay_mismatches"), 0);
    json_destroy(j);
    cr_assert_eq(run_on_terminal("demo", text, sizeof text), 0);
    cr_assert_not_null(strstr(text, "\033["), "no colours on a terminal");
}

/* ---- what it leaves behind ---- */

static unsigned entries(const char *path, char *name, size_t cap)
{
    DIR *dir = opendir(path);
    unsigned n = 0;

    for (const struct dirent *e; dir != NULL && (e = readdir(dir)) != NULL;)
        if (e->d_name[0] != '.') {
            n++;
            (void)snprintf(name, cap, "%s/%s/client.sock", path, e->d_name);
        }
    if (dir != NULL)
        (void)closedir(dir);
    return n;
}

Test(ctl_replay, leaves_nothing_behind_when_a_signal_ends_it)
{
    char dir[] = "/tmp/kvs-ctl-XXXXXX", words[160], name[512];
    int null = open("/dev/null", O_RDWR | O_CLOEXEC), tries = 0;
    struct stat st;
    pid_t pid;

    cr_assert_not_null(mkdtemp(dir));
    cr_assert_eq(setenv("TMPDIR", dir, 1), 0);
    long_trace(20000);
    (void)snprintf(words, sizeof words, "replay --trace %s --blocks 100", trace_path);
    pid = start(words, null, null);
    while (entries(dir, name, sizeof name) == 0 || stat(name, &st) != 0) {
        cr_assert(++tries < PATIENCE_MS / 2, "its daemon does not come up");
        (void)nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
    }
    cr_assert_eq(kill(pid, SIGINT), 0);
    cr_assert_eq(end_of(pid), 128 + SIGINT);
    cr_assert_eq(entries(dir, name, sizeof name), 0, "%s is left", name);
    cr_assert_eq(rmdir(dir), 0);
    (void)close(null);
}
