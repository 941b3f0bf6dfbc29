#include "proto/ctl/ctl.h"

#include <errno.h>
#include <getopt.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/std_fds.h"

static const ctl_command COMMANDS[] = {
    {"status", "", "numbers of the daemon: pool, layouts, hits, movers, clients", "socket timeout-ms", "", 0,
     ctl_status},
    {"stats", "", "counters since the start, or rates every --interval N", "socket timeout-ms interval seconds",
     "Rates go on until --seconds or a signal.  With --json: what the daemon counts, one document a line.\n", 0,
     ctl_stats},
    {"ping", "", "one round trip, and how long it took", "socket timeout-ms", "", 0, ctl_ping},
    {"health", "", "ok, starting, degraded or draining, and why; exit 1 unless ok", "socket timeout-ms", "", 0,
     ctl_health},
    {"ls", "", "blocks in the pool", "socket timeout-ms ns limit", "", 0, ctl_ls},
    {"namespaces", "", "namespaces: model, layout, tenant, blocks", "socket timeout-ms", "", 0, ctl_namespaces},
    {"leases", "", "leases with owner, age and what they hold", "socket timeout-ms", "", 0, ctl_leases},
    {"clients", "", "connections with user, process, requests in flight", "socket timeout-ms", "", 0, ctl_clients},
    {"tenants", "", "tenants with what they use, their limits, hits and evictions", "socket timeout-ms", "", 0,
     ctl_tenants},
    {"reload", "", "read the configuration file again; say what applies and what needs a restart",
     "socket timeout-ms dry-run", "Exit 4 if the file was refused: then everything is as it was.\n", 0, ctl_reload},
    {"drain", "", "take no new work; what is in flight ends (status: in_flight)", "socket timeout-ms off",
     "Clients are answered E_STATE, but may still let go of what they hold.  Lasts until --off, or a restart.\n", 0,
     ctl_drain},
    {"watch", "", "follow blocks as they are stored and removed", "socket timeout-ms seconds",
     "With --json: one document a line, for each event.\n", 0, ctl_watch},
    {"fsck", "", "recount everything and compare; exit 1 if a sum is wrong", "socket timeout-ms", "", 0, ctl_fsck},
    {"drop", "KEY...", "remove blocks of namespace --ns by key (64 hex digits)", "socket timeout-ms ns",
     "Needs --ns, which is another after a restart: see 'kvstridectl namespaces'.  Exit 4 if one was not there or is "
     "in use.\n",
     1 << 20, ctl_drop},
    {"reset", "", "remove every block, or those of --ns", "socket timeout-ms ns pinned",
     "Pinned blocks stay (exit 4, if there are any) unless --pinned is given.\n"
     "A namespace's number is another after a restart: take it from 'kvstridectl namespaces'.\n"
     "A reset that runs out of its --timeout-ms stops where it is: what is gone is gone, the rest stays.\n",
     0, ctl_reset},
    {"replay", "", "play a prefix trace and verify every loaded byte", "trace blocks socket layers tokens clients",
     "Needs --trace and either --blocks (a private daemon that holds exactly so many) or --socket (a running one).\n"
     "Each request looks its list up, loads the leading hits, compares every byte, and stores the rest.\n"
     "Exit 1 if a byte was wrong.\n",
     0, ctl_replay},
    {"bench", "", "copy, round-trip and lookup figures beside plain ones of the same run",
     "layers tokens quick svg engine",
     "Starts private daemons; about 3 GiB of memory are used for a while, with a GPU 8 GiB and some of its own.\n"
     "A few minutes; a ratio is the median of several rounds, given with its quartiles.\n"
     "Exits 0 once all is measured, also where a figure misses its target.\n",
     0, ctl_bench},
    {"calibrate", "", "measure how a GPU copies best, for the daemon to go by", "folder gpu",
     "Takes some seconds, 256 MiB of pinned memory and about 1 GiB of the GPU's, and needs no daemon.  Copies of a "
     "daemon\n"
     "at work are slower meanwhile, and falsify the figures: choose a quiet moment.\n"
     "Exit 5 without a GPU: nothing is to be measured then, and no daemon misses it.\n",
     0, ctl_calibrate},
    {"demo", "", "the whole idea in a minute: two engines, one pool, verified", "",
     "Starts a private daemon; exit 0 only if everything was verified.\n", 0, ctl_demo},
};

