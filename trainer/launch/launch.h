/* launch.h: the ranks of one training run: which one this process is, or that it is to start them;
 * the server of its own GPU, or that of several ranks, which hold its model in shards; and their
 * meeting (docs/use/launch.md). Main thread.
 *
 * Whoever starts the ranks (this program, mpirun, srun, torchrun), the rest is the same: each takes
 * the GPU of --gpus that its local rank says, uses the server that runs for it or starts
 * one, and meets the others. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TRAINER_LAUNCH_H
#define TRAINER_LAUNCH_H

#include "common/base/file.h"
#include "common/ranks/ranks.h"

#define LAUNCH_GPUS 64 // of a host

struct liveness;
struct server_process;

struct launch_options {
    const char *gpus; // "0,1"
    int64_t ranks;    // 0: as many as there are GPUs, or as who starts them says
    int64_t rank;     // -1: nobody says so here
    int64_t nnodes, node_rank;
    int64_t shards; // of a server's model
    const char *rendezvous, *rendezvous_token_file;
    double rendezvous_timeout, rank_timeout;
    const char *server_args;
};
// Of every command that trains. gpus_help: of --gpus.
#define RANK_OPTIONS(gpus_help)                                                                    \
    OPT_TEXT("gpus", launch.gpus, NULL, "N,N,...", gpus_help, IS_COMMON),                          \
        OPT_INT("ranks", launch.ranks, "0", "N", 0, RANKS_MAX,                                     \
                "ranks in all; without --gpus they compute on the CPU, started with mpirun"),      \
        OPT_INT("rank", launch.rank, "-1", "R", -1, RANKS_MAX - 1,                                 \
                "which of them this process is (default: as mpirun, srun or torchrun say)"),       \
        OPT_INT("nnodes", launch.nnodes, "1", "N", 1, RANKS_MAX,                                   \
                "hosts that --gpus is given on, each with as many"),                               \
        OPT_INT("node-rank", launch.node_rank, "0", "K", 0, RANKS_MAX - 1,                         \
                "which of them this is, from 0 on"),                                               \
        OPT_TEXT("rendezvous", launch.rendezvous, NULL, "tcp://HOST:PORT|file://PATH",             \
                 "where ranks of several hosts meet: an address of rank 0, or a file that all "    \
                 "hosts see"),                                                                     \
        OPT_TEXT("rendezvous-token-file", launch.rendezvous_token_file, NULL, "FILE",              \
                 "its first line is the word by which ranks know one another; needed with a "      \
                 "tcp:// that is not loopback"),                                                   \
        OPT_DOUBLE("rendezvous-timeout", launch.rendezvous_timeout, "600", "SECONDS", 0.1, 1e6,    \
                   "longest wait for all ranks"),                                                  \
        OPT_DOUBLE("rank-timeout", launch.rank_timeout, "3600", "SECONDS", 0.1, 1e6,               \
                   "longest wait of a rank for the others, where several train together: as long " \
                   "as one may be ahead of another (docs/use/scaling.md)")
// Of those that have servers.
#define LAUNCH_OPTIONS                                                                             \
    RANK_OPTIONS("this host's GPUs, a rank each, with a server each, which is started where none " \
                 "runs (--model)"),                                                                \
        OPT_INT("tensor-parallel-size", launch.shards, "1", "N", 1, LAUNCH_GPUS,                   \
                "processes that share a server's model, each with a shard of it and a GPU of "     \
                "--gpus: so many ranks have one server",                                           \
                EXCLUDES_WHEN(">1", "bridge&servers that are started (--gpus, --ranks)",           \
                              "it is of a server that is started, --bridge names one that runs")), \
        OPT_TEXT("server-args", launch.server_args, NULL, "\"--OPTION ...\"",                      \
                 "further options of the servers that are started",                                \
                 NEEDS("servers that are started (--gpus, --ranks)|sync=checkpoint",               \
                       "they are of a server that is started here"),                               \
                 EXCLUDES("bridge",                                                                \
                          "they are of a server that is started, --bridge names one that runs"))

struct launch {
    const struct launch_options *options;
    struct ranks ranks;
    bool launches; // it is not a rank itself, but starts those of this host
    bool serves;   // a rank that has a server of its own
    int gpus[LAUNCH_GPUS];
    int n_gpus;                    // 0: the CPU
    int n_shards;                  // ranks that have one server
    char log_name[48];             // "cw-trainer", with the rank of several
    struct server_process *server; // that was started here, the caller's to free; NULL: none was
    char folder[PATH_ROOM], bridge[PATH_ROOM]; // of this rank's server; "" before it is opened
};

// Who this is. ST_INVALID where options contradict one another, or the environment.
enum status launch_find(const struct launch_options *options, struct launch *ret);
// The device of this rank, as device_open() takes it: `given`, but of a rank with a GPU of its own
// that one, and of others on the CPU "cpu".
#define LAUNCH_DEVICE_ROOM 16
const char *launch_device(const struct launch *launch, const char *given,
                          char room[LAUNCH_DEVICE_ROOM]);
// Starts the ranks of this host with this program's own command line, and waits for their end.
enum status launch_ranks(struct launch *launch, char **argv);

// The server of this rank (launch->serves): the one that runs for its GPU, or one of a model folder
// that is started; model NULL: it must run. launch->bridge is its bridge file. Of ranks that share
// a server, neighbours, it is that of the first one's GPU, who starts it.
enum status launch_open_server(struct launch *launch, const char *model, double timeout_s);

// All ranks meet, and watch over one another from then on. layout: of the weights that each has,
// which must be the same. bytes: rank 0's for all. Of one rank: NULL.
enum status launch_meet(const struct launch *launch, const char *layout, struct bytes *bytes,
                        struct liveness **ret);
// Of a rank that fails before they have: the others of its run end at once, with its sentence, but
// for those that meet at tcp://. This thread's sentence stays.
void launch_give_up(const struct launch *launch, enum status why);

#endif
