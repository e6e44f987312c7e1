/* test_folders.c: what people give as a model or as data: numbers without a limit, byte order
 * marks, names of the Hub, other formats, downloads that were cut off. Read where that is sensible;
 * else the sentence says what is needed. */
// SPDX-License-Identifier: Apache-2.0
#include "common/model/adapter.h"
#include "common/text/chat_template.h"
#include "common/model/config.h"
#include "common/model/model_folder.h"
#include "common/text/tokenizer.h"
#include "tests/support/loaded.h"
#include "tests/support/support.h"
#include "tests/support/tiny_model.h"
#include "tests/support/tiny_tokenizer.h"
#include "tests/support/tokens.h"
#include "trainer/data/data.h"

#define NO_LIMIT "1000000000000000019884624838656" // what transformers writes for "no limit"

static const char *model_folder(void)
{
    const char *folder = tiny_folder(32, 1, 300, 1);
    assert_ok(tiny_tokenizer_write(folder));
    return folder;
}

// Puts `text` right behind the file's first byte, a brace.
static void put_first(const char *folder, const char *name, const char *text)
{
    const char *path = test_path(folder, name);
    const char *old = file_exists(path) ? test_read(path) : "{\"eos_token_id\": 2}";
    struct bytes content = BYTES_INIT;
    bytes_printf(&content, "{%s%s", text, old + 1);
    test_put(folder, name, test_keep(content.data));
}

static void assert_opens(const char *folder)
{
    struct chat_template *chat;
    config_of(folder);
    tokenizer_of(folder);
    assert_ok(chat_template_find(folder, NULL, &chat));
    chat_template_free(chat);
}

TEST(numbers_without_a_limit)
{
    static const char *const files[] = {"config.json", "generation_config.json", "tokenizer.json",
                                        "tokenizer_config.json", "special_tokens_map.json"};
    const char *folder = model_folder();
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        put_first(folder, files[i], "\"model_max_length\": " NO_LIMIT ", ");
        assert_opens(folder);
    }
    // a field that is read says what is wrong with it, by name
    struct model_config *config;
    put_first(folder, "config.json", "\"max_position_embeddings\": " NO_LIMIT ", \"x\": 1, ");
    char *text = test_read(test_path(folder, "config.json"));
    char *second = strstr(strstr(text, "max_position_embeddings") + 1, "max_position_embeddings");
    memcpy(second, "MAX", 3); // jansson takes the last of two
    test_write(test_path(folder, "config.json"), text, strlen(text));
    assert_fails(model_config_load(folder, &config), ST_INVALID,
                 "\"max_position_embeddings\" is 1e+30, which is not a whole number of 64 bits");
}

TEST(wide_integers_are_reals)
{
    const json_t *cases = test_rows("folders", "wide_integers_are_reals");
    for (size_t i = 0; i < json_array_size(cases); i++) {
        const double value = real_of(json_of(row_text(cases, i, "text")), "0");
        assert_near(value / row_number(cases, i, "value"), 1, 1e-12);
    }
    // whole numbers of 64 bits beside them stay whole, and strings stay as they are
    static const char mixed[] = "{\"a\": 9223372036854775807, \"b\\\"\": \"\\\\\\\"" NO_LIMIT "\", "
                                "\"c\": [" NO_LIMIT "], \"" NO_LIMIT "\": -9223372036854775808}";
    json_t *o = json_of(mixed);
    assert_true(int_of(o, "a") == INT64_MAX);
    assert_string_equal(text_of(o, "b\""), "\\\"" NO_LIMIT);
    assert_true(json_is_real(json_at(o, "c.0")));
    assert_true(int_of(o, NO_LIMIT) == INT64_MIN);
    // no number at all: 400 digits, and what follows a wide one is still checked
    static const char bad[] = "[" NO_LIMIT ", 1e999]", broken[] = "[" NO_LIMIT ", nul]";
    assert_status(json_parse("request", bad, sizeof bad - 1, &o), ST_FORMAT);
    assert_fails(json_parse("request", broken, sizeof broken - 1, &o), ST_FORMAT,
                 "request: column");
}

TEST(wide_integers_in_data)
{
    static const char good[] = "{\"prompt\": \"a\", \"answer\": 7, \"id\": " NO_LIMIT "}\n";
    static const char bad[] = "{\"prompt\": \"a\", \"answer\": " NO_LIMIT "}\n";
    struct dataset *d;
    assert_ok(dataset_parse("data", good, sizeof good - 1, NULL, &d));
    assert_string_equal(d->examples[0].answer, "7");
    dataset_free(d);
    assert_fails(dataset_parse("data", bad, sizeof bad - 1, NULL, &d), ST_FORMAT,
                 "data, line 1: field \"answer\" is a number of more digits than are kept");
}

