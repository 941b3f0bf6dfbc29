#include "proto/ctl/ctl.h"

#include <errno.h>
#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const ctl_command CTL_COMMANDS[] = {
    {"status", "", "numbers of the daemon: pool, layouts, hits, movers, clients", "", 0, ctl_status},
    {"ping", "", "one round trip, and how long it took", "", 0, ctl_ping},
    {"health", "", "ok, starting, degraded or draining; exit 1 unless ok", "", 0, ctl_health},
    {"ls", "", "blocks in the pool", "ns limit", 0, ctl_ls},
    {"namespaces", "", "namespaces: model, layout, tenant, blocks", "", 0, ctl_namespaces},
    {"leases", "", "leases with owner, age and what they hold", "", 0, ctl_leases},
    {"clients", "", "connections with user, process, requests in flight", "", 0, ctl_clients},
    {"watch", "", "follow blocks as they are stored and removed", "seconds", 0, ctl_watch},
    {"fsck", "", "recount everything and compare; exit 1 if a sum is wrong", "", 0, ctl_fsck},
    {"drop", "KEY...", "remove blocks by key (64 hex digits) from namespace --ns", "ns", 1 << 20, ctl_drop},
    {"reset", "", "remove every block, or those of --ns; --pinned: the pinned ones too", "ns pinned", 0, ctl_reset},
    {"replay", "", "play a prefix trace and verify every loaded byte", "trace blocks layers tokens clients quiet", 0,
     ctl_replay},
    {"bench", "", "copy, round-trip and lookup figures beside plain ones of the same run", "layers tokens quiet", 0,
     ctl_bench},
    {"demo", "", "the whole idea in a minute: two engines, one pool, verified", "", 0, ctl_demo},
    {NULL, NULL, NULL, NULL, 0, NULL},
};

static void help(FILE *to)
{
    (void)fprintf(to,
                  "usage: kvstridectl [OPTIONS] COMMAND [OPTIONS] [ARGS]\n\n"
                  "Talks to a running kvstrided by its admin socket; replay, bench and demo start a private daemon\n"
                  "unless --socket names one.\n\nCommands:\n");
    for (const ctl_command *c = CTL_COMMANDS; c->name != NULL; c++)
        (void)fprintf(to, "  %-10s %-7s %s\n", c->name, c->args, c->help);
    (void)fprintf(to,
                  "\nCommon options:\n"
                  "  --socket PATH     socket to use (default $KVSTRIDE_ADMIN_SOCKET, else %s)\n"
                  "  --json            one JSON document on standard output\n"
                  "  --timeout-ms N    give up after N ms without an answer (default 5000)\n"
                  "  --quiet           no progress line\n"
                  "  --help, --version\n\n"
                  "Options of commands:\n"
                  "  --ns N            namespace by its number (ls, drop, reset)\n"
                  "  --limit N         at most N lines (ls; default 1000, 0: all)\n"
                  "  --pinned          also what is pinned (reset)\n"
                  "  --seconds N       stop after N seconds (watch)\n"
                  "  --trace FILE      JSON Lines with \"hash_ids\" (replay)\n"
                  "  --blocks N        blocks that the private daemon holds, exactly (replay)\n"
                  "  --layers L, --tokens T   geometry of a block: L layers of T tokens of 1152 bytes\n"
                  "                    (replay: 2 and 1; bench: 61 and 64)\n"
                  "  --clients C       clients at the same time (replay; default 1)\n\n"
                  "Exit status: 0 done; 1 done, with a bad result; 2 usage; 3 daemon unreachable; 4 daemon refused.\n",
                  CTL_ADMIN_SOCKET);
}

static int usage(const char *fmt, const char *what)
{
    (void)fprintf(stderr, "kvstridectl: ");
    (void)fprintf(stderr, fmt, what);
    (void)fprintf(stderr, "\nTry 'kvstridectl --help'.\n");
    return CTL_USAGE;
}

enum {
    OPT_HELP = 256,
    OPT_VERSION,
    OPT_SOCKET,
    OPT_JSON,
    OPT_TIMEOUT,
    OPT_QUIET, /* common up to here */
    OPT_NS,
    OPT_LIMIT,
    OPT_PINNED,
    OPT_SECONDS,
    OPT_TRACE,
    OPT_BLOCKS,
    OPT_LAYERS,
    OPT_TOKENS,
    OPT_CLIENTS,
};

static const struct option OPTIONS[] = {
    {"help", no_argument, NULL, OPT_HELP},
    {"version", no_argument, NULL, OPT_VERSION},
    {"socket", required_argument, NULL, OPT_SOCKET},
    {"json", no_argument, NULL, OPT_JSON},
    {"timeout-ms", required_argument, NULL, OPT_TIMEOUT},
    {"quiet", no_argument, NULL, OPT_QUIET},
    {"ns", required_argument, NULL, OPT_NS},
    {"limit", required_argument, NULL, OPT_LIMIT},
    {"pinned", no_argument, NULL, OPT_PINNED},
    {"seconds", required_argument, NULL, OPT_SECONDS},
    {"trace", required_argument, NULL, OPT_TRACE},
    {"blocks", required_argument, NULL, OPT_BLOCKS},
    {"layers", required_argument, NULL, OPT_LAYERS},
    {"tokens", required_argument, NULL, OPT_TOKENS},
    {"clients", required_argument, NULL, OPT_CLIENTS},
    {NULL, 0, NULL, 0},
};