enum kind { FLAG, TEXT, WHOLE, HELP, VERSION };

/* One row an option: what getopt, the help texts and the parser need. */
typedef struct option_row {
    const char *name, *value, *help;
    enum kind kind;
    bool any;          /* every command takes it */
    size_t at;         /* in ctl */
    uint64_t min, max; /* of a WHOLE */
} option_row;

static const option_row ROWS[] = {
    {"json", "", "one JSON document on standard output", FLAG, true, offsetof(ctl, json), 0, 0},
    {"quiet", "", "no progress line", FLAG, true, offsetof(ctl, quiet), 0, 0},
    {"help", "", "this text, or that of a command", HELP, true, 0, 0, 0},
    {"version", "", "name and version", VERSION, true, 0, 0, 0},
    {"socket", "PATH", "admin socket of the daemon; default $KVSTRIDE_ADMIN_SOCKET, else " CTL_ADMIN_SOCKET, TEXT,
     false, offsetof(ctl, socket), 0, 0},
    {"timeout-ms", "N", "give up after N ms without an answer; default 5000, of reset 60000", WHOLE, false,
     offsetof(ctl, timeout_ms), 1, 3600000},
    {"ns", "N", "namespace by its number", WHOLE, false, offsetof(ctl, ns), 0, UINT32_MAX - 1},
    {"limit", "N", "at most N lines, 0: all; default 1000", WHOLE, false, offsetof(ctl, limit), 0, UINT32_MAX},
    {"pinned", "", "what is pinned, too", FLAG, false, offsetof(ctl, pinned), 0, 0},
    {"dry-run", "", "change nothing, say what would be", FLAG, false, offsetof(ctl, dry_run), 0, 0},
    {"off", "", "take work again", FLAG, false, offsetof(ctl, off), 0, 0},
    {"quick", "", "fewer rounds, sizes and kinds: a minute, without a GPU less", FLAG, false, offsetof(ctl, quick), 0,
     0},
    {"svg", "FILE", "draw the ratios and, with a GPU, the sweep over piece sizes", TEXT, false, offsetof(ctl, svg), 0,
     0},
    {"engine", "WORK", "keep the GPU busy instead, a line a step: compute, memory or latency", TEXT, false,
     offsetof(ctl, engine), 0, 0},
    {"seconds", "N", "stop after N seconds", WHOLE, false, offsetof(ctl, seconds), 1, 86400},
    {"interval", "N", "rates, every N seconds", WHOLE, false, offsetof(ctl, interval), 1, 86400},
    {"trace", "FILE", "JSON Lines with \"hash_ids\"", TEXT, false, offsetof(ctl, trace), 0, 0},
    {"blocks", "N", "blocks that the private daemon holds, exactly", WHOLE, false, offsetof(ctl, blocks), 1,
     UINT32_MAX - 1},
    {"layers", "L", "layers of a block; default 2 of replay, 61 of bench", WHOLE, false, offsetof(ctl, layers), 1,
     KVS_MAX_PLANES},
    {"tokens", "T", "tokens of a block, 1152 bytes a layer; default 1 of replay, 64 of bench", WHOLE, false,
     offsetof(ctl, tokens), 1, KVS_MAX_TOKENS_PER_BLOCK},
    {"folder", "DIR", "where the table is kept; default /var/lib/kvstrided (mover.calibration)", TEXT, false,
     offsetof(ctl, folder), 0, 0},
    {"gpu", "N", "which GPU, as the driver counts; default 0", WHOLE, false, offsetof(ctl, gpu), 0, 255},
    {"clients", "C", "clients at the same time; default 1", WHOLE, false, offsetof(ctl, clients), 1, 64},
};

enum { N_COMMANDS = sizeof COMMANDS / sizeof *COMMANDS, N_ROWS = sizeof ROWS / sizeof *ROWS, FIRST_VAL = 256 };