TEST(byte_order_marks)
{
    static const char *const files[] = {"config.json", "tokenizer.json", "tokenizer_config.json"};
    const char *folder = model_folder();
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        struct bytes content = BYTES_INIT;
        bytes_printf(&content, "\xef\xbb\xbf%s", test_read(test_path(folder, files[i])));
        test_put(folder, files[i], test_keep(content.data));
    }
    assert_opens(folder);
    static const char marked[] = "\xef\xbb\xbf\n{\"prompt\": \"a\"}\n{\"prompt\": \"b\"}\n";
    struct dataset *d;
    assert_ok(dataset_parse("data", marked, sizeof marked - 1, NULL, &d));
    assert_int_equal(d->n, 2);
    assert_true(d->byte_order_mark);
    dataset_free(d);
    assert_ok(dataset_parse("data", marked + 3, sizeof marked - 4, NULL, &d));
    assert_false(d->byte_order_mark);
    dataset_free(d);
}

static void assert_no_model(const char *folder, enum status wanted, const char *part)
{
    struct model_config *config;
    assert_fails(model_config_load(folder, &config), wanted, folder);
    assert_message(part);
}

// As the Hub's programs leave it: a name leads to the revision that refs/main names.
TEST(names_of_the_hub)
{
    const char *home = test_folder(), *repo = test_path(home, "hub/models--some-org--a--model_1");
    const char *revision = test_path(repo, "snapshots/0123abcd");
    char found[PATH_ROOM], name[64];
    unsetenv("HF_HUB_CACHE");
    assert_int_equal(setenv("HF_HOME", home, 1), 0);
    assert_fails(model_folder_find("some-org/a--model_1", found), ST_NOT_FOUND,
                 test_path(repo, "refs/main"));
    assert_message("hf download some-org/a--model_1");
    assert_ok(file_make_folders(test_path(repo, "refs")));
    test_put(repo, "refs/main", "0123abcd\n");
    assert_fails(model_folder_find("some-org/a--model_1", found), ST_NOT_FOUND, revision);
    assert_ok(file_make_folders(revision));
    assert_ok(model_folder_find("some-org/a--model_1", found));
    assert_string_equal(found, revision);
    assert_ok(model_folder_find("some/where/else", found)); // no name of the Hub
    assert_string_equal(found, "some/where/else");
    const char *const names[][2] = {{revision, "some-org/a--model_1"},
                                    {"/models/demo//", "demo"},
                                    {"demo", "demo"},
                                    {"/x/snapshots/abc", "abc"},
                                    {"/x/models--a--b/snapshots/abc/", "a/b"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        model_folder_name(names[i][0], name, sizeof name);
        assert_string_equal(name, names[i][1]);
    }
}

TEST(what_is_no_model)
{
    const char *folder = test_folder(), *file = test_path(folder, "model.gguf");
    struct tokenizer *tokenizer;
    assert_no_model("Qwen/Qwen2.5-1.5B", ST_NOT_FOUND,
                    "hf download Qwen/Qwen2.5-1.5B --local-dir DIR");
    assert_fails(tokenizer_load("Qwen/Qwen2.5-1.5B", &tokenizer), ST_NOT_FOUND,
                 "nothing is fetched from the Hub by name");
    assert_no_model("/no/such/folder", ST_NOT_FOUND,
                    "no such folder; a model is a folder with "
                    "config.json, model.safetensors");
    assert_no_model("./no-runs/first", ST_NOT_FOUND, "no such folder");
    assert_no_model(folder, ST_NOT_FOUND, "no config.json in it");
    test_write(file, "weights", 7);
    assert_no_model(file, ST_INVALID, "is a file; a model is a folder");
    test_write(file, "GGUF", 4);
    assert_no_model(file, ST_FORMAT, "is truncated or damaged");
    assert_ok(file_make_folders(test_path(folder, "snapshots/0123abcd")));
    assert_no_model(folder, ST_NOT_FOUND, "snapshots/");
    struct model_config *config;
    assert_fails(model_config_load_file(folder, &config), ST_INVALID,
                 "is a folder; name the config.json in it");
    assert_fails(model_config_load_file("Qwen/Qwen2.5-1.5B", &config), ST_NOT_FOUND,
                 "nothing is fetched from the Hub by name");
    const char *adapter = test_folder();
    test_put(adapter, "adapter_config.json", "{}");
    assert_no_model(adapter, ST_NOT_FOUND, "an adapter, not a model: give the model");
    const char *run = test_folder();
    test_put(run, "config.json", "{\"run_dir\":\"r\"}");
    test_put(run, "run.json", "{}");
    assert_no_model(run, ST_INVALID, "is the folder of a run");
    assert_message("/checkpoints/latest");
    struct adapter_config *factors;
    assert_fails(adapter_config_load(run, &factors), ST_NOT_FOUND,
                 "no adapter_config.json in it; an adapter is a folder");
    const char *checkpoints = test_folder();
    assert_ok(file_make_folders(test_path(checkpoints, "latest")));
    assert_no_model(checkpoints, ST_NOT_FOUND, "as latest in it");
    const char *pieces = test_folder();
    test_put(pieces, "tokenizer.model", "x");
    assert_fails(tokenizer_load(pieces, &tokenizer), ST_NOT_FOUND,
                 "no tokenizer.json in it; a SentencePiece file alone is not read");
}

// As in a cache of the Hub whose blobs were not all fetched.
TEST(links_that_lead_nowhere)
{
    static const char *const files[] = {"generation_config.json", "tokenizer.json",
                                        "tokenizer_config.json",  "special_tokens_map.json",
                                        "chat_template.jinja",    "vocab.json"};
    struct model_config *config;
    struct tokenizer *tokenizer;
    const char *folder = model_folder();
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        const char *path = test_path(folder, files[i]);
        const char *kept = file_exists(path) ? test_read(path) : NULL;
        unlink(path);
        assert_int_equal(symlink("../../blobs/8f3c", path), 0);
        assert_fails(model_config_load(folder, &config), ST_IO, path);
        assert_message("is a link to ../../blobs/8f3c, which is not there");
        assert_fails(tokenizer_load(folder, &tokenizer), ST_IO, path);
        assert_int_equal(unlink(path), 0);
        if (kept) test_put(folder, files[i], kept);
        assert_opens(folder);
    }
    const char *path = test_path(folder, "config.json");
    assert_int_equal(unlink(path), 0);
    assert_int_equal(symlink("gone", path), 0);
    assert_no_model(folder, ST_IO, "is a link to gone, which is not there");
    const char *linked = test_path(test_folder(), "model");
    assert_int_equal(symlink("gone", linked), 0);
    assert_no_model(linked, ST_IO, "is a link to gone");
    assert_int_equal(unlink(linked), 0);
    assert_int_equal(symlink(model_folder(), linked), 0);
    assert_opens(linked);
}