/* A whole number within its range, or the range on stderr. */
static bool number(const char *option, const char *text, uint64_t min, uint64_t max, uint64_t *ret)
{
    char *end = NULL;
    unsigned long long v;

    errno = 0;
    v = strtoull(text, &end, 10);
    if (errno != 0 || end == text || *end != '\0' || text[0] == '-' || v < min || v > max) {
        (void)fprintf(stderr, "kvstridectl: --%s: '%s' is not a whole number of %llu..%llu\n", option, text,
                      (unsigned long long)min, (unsigned long long)max);
        return false;
    }
    *ret = v;
    return true;
}

static bool set(ctl *c, int opt, const char *name, const char *value)
{
    uint64_t v = 0;

    switch (opt) {
    case OPT_SOCKET:
        c->socket = value;
        return true;
    case OPT_JSON:
        c->json = true;
        return true;
    case OPT_QUIET:
        c->quiet = true;
        return true;
    case OPT_PINNED:
        c->pinned = true;
        return true;
    case OPT_TRACE:
        c->trace = value;
        return true;
    case OPT_TIMEOUT:
        if (!number(name, value, 1, 3600000, &v))
            return false;
        c->timeout_ms = (uint32_t)v;
        return true;
    case OPT_NS:
        c->has_ns = true;
        return number(name, value, 0, UINT32_MAX - 1, &c->ns);
    case OPT_LIMIT:
        return number(name, value, 0, UINT32_MAX, &c->limit);
    case OPT_SECONDS:
        return number(name, value, 1, 86400, &c->seconds);
    case OPT_BLOCKS:
        return number(name, value, 1, UINT32_MAX - 1, &c->blocks);
    case OPT_LAYERS:
        return number(name, value, 1, KVS_MAX_PLANES, &c->layers);
    case OPT_TOKENS:
        return number(name, value, 1, KVS_MAX_TOKENS_PER_BLOCK, &c->tokens);
    case OPT_CLIENTS:
        return number(name, value, 1, 64, &c->clients);
    default:
        return false;
    }
}

/* True if `name` is one of the words of `list`. */
static bool takes(const char *list, const char *name)
{
    size_t n = strlen(name);

    for (const char *p = list; (p = strstr(p, name)) != NULL; p += n)
        if ((p == list || p[-1] == ' ') && (p[n] == ' ' || p[n] == '\0'))
            return true;
    return false;
}

static const ctl_command *find(const char *name)
{
    for (const ctl_command *c = CTL_COMMANDS; c->name != NULL; c++)
        if (strcmp(c->name, name) == 0)
            return c;
    return NULL;
}

int main(int argc, char **argv)
{
    ctl c = {.timeout_ms = 5000, .limit = UINT64_MAX};
    uint64_t given = 0;
    const ctl_command *command;
    int opt, index = 0;

    (void)signal(SIGPIPE, SIG_IGN); /* a reader that stops early ends us by a failed write, quietly */
    opterr = 0;
    while ((opt = getopt_long(argc, argv, ":", OPTIONS, &index)) != -1) {
        if (opt == OPT_HELP) {
            help(stdout);
            return CTL_OK;
        }
        if (opt == OPT_VERSION) {
            (void)printf("kvstridectl %s\n", KVS_VERSION);
            return CTL_OK;
        }
        if (opt == ':')
            return usage("%s needs a value", argv[optind - 1]);
        if (opt == '?')
            return usage("unknown option %s", argv[optind - 1]);
        if (!set(&c, opt, OPTIONS[index].name, optarg))
            return CTL_USAGE;
        given |= UINT64_C(1) << index;
    }
    if (optind == argc)
        return usage("%s", "no command");
    command = find(argv[optind]);
    if (command == NULL)
        return usage("unknown command '%s'", argv[optind]);
    for (size_t i = 0; OPTIONS[i].name != NULL; i++)
        if ((given >> i & 1) && OPTIONS[i].val > OPT_QUIET && !takes(command->options, OPTIONS[i].name))
            return usage("this command does not take --%s", OPTIONS[i].name);
    c.args = argv + optind + 1;
    c.n_args = argc - optind - 1;
    if (c.n_args > command->max_args)
        return usage("too many words: '%s'", c.args[command->max_args]);
    opt = command->run(&c);
    /* Output that did not arrive is a failure, unless the reader simply stopped. */
    if (fflush(stdout) != 0 && errno != EPIPE && opt == CTL_OK)
        return CTL_FAILED;
    return opt;
}
