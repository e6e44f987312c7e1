/* program.c: what all mains have in common. No state. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/program.h"
#include "common/base/log.h"

#include <signal.h>
#include <stdio.h>

bool program_hears_hangup(void)
{
    struct sigaction action;
    return sigaction(SIGHUP, NULL, &action) == 0 && action.sa_handler != SIG_IGN;
}

int program_main(const struct program *p, int argc, char **argv)
{
    struct option_set *set = NULL;
    char name[64];
    signal(SIGXFSZ, SIG_IGN); // a file that may not grow is an error of write(2), with a sentence
    snprintf(name, sizeof name, "%s%s%s", p->name, p->command ? " " : "",
             p->command ? p->command : "");
    log_open(p->name, LOG_INFO);
    const int words = !p->word ? 0 : p->max_words ? p->max_words : 1;
    enum option_result parsed =
        options_parse(p->options, name, p->usage, argc, argv, words, p->config, p->word, &set);
    if (parsed == OPTIONS_DONE) return 0;
    const bool usable = parsed == OPTIONS_OK && (!p->check || p->check(p->context, set) == ST_OK);
    const enum status st = usable ? p->run(p->context) : ST_INVALID;
    if (st != ST_OK && st != ST_CANCELLED) log_error("%s", status_message());
    options_free(set);
    return usable ? st != ST_OK : 2;
}