static void assert_no_data(const char *text, size_t len, const char *part)
{
    struct dataset *d;
    const char *path = test_path(test_folder(), "given");
    test_write(path, text, len);
    assert_true(dataset_load(path, NULL, &d) != ST_OK);
    assert_message(path);
    assert_message(part);
}

TEST(what_is_no_data)
{
    static const char list[] = "\xef\xbb\xbf \n[{\"prompt\": \"a\"}]";
    struct dataset *d;
    assert_fails(dataset_load("openai/gsm8k", NULL, &d), ST_NOT_FOUND,
                 "no data set is fetched by name");
    assert_message("python3 -m commonweight.data 'openai/gsm8k' > train.jsonl");
    assert_fails(dataset_load("data/train.jsonl", NULL, &d), ST_NOT_FOUND,
                 "cannot open data/train.jsonl");
    assert_fails(dataset_load(test_folder(), NULL, &d), ST_INVALID,
                 "is a folder; data is one file, JSONL");
    assert_no_data("PAR1\x15\x04", 6, "is a Parquet file; data is JSONL");
    assert_message("python3 -m commonweight.data");
    assert_no_data("ARROW1\0\0", 8, "is an Arrow file");
    assert_no_data("\x1f\x8b\x08\x00", 4, "gunzip");
    assert_no_data("PK\x03\x04zip", 7, "zip");
    assert_no_data("\xff\xfe{\0", 4, "is UTF-16: write it as UTF-8");
    assert_no_data(list, sizeof list - 1, "is one JSON list; data is JSONL");
    const char *table = test_path(test_folder(), "train.CSV");
    test_write(table, "prompt,answer\n", 14);
    assert_fails(dataset_load(table, NULL, &d), ST_FORMAT, "is a CSV file; data is JSONL");
    assert_message("python3 -m commonweight.data");
    test_write(table, "{\"prompt\":\"a\"}\n", 15); // by another name
    assert_ok(dataset_load(table, NULL, &d));
    dataset_free(d);
    const char *gone = test_path(test_folder(), "train.jsonl");
    assert_int_equal(symlink("blobs/1", gone), 0);
    assert_fails(dataset_load(gone, NULL, &d), ST_IO, "is a link to blobs/1, which is not there");
}

TEST(names_that_are_no_text)
{
    const char *root = test_folder(), *folder = test_path(root, "m\xff"),
               *link = test_path(root, "m");
    struct model_config *config = NULL;
    assert_int_equal(rename(model_folder(), folder), 0);
    assert_fails(model_config_load(folder, &config), ST_INVALID, "this name is not UTF-8");
    assert_int_equal(symlink(folder, link), 0);
    assert_ok(model_config_load(link, &config));
    model_config_free(config);
}
