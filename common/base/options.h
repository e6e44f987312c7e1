/* options.h: the one config path. A program lists its options in a table; the same table reads the
 * command line (--learning-rate 1e-6, --learning-rate=1e-6, --no-flag), a JSON file with the same
 * names spelt learning_rate, prints --help and --version, and writes the resolved config back.
 * A flag beats the file, the file beats the default. */
// SPDX-License-Identifier: Apache-2.0
#ifndef COMMON_BASE_OPTIONS_H
#define COMMON_BASE_OPTIONS_H

#include "common/base/names.h"
#include <jansson.h>
#include <stdint.h>

enum option_type {
    OPTION_FLAG,    // bool; --name, --no-name, --name=true|false
    OPTION_INT,     // int64_t
    OPTION_DOUBLE,  // double
    OPTION_STRING,  // const char *; NULL when not given and without a default. Owned by the set.
    OPTION_FILE,    // as OPTION_STRING: the JSON file that options are read from
    OPTION_SIZE,    // int64_t bytes: 512, 64K, 10M, 2G (powers of 1024)
    OPTION_CHOICE,  // an enum or int: which of the names
    OPTION_HEADING, // a line of --help; `help` is its text
    OPTION_DERIVED, // no option: a bool that the program sets by other means, for rules to name
    OPTION_FOREIGN  // no options: other programs' names (`choices`), for those who come from there
};

/* How an option goes with others. A condition is one or more alternatives with | between, each one
 * or more terms with & between. A term is the name of an option, which holds where that option is
 * on (true, not empty, not 0, not the first of its choices), or a comparison: name=a,b (one of
 * these), name!=a,b (none of them), name>1, name<1, name~text (the text contains it). */
enum option_rule_kind {
    RULE_END,
    RULE_COMMON,   // no condition: --help lists the option, in a table where some have this
    RULE_NEEDS,    // the condition holds wherever the option is on
    RULE_EXCLUDES, // it does not
    RULE_WITHIN,   // the option is part of it: to give the one without the other has no effect
};
struct option_rule {
    enum option_rule_kind kind;
    const char *when;   // a comparison as above, behind the name: the rule is for these values
                        // alone; NULL: for wherever the option is on
    const char *other;  // the condition
    const char *reason; // said in errors, with a way out behind a semicolon; NULL: goes by itself
};

struct option_spec {
    const char *name; // "learning-rate"; NULL ends the table
    enum option_type type;
    size_t offset;          // offsetof(struct your_config, field)
    const char *fallback;   // default, as on the command line; NULL: field keeps 0/NULL/false
    const char *value_name; // "PATH", "N" for --help
    const char *help;
    double min, max;                 // of numbers; min == max == 0: any
    const char *const *choices;      // of OPTION_CHOICE: names of the values (names.h); of
                                     // OPTION_FOREIGN: "name name: what is here in their place"
    const struct option_rule *rules; // RULE_END ends them
};

// The rows of a table. Before it, OPTIONS_OF is defined as the struct that they fill. The order is
// always the same: name, field, default, name of the value, what it may be, help, rules.
#define OPTION_ROW(...)                                                                            \
    {                                                                                              \
        __VA_ARGS__                                                                                \
    }
#define OPTION_RULES(...)                                                                          \
    __VA_OPT__((const struct option_rule[]){__VA_ARGS__, {.kind = RULE_END}} +) 0
#define OPT_HEADING(text) OPTION_ROW("", OPTION_HEADING, 0, NULL, NULL, text, 0, 0, NULL, NULL)
#define OPT_FIELD(name, type, field, fallback, value, help, min, max, choices, ...)                \
    OPTION_ROW(name, type, offsetof(OPTIONS_OF, field), fallback, value, help, min, max, choices,  \
               OPTION_RULES(__VA_ARGS__))
#define OPT_FLAG(name, field, fallback, help, ...)                                                 \
    OPT_FIELD(name, OPTION_FLAG, field, fallback, NULL, help, 0, 0, NULL, __VA_ARGS__)
#define OPT_INT(name, field, fallback, value, min, max, help, ...)                                 \
    OPT_FIELD(name, OPTION_INT, field, fallback, value, help, min, max, NULL, __VA_ARGS__)
#define OPT_DOUBLE(name, field, fallback, value, min, max, help, ...)                              \
    OPT_FIELD(name, OPTION_DOUBLE, field, fallback, value, help, min, max, NULL, __VA_ARGS__)
#define OPT_SIZE(name, field, fallback, min, max, help, ...)                                       \
    OPT_FIELD(name, OPTION_SIZE, field, fallback, "SIZE", help, min, max, NULL, __VA_ARGS__)
#define OPT_TEXT(name, field, fallback, value, help, ...)                                          \
    OPT_FIELD(name, OPTION_STRING, field, fallback, value, help, 0, 0, NULL, __VA_ARGS__)
#define OPT_CHOICE(name, field, fallback, choices, help, ...)                                      \
    OPT_FIELD(name, OPTION_CHOICE, field, fallback, NULL, help, 0, 0, choices, __VA_ARGS__)
