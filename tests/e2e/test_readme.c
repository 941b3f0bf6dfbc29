/* What README.md shows is true: its programs compile and run against the real daemon, its table is the program's. */
#include <criterion/criterion.h>

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

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

/* Block `which` of C, from 0 on, as a file. */
static void write_block(unsigned which, const char *path)
{
    char *readme = slurp("README.md"), *begin = readme, *end;
    FILE *f = fopen(path, "w");

    cr_assert_not_null(f);
    for (unsigned i = 0; i <= which; i++) {
        begin = strstr(begin, "```c\n");
        cr_assert_not_null(begin, "README.md has no block %u of C", i);
        begin += 5;
    }
    end = strstr(begin, "```");
    cr_assert_not_null(end);
    cr_assert_eq(fwrite(begin, 1, (size_t)(end - begin), f), (size_t)(end - begin));
    cr_assert_eq(fclose(f), 0);
    free(readme);
}

/* Against the headers and the libraries of this build laid out as `make install` does, with a daemon whose pool is empty.
 * libs: %s is the folder of the build. */
static void says(unsigned which, const char *libs, const char *text)
{
    const char *build = getenv("KVS_BUILD");
    const char *flags = build != NULL && strstr(build, "address") ? "-fsanitize=address,undefined" : "";
    char path[256], with[512], command[2048], line[64] = "";
    daemon_fixture d;
    FILE *f;

    if (build == NULL)
        build = "build/release";
    daemon_init(&d);
    cr_assert(daemon_start(&d, "{\"pool\": {\"max_bytes\": \"16MiB\"}}"));
    (void)snprintf(path, sizeof path, "%s/block.c", d.dir);
    write_block(which, path);
    (void)snprintf(with, sizeof with, libs, build, build);
    (void)snprintf(
        command, sizeof command,
        "d=%s; i=$d/inc/kvstride; mkdir -p $i/proto $i/kernels && cp proto/client/kvstride.h kernels/kernels.h $i && "
        "cp proto/status.h proto/layout.h proto/backend.h $i/proto && cp kernels/*.h $i/kernels && "
        "${CC:-cc} -Wall -Wextra %s -I$d/inc -I$i -o $d/block $d/block.c %s -lcrypto -lm -pthread && "
        "KVSTRIDE_SOCKET=%s $d/block; rc=$?; rm -rf $d/inc $d/block $d/block.c; exit $rc",
        d.dir, flags, with, d.socket);
    f = popen(command, "r");
    cr_assert_not_null(f);
    cr_assert_not_null(fgets(line, sizeof line, f));
    cr_assert_eq(pclose(f), 0);
    cr_assert_str_eq(line, text);
    daemon_fini(&d);
}

Test(readme, has_a_client_that_compiles_and_finds_nothing_in_an_empty_pool)
{
    says(0, "%s/libkvstride.a", "0 hits\n");
}

Test(readme, has_a_client_that_stores_and_loads_blocks)
{
    says(1, "%s/libkvstride.a", "3 of 3 blocks came back\n");
}

Test(readme, has_a_program_that_attends_in_its_own_process)
{
    says(2, "%s/libkvstride-kernels.so.0 -Wl,-rpath,$PWD/%s", "lse 4.605, the logarithm of 100\n");
}

Test(readme, shows_where_the_operations_of_the_kernels_test_have_their_names)
{
    const char *build = getenv("KVS_BUILD");
    char command[256], line[160] = "";
    FILE *f;

    (void)snprintf(command, sizeof command, "%s/kernels-test", build != NULL ? build : "build/release");
    if (access(command, X_OK) != 0)
        cr_skip_test("%s is not built", command);
    (void)strcat(command, " --op nope 2>&1");
    f = popen(command, "r");
    cr_assert_not_null(f);
    cr_assert_not_null(fgets(line, sizeof line, f));
    cr_assert_eq(WEXITSTATUS(pclose(f)), 2);
    cr_assert_str_eq(line, "kernels-test: no operation 'nope'; --list names them\n");
}
