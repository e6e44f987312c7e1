/* main.c: cw-trainer: picks the command. Each command has its own options, help and exit status. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/options.h"
#include "kernels/device.h"
#include "trainer/commands.h"

#include <stdio.h>
#include <string.h>

static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *help;
} commands[] = {
    {"train", train_main, "GRPO on the model a server is serving, on its own copy of the weights"},
    {"serve", serve_main, "the Tinker API on the model a server is serving"},
    {"sft", sft_main, "supervised training of a model folder, without a server"},
    {"dpo", dpo_main, "training of a model folder on preferred completions, without a server"},
    {"eval", eval_main, "accuracy of the model a server is serving, or of a model folder"},
    {"merge", merge_main, "a LoRA adapter and its base as one model folder"},
};
#define N_COMMANDS (sizeof commands / sizeof *commands)

static void print_usage(FILE *to)
{
    fputs("usage: cw-trainer COMMAND [options]\n\n", to);
    for (size_t i = 0; i < N_COMMANDS; i++)
        fprintf(to, "  %-6s %s\n", commands[i].name, commands[i].help);
    fputs("\n\"cw-trainer COMMAND --help\" lists the options of a command.\n", to);
}

PREPARE_PROGRAM;

int main(int argc, char **argv)
{
    device_prepare_process(argv);
    const char *word = argc > 1 ? argv[1] : "";
    for (size_t i = 0; i < N_COMMANDS; i++)
        if (strcmp(word, commands[i].name) == 0) return commands[i].run(argc - 1, argv + 1);
    if (strcmp(word, "--version") == 0) {
        puts("cw-trainer " COMMONWEIGHT_VERSION);
        return 0;
    }
    if (strcmp(word, "--help") == 0 || strcmp(word, "--help-all") == 0 || strcmp(word, "-h") == 0) {
        print_usage(stdout);
        return 0;
    }
    if (*word) fprintf(stderr, "cw-trainer: unknown command '%s'\n", word);
    print_usage(stderr);
    return 2;
}
