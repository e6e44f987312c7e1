/* copies.h: the source whose servers hold copies of the weights that learn, and are brought new
 * ones between steps: further servers beside one that shares the weights (--workers); and with
 * --sync checkpoint, where none shares them, a server that is started anew on them, or one
 * elsewhere
 * (--server-url). */
#ifndef TRAINER_COPIES_H
#define TRAINER_COPIES_H

#include "bridge/bridge_file.h"
#include "common/base/file.h"
#include "trainer/launch/server_process.h"
#include "trainer/rollout/source.h"

struct copies_options { // borrowed
    // Further servers: bridge files and http://HOST:PORT, with commas between them; before them one
    // that evaluations go to. NULL, "": none.
    const char *workers, *server_url;
    const char *api_key_file; // that they are shown; NULL: none
    int rank, n_ranks;        // each of several ranks asks every n_ranks-th of them
    const char *shared;       // the server that shares the weights, which is none of them; or NULL
    // what they must serve
    const struct bridge_role *policy;
    const char *model_folder;
    // The server that is started, by each rank; NULL: none is.
    struct server_process *server;
    const char *socket; // of it, if it takes adapters there
    bool completions;   // it has no POST /v1/rollouts
    // What they load: rank 0 writes it, and all ranks come to this. ret_folder: absolute.
    enum status (*write)(void *context, char ret_folder[PATH_ROOM]);
    // The server that is started serves for the first time.
    enum status (*started)(void *context);
    void *context;
    const char
        *adapter;      // what is written is an adapter of that name, of model_folder; NULL: a model
    const char *draft; // folder in what is written, of a draft model that is trained; NULL: none is
    const char *other_draft; // of the server that is started, where none is
};
// The servers are added to these, which are borrowed; all must be there, or the error names one.
enum status copies_new(const struct copies_options *options, struct rollout_servers *servers,
                       struct source **ret);

#endif
