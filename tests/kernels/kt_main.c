/* kernels-test: every operation, case by case; see usage(). */
#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "tests/kernels/kt_ops.h"

enum { TEXT = 200, ALL = -1 };

static const kt_op *const OPS[] = {
#define X(name) &kt_op_##name,
    KT_OP_MAP(X)
#undef X
};
enum { N_OPS = sizeof OPS / sizeof *OPS };

typedef struct options {
    const char *device, *op, *mutant;
    uint64_t seed;
    long cases, one; /* ALL */
    bool subset, json, quiet, mutants;
} options;

typedef struct result {
    uint32_t cases, failed;
    double worst, seconds;
    long worst_case;
} result;

static int usage(FILE *to, int status)
{
    (void)fputs("usage: kernels-test [OPTIONS]\n\n"
                "Every operation against an oracle of its own, on views of many strides.\n\n"
                "  --device D           cpu (default) or cuda, which is skipped where there is no GPU\n"
                "  --op NAME            this operation only\n"
                "  --list               names the operations and their fixed cases\n"
                "  --case N             this case only; fixed ones come first\n"
                "  --cases N            random cases of each operation, besides the fixed ones\n"
                "  --seed N             of the random cases; default 1\n"
                "  --subset sanitizer   few small cases, for compute-sanitizer\n"
                "  --json               one JSON document\n"
                "  --quiet              stop an operation at its first failure and say little\n"
#ifdef KVS_MUTATION
                "  --mutant SITE:KIND   let one site make one mistake\n"
                "  --mutants            every site, every mistake: each must fail\n"
#endif
                "\nExit status: 0 all passed or skipped, 1 a case failed, 2 usage.\n",
                to);
    return status;
}

