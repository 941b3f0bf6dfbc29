#include "tests/kernels/kt_ops.h"

#include <stdio.h>

#ifdef KVS_MUTATION
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SECONDS = 120, TEXT = 96 };

typedef enum verdict { PASSED, FAILED, BROKEN } verdict;

/* Start this program once more, silent.  A crash or a hang is a failure like another; a status that stands for a wrong
 * command line is not. */
static verdict run_one(const char *program, const char *device, const char *op, const char *mutant)
{
    int status = 0;
    const pid_t pid = fork();

    if (pid < 0)
        return BROKEN;
    if (pid == 0) {
        const int null = open("/dev/null", O_WRONLY);

        if (null >= 0) {
            (void)dup2(null, STDOUT_FILENO);
            (void)dup2(null, STDERR_FILENO);
        }
        (void)alarm(SECONDS);
        if (mutant != NULL)
            (void)execl("/proc/self/exe", program, "--device", device, "--op", op, "--quiet", "--mutant", mutant,
                        (char *)NULL);
        else
            (void)execl("/proc/self/exe", program, "--device", device, "--op", op, "--quiet", (char *)NULL);
        _exit(2);
    }
    if (waitpid(pid, &status, 0) != pid)
        return BROKEN;
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
        return PASSED;
    return WIFEXITED(status) && WEXITSTATUS(status) == 2 ? BROKEN : FAILED;
}

static const struct site {
    const char *name, *op;
    uint32_t mutants;
} SITES[] = {
#define X(name, operation, mutants) {#name, operation, mutants},
    KVS_SITE_MAP(X)
#undef X
};
enum { N_SITES = sizeof SITES / sizeof *SITES };

static const struct {
    uint32_t kind;
    const char *name;
} KINDS[] = {{KVS_MUTANT_PACKED, "packed"},
             {KVS_MUTANT_PRODUCT32, "product32"},
             {KVS_MUTANT_TOKENS, "tokens"},
             {KVS_MUTANT_BASE, "base"},
             {KVS_MUTANT_LENGTH, "length"}};

typedef struct tally {
    const char *program, *device;
    unsigned killed, total, broken;
} tally;

static void try_site(tally *t, const struct site *s)
{
    for (size_t i = 0; i < sizeof KINDS / sizeof *KINDS; i++) {
        char text[TEXT];
        verdict v;

        if ((s->mutants & KINDS[i].kind) == 0)
            continue;
        (void)snprintf(text, sizeof text, "%s:%s", s->name, KINDS[i].name);
        v = run_one(t->program, t->device, s->op, text);
        t->total++;
        t->killed += v == FAILED;
        t->broken += v == BROKEN;
        (void)printf("%s  %s %s\n", v == FAILED ? "ok  " : "FAIL", text,
                     v == FAILED   ? "killed"
                     : v == PASSED ? "SURVIVED: no case of the operation saw it"
                                   : "could not be run");
    }
}

static bool first_of_its_op(size_t site)
{
    for (size_t i = 0; i < site; i++)
        if (strcmp(SITES[i].op, SITES[site].op) == 0)
            return false;
    return true;
}

/* The sites of an operation.  As it is, it must pass: else every mutant would seem to be killed. */
static void try_op(tally *t, const char *op)
{
    if (run_one(t->program, t->device, op, NULL) != PASSED) {
        (void)printf("FAIL  %s fails without a mistake\n", op);
        t->broken++;
        return;
    }
    for (size_t i = 0; i < N_SITES; i++)
        if (strcmp(SITES[i].op, op) == 0)
            try_site(t, &SITES[i]);
}

int kt_mutants(const char *program, const char *device, const char *only_op)
{
    tally t = {.program = program, .device = device};

    for (size_t i = 0; i < N_SITES; i++)
        if (first_of_its_op(i) && (only_op == NULL || strcmp(only_op, SITES[i].op) == 0))
            try_op(&t, SITES[i].op);
    (void)printf("%u of %u mutants killed on %s%s\n", t.killed, t.total, device, t.broken > 0 ? ", some not run" : "");
    return t.killed != t.total || t.broken > 0 || t.total == 0;
}
#else
int kt_mutants(const char *program, const char *device, const char *only_op)
{
    (void)device;
    (void)only_op;
    (void)fprintf(stderr, "%s: built without mutants\n", program);
    return 2;
}
#endif