/* True if `name` is one of the words of `list`. */
static bool has_word(const char *list, const char *name)
{
    size_t n = strlen(name);

    for (const char *p = list; (p = strstr(p, name)) != NULL; p += n)
        if ((p == list || p[-1] == ' ') && (p[n] == ' ' || p[n] == '\0'))
            return true;
    return false;
}

static const ctl_command *find(const char *name)
{
    for (size_t i = 0; i < N_COMMANDS; i++)
        if (strcmp(COMMANDS[i].name, name) == 0)
            return &COMMANDS[i];
    return NULL;
}

static int unknown_command(const char *word)
{
    const char *meant = NULL;
    size_t best = SIZE_MAX;

    for (size_t i = 0; i < N_COMMANDS; i++)
        if (ctl_is_meant(word, COMMANDS[i].name, &best))
            meant = COMMANDS[i].name;
    return meant == NULL ? ctl_usage("unknown command '%.80s'", word)
                         : ctl_usage("unknown command '%.80s'; did you mean %s?", word, meant);
}

/* word: with its dashes, and maybe "=VALUE". */
static int unknown_option(const char *word)
{
    const char *meant = NULL;
    size_t best = SIZE_MAX;
    char name[80];

    (void)snprintf(name, sizeof name, "%.*s", (int)strcspn(word, "="), word);
    for (size_t i = 0; i < N_ROWS; i++)
        if (ctl_is_meant(name + strspn(name, "-"), ROWS[i].name, &best))
            meant = ROWS[i].name;
    return meant == NULL ? ctl_usage("unknown option %.80s", word)
                         : ctl_usage("unknown option %.80s; did you mean --%s?", word, meant);
}

/* ---- help ---- */

/* replay has another socket than the rest. */
static const char *help_for(const ctl_command *of, const option_row *row)
{
    if (of != NULL && strcmp(of->name, "replay") == 0 && strcmp(row->name, "socket") == 0)
        return "engines' socket of a running daemon; no default";
    return row->help;
}

static void print_options(const ctl_command *of)
{
    for (size_t i = 0; i < N_ROWS; i++) {
        char left[32];

        if (!ROWS[i].any && (of == NULL || !has_word(of->options, ROWS[i].name)))
            continue;
        (void)snprintf(left, sizeof left, "--%s %s", ROWS[i].name, ROWS[i].value);
        (void)printf("  %-16s  %s\n", left, help_for(of, &ROWS[i]));
    }
}

static int help(void)
{
    (void)printf("usage: kvstridectl COMMAND [OPTIONS] [KEY...]\n"
                 "       kvstridectl help [COMMAND]\n\n"
                 "Talks to a running kvstrided by its admin socket; replay, bench and demo start private daemons.\n\n"
                 "Commands ('kvstridectl COMMAND --help' lists the options of one):\n");
    for (size_t i = 0; i < N_COMMANDS; i++)
        (void)printf("  %-10s  %s\n", COMMANDS[i].name, COMMANDS[i].help);
    (void)printf("\nOptions of every command:\n");
    print_options(NULL);
    (void)printf("\nExit status: 0 done; 1 done, with a bad result; 2 usage; 3 daemon unreachable; 4 daemon "
                 "refused;\n5 this machine cannot.\n");
    return CTL_OK;
}

static int help_of(const ctl_command *c)
{
    (void)printf("usage: kvstridectl %s [OPTIONS]%s%s\n\n%c%s%s%s\nOptions:\n", c->name, c->args[0] ? " " : "", c->args,
                 c->help[0] + 'A' - 'a', c->help + 1, c->more[0] ? ".\n" : "\n", c->more);
    print_options(c);
    return CTL_OK;
}

/* ---- the command line ---- */

typedef struct line {
    ctl c;
    uint64_t given; /* bit i: ROWS[i] */
    bool help, version;
} line;

/* A whole number in decimal digits, within the row's range. */
static bool whole(const option_row *row, const char *text, uint64_t *ret)
{
    unsigned long long v;

    errno = 0;
    v = strtoull(text, NULL, 10);
    if (text[0] == '\0' || strspn(text, "0123456789") != strlen(text) || errno != 0 || v < row->min || v > row->max)
        return false;
    *ret = v;
    return true;
}