static double now(void)
{
    struct timespec t;

    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Every case has a seed of its own, so that it can be had again without the others. */
static rnd case_rnd(const options *o, const char *op, uint64_t i)
{
    uint64_t h = UINT64_C(0xCBF29CE484222325);
    rnd r;

    for (; *op != 0; op++)
        h = (h ^ (uint8_t)*op) * UINT64_C(0x100000001B3);
    r.state = h ^ (o->seed * UINT64_C(0xD1342543DE82EF95)) ^ (i * UINT64_C(0xA0761D6478BD642F));
    r.state = rnd_u64(&r);
    return r;
}

static uint32_t n_random(const options *o, const kt *k, const kt_op *op)
{
    if (op->random == NULL)
        return 0;
    if (o->cases != ALL)
        return (uint32_t)o->cases;
    return o->subset ? op->n_subset : k->where == KT_CUDA ? op->n_cuda : op->n_cpu;
}

static bool run_case(const options *o, kt *k, const kt_op *op, uint32_t i)
{
    char rerun[TEXT];
    bool good;

    (void)snprintf(rerun, sizeof rerun, "--device %s --op %s --seed %" PRIu64 " --case %u%s", o->device, op->name,
                   o->seed, i, o->subset ? " --subset sanitizer" : "");
    k->rerun = rerun;
    k->op = op->name;
    k->r = case_rnd(o, op->name, i);
    k->worst = 0;
    good = i < op->n_fixed ? op->fixed[i].run(k) : op->random(k);
    if (!good && !k->quiet)
        (void)printf("      %s: %s\n", op->name, i < op->n_fixed ? op->fixed[i].name : "random shape");
    kt_case_end(k);
    return good;
}

static result run_op(const options *o, kt *k, const kt_op *op)
{
    const uint32_t n = op->n_fixed + (o->one != ALL && op->random != NULL ? (uint32_t)o->one + 1 : n_random(o, k, op));
    result r = {.worst_case = -1};
    const double start = now();

    for (uint32_t i = 0; i < n; i++) {
        if (o->one != ALL ? i != (uint32_t)o->one : i < op->n_fixed && op->fixed[i].big && o->subset)
            continue;
        r.cases++;
        r.failed += !run_case(o, k, op, i);
        if (!(k->worst <= r.worst)) {
            r.worst = k->worst;
            r.worst_case = i;
        }
        if (r.failed > 0 && (o->quiet || r.failed >= 5))
            break;
    }
    r.seconds = now() - start;
    return r;
}

static void print_result(const options *o, const kt_op *op, const result *r, bool first)
{
    char error[TEXT];

    if (o->json) {
        (void)printf(
            "%s\n  {\"name\": \"%s\", \"cases\": %u, \"failed\": %u, \"equality\": \"%s\", \"max_error\": %.9g, "
            "\"worst_case\": %ld, \"seconds\": %.2f}",
            first ? "" : ",", op->name, r->cases, r->failed, op->equality, r->worst, r->worst_case, r->seconds);
        return;
    }
    if (r->worst_case < 0)
        (void)snprintf(error, sizeof error, "%s", op->equality);
    else
        (void)snprintf(error, sizeof error, "max error %.2e %s, case %ld", r->worst, op->equality, r->worst_case);
    (void)printf("%s  %-20s %5u cases  %-44s %6.1f s\n", r->failed == 0 ? "ok  " : "FAIL", op->name, r->cases, error,
                 r->seconds);
}

static int run_all(const options *o, kt *k)
{
    uint32_t passed = 0, failed = 0;

    if (o->json)
        (void)printf("{\"device\": \"%s\", \"seed\": %" PRIu64 ", \"subset\": %s, \"operations\": [", o->device,
                     o->seed, o->subset ? "true" : "false");
    else if (!o->quiet)
        (void)printf("kernels-test on %s, seed %" PRIu64 "\n", o->device, o->seed);
    for (size_t i = 0; i < N_OPS; i++) {
        result r;

        if (o->op != NULL && strcmp(o->op, OPS[i]->name) != 0)
            continue;
        r = run_op(o, k, OPS[i]);
        print_result(o, OPS[i], &r, passed + failed == 0);
        if (r.failed == 0 && r.cases > 0)
            passed++;
        else
            failed++;
    }
    (void)printf(o->json ? "\n], \"passed\": %u, \"failed\": %u}\n" : "%u passed, %u failed\n", passed, failed);
    return failed > 0;
}

#ifdef KVS_MUTATION
static bool set_mutant(kt *k, const char *text)
{
    static const struct {
        const char *name;
        uint32_t kind;
    } KINDS[] = {{"packed", KVS_MUTANT_PACKED},
                 {"product32", KVS_MUTANT_PRODUCT32},
                 {"tokens", KVS_MUTANT_TOKENS},
                 {"base", KVS_MUTANT_BASE},
                 {"length", KVS_MUTANT_LENGTH}};
    const char *colon = strchr(text, ':');

    if (colon == NULL)
        return false;
#define X(name, operation, mutants)                                                                                    \
    if (strlen(#name) == (size_t)(colon - text) && strncmp(text, #name, (size_t)(colon - text)) == 0)                  \
        k->mutant_site = KVS_SITE_##name;
    KVS_SITE_MAP(X)
#undef X
    for (size_t i = 0; i < sizeof KINDS / sizeof *KINDS; i++)
        if (strcmp(colon + 1, KINDS[i].name) == 0)
            k->mutant_kinds = KINDS[i].kind;
    return k->mutant_site != 0 && k->mutant_kinds != 0;
}
#else
static bool set_mutant(kt *k, const char *text)
{
    (void)k;
    (void)text;
    return false;
}
#endif

static int list(void)
{
    for (size_t i = 0; i < N_OPS; i++) {
        (void)printf("%s\n", OPS[i]->name);
        for (uint32_t f = 0; f < OPS[i]->n_fixed; f++)
            (void)printf("  %u %s\n", f, OPS[i]->fixed[f].name);
    }
    return 0;
}

static int start(const options *o)
{
    char why[TEXT] = "";
    kt k = {.subset = o->subset, .quiet = o->quiet};
    int status;

    if (o->mutant != NULL && !set_mutant(&k, o->mutant)) {
        (void)fprintf(stderr, "kernels-test: no mutant %s here\n", o->mutant);
        return 2;
    }
    if (!kt_open(&k, strcmp(o->device, "cuda") == 0 ? KT_CUDA : KT_CPU, why, sizeof why)) {
        (void)printf("SKIP: %s\n0 passed, 0 failed, 1 skipped\n", why);
        kt_close(&k);
        return 0;
    }
    status = run_all(o, &k);
    kt_close(&k);
    return status;
}

static bool known(const char *op)
{
    for (size_t i = 0; i < N_OPS; i++)
        if (strcmp(op, OPS[i]->name) == 0)
            return true;
    return false;
}

int main(int argc, char **argv)
{
    enum { SUBSET = 1, LIST, MUTANT, MUTANTS };
    static const struct option LONG[] = {{"device", required_argument, NULL, 'd'},
                                         {"op", required_argument, NULL, 'o'},
                                         {"seed", required_argument, NULL, 's'},
                                         {"cases", required_argument, NULL, 'n'},
                                         {"case", required_argument, NULL, 'c'},
                                         {"subset", required_argument, NULL, SUBSET},
                                         {"json", no_argument, NULL, 'j'},
                                         {"quiet", no_argument, NULL, 'q'},
                                         {"list", no_argument, NULL, LIST},
                                         {"mutant", required_argument, NULL, MUTANT},
                                         {"mutants", no_argument, NULL, MUTANTS},
                                         {"help", no_argument, NULL, 'h'},
                                         {NULL, 0, NULL, 0}};
    options o = {.device = "cpu", .seed = 1, .cases = ALL, .one = ALL};
    int c;

    (void)setvbuf(stdout, NULL, _IOLBF, 0);
    while ((c = getopt_long(argc, argv, "h", LONG, NULL)) != -1)
        switch (c) {
        case 'd':
            o.device = optarg;
            break;
        case 'o':
            o.op = optarg;
            break;
        case 's':
            o.seed = strtoull(optarg, NULL, 0);
            break;
        case 'n':
            o.cases = strtol(optarg, NULL, 0);
            break;
        case 'c':
            o.one = strtol(optarg, NULL, 0);
            break;
        case SUBSET:
            o.subset = strcmp(optarg, "sanitizer") == 0;
            break;
        case 'j':
            o.json = true;
            break;
        case 'q':
            o.quiet = true;
            break;
        case LIST:
            return list();
        case MUTANT:
            o.mutant = optarg;
            break;
        case MUTANTS:
            o.mutants = true;
            break;
        case 'h':
            return usage(stdout, 0);
        default:
            return usage(stderr, 2);
        }
    if (o.op != NULL && !known(o.op)) {
        (void)fprintf(stderr, "kernels-test: no operation '%s'; --list names them\n", o.op);
        return 2;
    }
    if (optind < argc || (strcmp(o.device, "cpu") != 0 && strcmp(o.device, "cuda") != 0) || o.cases < ALL ||
        o.one < ALL)
        return usage(stderr, 2);
    return o.mutants ? kt_mutants(argv[0], o.device, o.op) : start(&o);
}