// Names that no enum has, of a field that is 0 for the first, 1 for the next...
#define OPTION_WORDS(...) ((const char *const[]){__VA_ARGS__, NULL})
// --config, into the field `config`
#define OPT_CONFIG                                                                                 \
    OPT_FIELD("config", OPTION_FILE, config, NULL, "FILE",                                         \
              "these options as JSON, with _ for -; a flag beats the file", 0, 0, NULL)
// name: as errors have it
#define OPT_DERIVED(name, field)                                                                   \
    OPT_FIELD(name, OPTION_DERIVED, field, NULL, NULL, NULL, 0, 0, NULL)
// Not listed; whoever gives one is told. Names by their last part ("lr" of "optim.lr").
#define OPT_FOREIGN(list) OPTION_ROW("", OPTION_FOREIGN, 0, NULL, NULL, NULL, 0, 0, list, NULL)
#define OPT_END           OPTION_ROW(NULL, OPTION_FLAG, 0, NULL, NULL, NULL, 0, 0, NULL, NULL)

#define IS_COMMON                            OPTION_ROW(.kind = RULE_COMMON)
#define NEEDS(condition, why)                OPTION_ROW(RULE_NEEDS, NULL, condition, why)
#define NEEDS_WHEN(value, condition, why)    OPTION_ROW(RULE_NEEDS, value, condition, why)
#define EXCLUDES(condition, why)             OPTION_ROW(RULE_EXCLUDES, NULL, condition, why)
#define EXCLUDES_WHEN(value, condition, why) OPTION_ROW(RULE_EXCLUDES, value, condition, why)
#define WITHIN(condition)                    OPTION_ROW(RULE_WITHIN, NULL, condition, NULL)

struct option_set;
enum option_result {
    OPTIONS_OK,
    OPTIONS_DONE, // --help or --version was printed: exit 0
    OPTIONS_BAD   // wrong usage: the sentence is in status_message(); exit 2
};

// Fills `config` (a struct of the program's own, which it zeroed) from defaults, then from the file
// named by --config (where the table has OPT_CONFIG), then from argv[1..]. Words
// that are not options are positional: at most max_positional, given back in ret_positional
// (borrowed from argv; the rest NULL). `usage` is what --help prints behind the program's name;
// further lines of it follow as they are. Strings of `config` live as long as the set; unless the
// result is OPTIONS_OK they are NULL.
enum option_result options_parse(const struct option_spec *table, const char *program,
                                 const char *usage, int argc, char **argv, int max_positional,
                                 void *config, const char **ret_positional,
                                 struct option_set **ret_set);
bool options_given(const struct option_set *set, const char *name); // by flag or file
// ST_INVALID where a rule of the table is broken; the sentence names both options. Derived values
// are set before.
enum status options_check(const struct option_set *set, const void *config);
// A sentence for each option that was given, by a file otherwise than by default, and has no effect
// (RULE_WITHIN), a line each.
void options_list_idle(const struct option_set *set, const void *config, struct bytes *to);
// Options that were not given, by flag or file, take what `recorded`, such an object as
// options_to_json() makes, has for them. `path` names it in errors; ret_taken: "--name value" of
// each that is not the default, with commas between.
enum status options_fill(struct option_set *set, const char *path, const json_t *recorded,
                         void *config, struct bytes *ret_taken);
// Resolved, with underscores, without "config" itself (its content is resolved already), so that
// the object can be read back through --config. The caller's; NULL for want of memory.
json_t *options_to_json(const struct option_spec *table, const void *config);
void options_free(struct option_set *set);

// Bytes from "512", "64K", "10M", "2G", "1T" (powers of 1024), as OPTION_SIZE reads them.
enum status options_size(const char *text, int64_t *ret_bytes);

// ---- what options.c and option_rules.c share ----------------------------------------------------

struct option_set { // owns the strings it put into a config
    const struct option_spec *table;
    // one for each of the table: not; by flag or file; by a file, which may have all, the default
    enum { OPTION_NOT_GIVEN, OPTION_GIVEN, OPTION_AS_DEFAULT } * given;
    char **strings;
    size_t n_strings;
};

// For --help: what the option goes with, and what it does not.
void option_rules_describe(const struct option_spec *table, const struct option_spec *spec,
                           struct bytes *to);

// The version every program prints with --version.
#define COMMONWEIGHT_VERSION "0.2.0"

// ---- how a program begins and ends --------------------------------------------------------------
struct program {
    const char *name, *command; // "cw-trainer", which the log has; "train" behind it, or NULL
    const char *usage;          // as options_parse() takes it
    const struct option_spec *options;
    void *config;      // zeroed; what the options fill
    const char **word; // the positional words, NULL behind the last; NULL: none is taken
    int max_words;     // that it has room for; 0: one
    // Whether what is asked for makes sense, before anything is opened; NULL: it does.
    enum status (*check)(void *context, struct option_set *set);
    // ST_CANCELLED: it failed and has said so.
    enum status (*run)(void *context);
    void *context; // of both
};
// The exit status: 0; 1 where run() failed, 2 where the usage is wrong, whose sentence is logged.
int program_main(const struct program *p, int argc, char **argv);
// Whether a closed terminal (SIGHUP) ends this process: nohup has it ignored. A terminal sends it
// twice, once through its shell, so that a further one is no second wish.
bool program_hears_hangup(void);

#endif