static int set(line *l, size_t i, const char *text)
{
    const option_row *row = &ROWS[i];
    void *at = (char *)&l->c + row->at;

    l->given |= UINT64_C(1) << i;
    switch (row->kind) {
    case FLAG:
        *(bool *)at = true;
        break;
    case TEXT:
        *(const char **)at = text;
        break;
    case WHOLE:
        if (!whole(row, text, at))
            return ctl_usage("--%s: '%.40s' is not a whole number of %llu..%llu", row->name, text,
                             (unsigned long long)row->min, (unsigned long long)row->max);
        break;
    case HELP:
        l->help = true;
        break;
    case VERSION:
        l->version = true;
        break;
    }
    return CTL_OK;
}

/* What getopt_long did not like about the word it has just left. */
static int bad_option(char **argv, bool lacks_value)
{
    if (lacks_value)
        return ctl_usage("%s needs a value", argv[optind - 1]);
    if (optopt >= FIRST_VAL)
        return ctl_usage("--%s takes no value", ROWS[optopt - FIRST_VAL].name);
    if (optopt != 0)
        return ctl_usage("unknown option -%c", optopt);
    return unknown_option(argv[optind - 1]);
}

static int parse(line *l, int argc, char **argv)
{
    struct option longs[N_ROWS + 1] = {{0}};
    int opt, code = CTL_OK;

    for (int i = 0; i < N_ROWS; i++)
        longs[i] = (struct option){ROWS[i].name, ROWS[i].value[0] != '\0', NULL, FIRST_VAL + i};
    opterr = 0;
    while (code == CTL_OK && (opt = getopt_long(argc, argv, ":h", longs, NULL)) != -1) {
        if (opt == 'h')
            l->help = true;
        else if (opt == ':' || opt == '?')
            code = bad_option(argv, opt == ':');
        else
            code = set(l, (size_t)(opt - FIRST_VAL), optarg);
    }
    return code;
}

static int run(line *l, const ctl_command *command)
{
    for (size_t i = 0; i < N_ROWS; i++)
        if ((l->given >> i & 1) && !ROWS[i].any && !has_word(command->options, ROWS[i].name))
            return ctl_usage("%s does not take --%s", command->name, ROWS[i].name);
    if (l->c.n_args > command->max_args)
        return ctl_usage("%s: too many words: '%.80s'", command->name, l->c.args[command->max_args]);
    return command->run(&l->c);
}

int main(int argc, char **argv)
{
    line l = {.c = {.limit = 1000, .ns = CTL_NO_NS}};
    const ctl_command *command = NULL;
    static char spoken[32];
    int code;

    std_fds_fill();
    for (int i = 1; i < argc && command == NULL; i++) /* before options are looked at, whose errors speak of it */
        command = find(argv[i]);
    if (command != NULL) {
        (void)snprintf(spoken, sizeof spoken, "%s ", command->name);
        ctl_set_command(spoken);
    }
    (void)signal(SIGPIPE, SIG_IGN); /* a reader that stops early ends us by a failed write, quietly */
    (void)signal(SIGXFSZ, SIG_IGN); /* and a file that may not grow ends us by one with a message */
    code = parse(&l, argc, argv);
    if (code != CTL_OK)
        return code;
    if (optind < argc && strcmp(argv[optind], "help") == 0) { /* as others have it */
        l.help = true;
        optind++;
    }
    command = optind < argc ? find(argv[optind]) : NULL;
    if (optind < argc && command == NULL)
        return unknown_command(argv[optind]);
    l.c.args = argv + optind + 1;
    l.c.n_args = argc - optind - 1;
    if (l.version)
        (void)printf("kvstridectl %s\n", KVS_VERSION);
    else if (l.help)
        code = command != NULL ? help_of(command) : help();
    else
        code = command != NULL ? run(&l, command) : ctl_usage("no command");
    /* Output that did not arrive is a failure, unless the reader simply stopped. */
    if ((fflush(stdout) != 0 || ferror(stdout)) && !ctl_reader_gone()) {
        (void)fprintf(stderr, "kvstridectl: standard output cannot be written\n");
        return code == CTL_OK ? CTL_FAILED : code;
    }
    return code;
}
