/* options_shared.h: rows that several of cw-trainer's option tables have in common. A table that
 * uses them defines AT(field) as offsetof(its config, field). */
#ifndef TRAINER_OPTIONS_SHARED_H
#define TRAINER_OPTIONS_SHARED_H

#define HEADING(text)                                                                              \
    {                                                                                              \
        "", OPTION_HEADING, 0, NULL, NULL, text, 0, 0, NULL                                        \
    }

// How lines of data become prompts: a struct prompt_options (prompts.h) called `prompts`.
#define PROMPT_OPTIONS                                                                             \
    {"prompt-field",                                                                               \
     OPTION_STRING,                                                                                \
     AT(prompts.prompt_field),                                                                     \
     NULL,                                                                                         \
     "NAME",                                                                                       \
     "field of a line that holds the prompt (default: prompt, messages or question)",              \
     0,                                                                                            \
     0,                                                                                            \
     NULL},                                                                                        \
        {"answer-field",                                                                           \
         OPTION_STRING,                                                                            \
         AT(prompts.answer_field),                                                                 \
         NULL,                                                                                     \
         "NAME",                                                                                   \
         "field that holds the answer (default: answer or completion)",                            \
         0,                                                                                        \
         0,                                                                                        \
         NULL},                                                                                    \
        {"chat",                                                                                   \
         OPTION_FLAG,                                                                              \
         AT(prompts.chat),                                                                         \
         NULL,                                                                                     \
         NULL,                                                                                     \
         "put text prompts into the model's chat template, as a user's message",                   \
         0,                                                                                        \
         0,                                                                                        \
         NULL},                                                                                    \
        {"chat-template",                                                                          \
         OPTION_STRING,                                                                            \
         AT(prompts.chat_template.name),                                                           \
         NULL,                                                                                     \
         "NAME",                                                                                   \
         "which of the folder's named chat templates (default: default, tool_use)",                \
         0,                                                                                        \
         0,                                                                                        \
         NULL},                                                                                    \
        {"chat-template-file",                                                                     \
         OPTION_STRING,                                                                            \
         AT(prompts.chat_template.file),                                                           \
         NULL,                                                                                     \
         "FILE",                                                                                   \
         "Jinja chat template to use instead of the folder's",                                     \
         0,                                                                                        \
         0,                                                                                        \
         NULL},                                                                                    \
        {"system-prompt",                                                                          \
         OPTION_STRING,                                                                            \
         AT(prompts.system_prompt),                                                                \
         NULL,                                                                                     \
         "TEXT",                                                                                   \
         "system message before prompts put into the chat template",                               \
         0,                                                                                        \
         0,                                                                                        \
         NULL},                                                                                    \
        {"prompt-template",                                                                        \
         OPTION_STRING,                                                                            \
         AT(prompts.prompt_template),                                                              \
         "auto",                                                                                   \
         "TEXT",                                                                                   \
         "put around text prompts, {prompt} in it; none: as they are; auto: questions for the "    \
         "reward gsm8k go into the chat template, if the model has one, with a request for the "   \
         "form of answer it reads",                                                                \
         0,                                                                                        \
         0,                                                                                        \
         NULL},                                                                                    \
    {                                                                                              \
        "max-prompt-length", OPTION_INT, AT(prompts.max_prompt_length), "0", "TOKENS",             \
            "leave out longer prompts; 0: none", 0, 1e9, NULL                                      \
    }

// For --data: a part of it.
#define MAX_SAMPLES_OPTION                                                                         \
    {                                                                                              \
        "max-samples", OPTION_INT, AT(prompts.max_samples), "0", "N",                              \
            "first N lines of --data; 0: all", 0, 1e15, NULL                                       \
    }

