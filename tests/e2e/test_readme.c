/* What README.md shows is true: its client compiles and runs against the real daemon, its table is the program's. */
#include <criterion/criterion.h>

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support/daemon_fixture.h"

enum { FILE_BYTES = 1 << 18 };

static char *slurp(const char *path)
{
    char *text = calloc(1, FILE_BYTES);
    FILE *f = fopen(path, "r");

    cr_assert_not_null(text);
    cr_assert_not_null(f, "%s: tests run from the top of the tree", path);
    cr_assert_lt(fread(text, 1, FILE_BYTES - 1, f), FILE_BYTES - 1);
    (void)fclose(f);
    return text;
}

Test(readme, has_the_option_table_of_the_program)
{
    static const char *const ARGS[] = {"--print-table", NULL};
    char *readme = slurp("README.md"), *table = calloc(1, FILE_BYTES);
    daemon_fixture d;

    daemon_init(&d);
    cr_assert_eq(daemon_run(&d, ARGS, table, FILE_BYTES), 0);
    cr_assert_gt(strlen(table), 1000);
    cr_assert_not_null(strstr(readme, table), "README.md and kvstrided --print-table differ");
    daemon_fini(&d);
    free(readme);
    free(table);
}

/* Each line of the list in `kvstridectl --help` begins with a command. */
Test(readme, names_every_command_of_the_operators_tool)
{
    const char *build = getenv("KVS_BUILD");
    char *readme = slurp("README.md"), command[256], line[256], name[64], wanted[2][80];
    bool in_list = false;
    unsigned n = 0;
    FILE *f;

    (void)snprintf(command, sizeof command, "%s/kvstridectl --help", build != NULL ? build : "build/release");
    f = popen(command, "r");
    cr_assert_not_null(f);
    while (fgets(line, sizeof line, f) != NULL) {
        in_list = (in_list || strncmp(line, "Commands", 8) == 0) && strncmp(line, "Options", 7) != 0;
        if (!in_list || sscanf(line, "  %63[a-z] ", name) != 1)
            continue;
        (void)snprintf(wanted[0], sizeof wanted[0], "`kvstridectl %s", name);
        (void)snprintf(wanted[1], sizeof wanted[1], "`, `%s`", name);
        cr_assert(strstr(readme, wanted[0]) != NULL || strstr(readme, wanted[1]) != NULL, "README.md lacks %s", name);
        n++;
    }
    cr_assert_eq(pclose(f), 0);
    cr_assert_geq(n, 18);
    free(readme);
}

/* The first C block, against the headers and the library of this build laid out as `make install` does. */
Test(readme, has_a_client_that_compiles_and_finds_nothing_in_an_empty_pool)
{
    char *readme = slurp("README.md"), *begin = strstr(readme, "```c\n"), *end;
    const char *build = getenv("KVS_BUILD");
    const char *flags = build != NULL && strstr(build, "address") ? "-fsanitize=address,undefined" : "";
    char path[256], command[2048], line[64] = "";
    daemon_fixture d;
    FILE *f;

    if (build == NULL)
        build = "build/release";
    daemon_init(&d);
    cr_assert(daemon_start(&d, "{\"pool\": {\"max_bytes\": \"16MiB\"}}"));
    cr_assert_not_null(begin);
    begin += 5;
    end = strstr(begin, "```");
    cr_assert_not_null(end);
    (void)snprintf(path, sizeof path, "%s/ten.c", d.dir);
    f = fopen(path, "w");
    cr_assert_not_null(f);
    cr_assert_eq(fwrite(begin, 1, (size_t)(end - begin), f), (size_t)(end - begin));
    (void)fclose(f);
    (void)snprintf(
        command, sizeof command,
        "mkdir -p %s/inc/proto && cp proto/client/kvstride.h %s/inc && cp proto/status.h proto/layout.h "
        "proto/backend.h "
        "%s/inc/proto && ${CC:-cc} -Wall -Wextra %s -I%s/inc -o %s/ten %s/ten.c %s/libkvstride.a -lcrypto -lm "
        "-pthread && KVSTRIDE_SOCKET=%s %s/ten; rc=$?; rm -rf %s/inc %s/ten %s/ten.c; exit $rc",
        d.dir, d.dir, d.dir, flags, d.dir, d.dir, d.dir, build, d.socket, d.dir, d.dir, d.dir, d.dir);
    f = popen(command, "r");
    cr_assert_not_null(f);
    cr_assert_not_null(fgets(line, sizeof line, f));
    cr_assert_eq(pclose(f), 0);
    cr_assert_str_eq(line, "0 hits\n");
    daemon_fini(&d);
    free(readme);
}
