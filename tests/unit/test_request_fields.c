/* test_request_fields.c: infer-server/http/request_fields.c: which values are taken, that nothing
 * is ignored unsaid, and that docs/use/protocol.md names every field of the table. */
// SPDX-License-Identifier: Apache-2.0
#include "infer-server/http/api_impl.h"
#include "tests/support/support.h"

static enum status check(enum body body, const char *text, struct unknown_fields *unknown)
{
    json_t *object = test_keep(json_loads(text, 0, NULL));
    if (!object) fail_msg("not JSON: %s", text);
    struct api_request r = {.name = ""};
    enum status st = request_read(object, body, unknown, &r);
    return st;
}

TEST(values_that_change_nothing)
{
    assert_ok(check(BODY_COMPLETIONS,
                    "{\"prompt\":[1],\"best_of\":1,\"length_penalty\":1.0,"
                    "\"suffix\":\"\",\"use_beam_search\":false,\"priority\":0,"
                    "\"structured_outputs\":null,\"user\":\"x\",\"allowed_token_ids\":[],"
                    "\"truncate_prompt_tokens\":-1,\"kv_transfer_params\":null}",
                    NULL));
    assert_ok(
        check(BODY_CHAT,
              "{\"messages\":[],\"tool_choice\":\"none\",\"tools\":[],\"store\":false,"
              "\"modalities\":[\"text\"],\"service_tier\":\"auto\",\"metadata\":{\"a\":\"b\"},"
              "\"response_format\":{\"type\":\"text\"},\"parallel_tool_calls\":true,"
              "\"include_reasoning\":true,\"verbosity\":\"medium\",\"function_call\":null}",
              NULL));
    assert_ok(check(BODY_SAMPLING, "{\"detokenize\":false,\"output_kind\":2,\"n\":4}", NULL));
}

TEST(values_that_ask_for_more)
{
    static const struct {
        enum body body;
        const char *text, *part;
    } cases[] = {
        {BODY_COMPLETIONS, "{\"bad_words\":[\"a\"]}", "\"bad_words\" is not supported"},
        {BODY_COMPLETIONS, "{\"length_penalty\":2}", "but for 1: it is 2"},
        {BODY_COMPLETIONS, "{\"priority\":\"0\"}", "it is \"0\""},
        {BODY_COMPLETIONS, "{\"tools\":[{\"type\":\"function\"}]}", "\"tools\""},
        {BODY_CHAT, "{\"modalities\":[\"text\",\"audio\"]}", "\"modalities\""},
        {BODY_CHAT, "{\"add_special_tokens\":true}", "\"add_special_tokens\""},
        {BODY_STREAM_OPTIONS, "{\"include_obfuscation\":true}", "\"include_obfuscation\""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_fails(check(cases[i].body, cases[i].text, NULL), ST_UNSUPPORTED, cases[i].part);
    }
}

TEST(unknown_fields)
{
    struct unknown_fields unknown = {.accept = false};
    const char *text = "{\"n\":1,\"temprature\":0.5}";
    assert_fails(check(BODY_COMPLETIONS, text, NULL), ST_INVALID,
                 "\"temprature\" is no field of /v1/completions; did you mean \"temperature\"?");
    assert_fails(check(BODY_CHAT, "{\"max_token\":5}", NULL), ST_INVALID,
                 "did you mean \"max_tokens\"?");
    assert_fails(check(BODY_CHAT, "{\"colour\":5}", NULL), ST_INVALID,
                 "\"colour\" is no field of /v1/chat/completions: leave it out");
    assert_status(check(BODY_COMPLETIONS, text, &unknown), ST_INVALID);
    assert_status(check(BODY_COMPLETIONS, "{\"messages\":[]}", NULL), ST_INVALID); // a chat's
    unknown.accept = true;
    assert_ok(check(BODY_COMPLETIONS, text, &unknown));
    assert_ok(check(BODY_COMPLETIONS, text, &unknown));
    assert_int_equal(unknown.n_logged, 1);
    for (int i = 0; i < 100; i++) { // as many names as there is room for
        char other[32];
        snprintf(other, sizeof other, "{\"field %d\":1}", i);
        assert_ok(check(BODY_CHAT, other, &unknown));
    }
    assert_int_equal(unknown.n_logged, sizeof unknown.logged / sizeof *unknown.logged);
    assert_status(check(BODY_CHAT, "{\"store\":true}", &unknown), ST_UNSUPPORTED); // is known
    char value[120] = "{\"store\":\"aa"; // it is quoted, and cut between characters
    for (int i = 0; i < 40; i++) strcat(value, "\xc3\xa9");
    assert_fails(check(BODY_CHAT, strcat(value, "\"}"), NULL), ST_UNSUPPORTED,
                 "\xc3\xa9...; leave it out");
    assert_int_equal(utf8_sequence(strstr(status_message(), "...") - 2, 2), 2);
}

TEST(table_is_sound_and_documented)
{
    const char *name, *accepts, *other;
    unsigned bodies, other_places;
    char *docs = test_read(test_path(test_root(), "docs/use/protocol.md"));
    char *adapters = test_read(test_path(test_root(), "docs/use/lora.md"));
    for (int i = 0; request_fields_row(i, &name, &bodies, &accepts); i++) {
        char quoted[80], in_json[80];
        snprintf(quoted, sizeof quoted, "`%s", name);
        snprintf(in_json, sizeof in_json, "\"%s\"", name);
        if (!strstr(docs, quoted) && !strstr(docs, in_json) && !strstr(adapters, in_json))
            fail_msg("neither docs/use/protocol.md nor lora.md says anything of `%s`", name);
        if (accepts && strcmp(accepts, "*") != 0) {
            json_t *list = test_keep(json_loads(accepts, 0, NULL));
            if (!json_is_array(list)) fail_msg("%s accepts %s", name, accepts);
        }
        for (int k = 0; k < i; k++) {
            request_fields_row(k, &other, &other_places, &accepts);
            if (strcmp(name, other) == 0 && (bodies & other_places)) fail_msg("%s twice", name);
        }
    }
}

TEST(messages)
{
    json_t *given =
        test_keep(json_loads("[{\"role\":\"developer\",\"content\":\"a\"},"
                             "{\"role\":\"assistant\",\"content\":\"b\",\"tool_calls\":[]},"
                             "{\"role\":\"assistant\",\"content\":\"c\",\"tool_calls\":[1]},7]",
                             0, NULL));
    json_t *want =
        test_keep(json_loads("[{\"role\":\"system\",\"content\":\"a\"},"
                             "{\"role\":\"assistant\",\"content\":\"b\"},"
                             "{\"role\":\"assistant\",\"content\":\"c\",\"tool_calls\":[1]},7]",
                             0, NULL));
    json_t *copy = json_deep_copy(given), *plain = NULL;
    assert_ok(api_messages_plain(given, false, &plain));
    assert_true(json_equal(plain, want));
    assert_true(json_equal(given, copy)); // the caller's are as they were
    json_decref(plain);
    json_object_set_new(json_array_get(want, 0), "role", json_string("developer"));
    assert_ok(api_messages_plain(given, true, &plain)); // for a template that knows it
    assert_true(json_equal(plain, want));
    json_decref(plain);
    json_decref(copy);
}