// What scores completions (reward.h).
#define REWARD_OPTIONS                                                                             \
    {"reward",                                                                                     \
     OPTION_STRING,                                                                                \
     AT(reward.names),                                                                             \
     "exact",                                                                                      \
     "NAME,...",                                                                                   \
     "terms of the score (listed above)",                                                          \
     0,                                                                                            \
     0,                                                                                            \
     NULL},                                                                                        \
        {"reward-weights",                                                                         \
         OPTION_STRING,                                                                            \
         AT(reward.weights),                                                                       \
         NULL,                                                                                     \
         "W,...",                                                                                  \
         "their weights (default: 1)",                                                             \
         0,                                                                                        \
         0,                                                                                        \
         NULL},                                                                                    \
        {"length-target",                                                                          \
         OPTION_DOUBLE,                                                                            \
         AT(reward.length_target),                                                                 \
         "20",                                                                                     \
         "CHARS",                                                                                  \
         "of the reward \"length\"",                                                               \
         1,                                                                                        \
         1e9,                                                                                      \
         NULL},                                                                                    \
        {"reward-pattern",                                                                         \
         OPTION_STRING,                                                                            \
         AT(reward.pattern),                                                                       \
         NULL,                                                                                     \
         "REGEX",                                                                                  \
         "of the reward \"regex\", for lines without a \"pattern\"",                               \
         0,                                                                                        \
         0,                                                                                        \
         NULL},                                                                                    \
        {"reward-timeout",                                                                         \
         OPTION_DOUBLE,                                                                            \
         AT(reward.timeout_s),                                                                     \
         "30",                                                                                     \
         "SECONDS",                                                                                \
         "longest wait for the next reply of the reward \"command\"",                              \
         0.01,                                                                                     \
         1e6,                                                                                      \
         NULL},                                                                                    \
    {                                                                                              \
        "reward-processes", OPTION_INT, AT(reward.processes), "1", "N",                            \
            "processes of each reward \"command\", among which a step's samples are divided", 1,   \
            256, NULL                                                                              \
    }

#define LOG_LEVEL_OPTION                                                                           \
    {                                                                                              \
        "log-level", OPTION_STRING, AT(log_level), "info", NULL, "what is logged", 0, 0,           \
            "error|warn|info|debug"                                                                \
    }

// What is trained, AdamW and its learning rate.
#define ADAMW_OPTIONS(peak)                                                                          \
    {"freeze",                                                                                       \
     OPTION_STRING,                                                                                  \
     AT(freeze),                                                                                     \
     NULL,                                                                                           \
     "PATTERN,...",                                                                                  \
     "tensors that are not trained: globs of their names, the last that matches decides; "           \
     "!PATTERN excepts",                                                                             \
     0,                                                                                              \
     0,                                                                                              \
     NULL},                                                                                          \
        {"learning-rate", OPTION_DOUBLE, AT(learning_rate), peak, "LR", "at its peak", 0, 10, NULL}, \
        {"lr-scheduler-type",                                                                        \
         OPTION_STRING,                                                                              \
         AT(lr_scheduler_type),                                                                      \
         "linear",                                                                                   \
         "NAME",                                                                                     \
         "after the warm-up",                                                                        \
         0,                                                                                          \
         0,                                                                                          \
         "linear|cosine|constant"},                                                                  \
        {"warmup-steps",                                                                             \
         OPTION_INT,                                                                                 \
         AT(warmup_steps),                                                                           \
         "0",                                                                                        \
         "N",                                                                                        \
         "steps from 0 to the peak",                                                                 \
         0,                                                                                          \
         1e9,                                                                                        \
         NULL},                                                                                      \
        {"adam-beta1", OPTION_DOUBLE, AT(adam_beta1), "0.9", "B", "decay of the first moment", 0,    \
         0.999999,     NULL},                                                                        \
        {"adam-beta2", OPTION_DOUBLE, AT(adam_beta2), "0.999", "B", "decay of the second moment", 0, \
         0.9999999,    NULL},                                                                        \
        {"adam-epsilon",                                                                             \
         OPTION_DOUBLE,                                                                              \
         AT(adam_epsilon),                                                                           \
         "1e-8",                                                                                     \
         "E",                                                                                        \
         "beside the root",                                                                          \
         0,                                                                                          \
         1,                                                                                          \
         NULL},                                                                                      \
        {"weight-decay",                                                                             \
         OPTION_DOUBLE,                                                                              \
         AT(weight_decay),                                                                           \
         "0",                                                                                        \
         "W",                                                                                        \
         "decoupled; of every parameter",                                                            \
         0,                                                                                          \
         10,                                                                                         \
         NULL},                                                                                      \
    {                                                                                                \
        "max-grad-norm", OPTION_DOUBLE, AT(max_grad_norm), "1", "N", "gradient clipping; 0: off",    \
            0, 1e9, NULL                                                                             \
    }

// What memory training takes, beside the size of its batches.
#define MEMORY_OPTIONS                                                                             \
    {"recompute",                                                                                  \
     OPTION_STRING,                                                                                \
     AT(recompute),                                                                                \
     "none",                                                                                       \
     "WHAT",                                                                                       \
     "layer: keep each layer's input only, and run its forward pass again before its backward",    \
     0,                                                                                            \
     0,                                                                                            \
     "none|layer"},                                                                                \
    {                                                                                              \
        "optim-moments", OPTION_STRING, AT(optim_moments), "f32", "KIND",                          \
            "of AdamW's moments: 8, 4 or 2.1 bytes a parameter", 0, 0, "f32|bf16|8bit"             \
    }

#endif
