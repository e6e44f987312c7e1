/* engine_thread.h: the engine's state, as its files share it: engine.c, which other threads call,
 * engine_start.c, engine_thread.c, the thread, commands.c and weight_updates.c. Private to these.
 */
// SPDX-License-Identifier: Apache-2.0
#ifndef INFER_SERVER_ENGINE_THREAD_H
#define INFER_SERVER_ENGINE_THREAD_H

#include "common/model/config.h"
#include "infer-server/engine/engine.h"
#include "infer-server/engine/executor.h"
#include "infer-server/engine/request.h"
#include "infer-server/weights/weights_owner.h"
#include <pthread.h>
#include <stdatomic.h>

enum command_kind { COMMAND_RELOAD, COMMAND_LOAD_ADAPTER, COMMAND_UNLOAD_ADAPTER, COMMAND_INFO };
struct command {
    enum command_kind kind;
    struct command *next;
    void *context;
    // Of the adapters' commands; its folder is RELOAD's too. The texts are owned.
    struct adapter_request order;
    const char *draft_folder; // likewise, of RELOAD; NULL where it stays
    pid_t writer; // of unloading: the trainer that asks for it, which has it mapped no more; or 0
    engine_done_fn done;
    bool checksums; // INFO
    void (*info_done)(void *context, const struct engine_bridge_info *);
};

struct engine {
    struct engine_options options; // with defaults filled in
    engine_event_fn on_event;
    void *context;
    struct model_config *configs[RUNNERS]; // NULL where there is none, but for the policy's
    pthread_t thread;

    pthread_mutex_t lock;
    pthread_cond_t
        changed; // opened, paused, failed; and the doorbell while there is no control page
    bool opened; // the device is open, or open_status says why not
    struct status_kept open_status;
    struct engine_stats stats; // snapshot
    struct request *inbox, **inbox_end;
    int n_inside;             // samples accepted and not ended
    _Atomic uint64_t n_salts; // given to requests that are to share nothing
    struct command *commands, **commands_end;
    bool pause_wanted, paused, stopping;
    uint64_t resumes; // so that who waits for a pause learns that it was called off
    int64_t stop_deadline_ns;
    struct weights_owner *owner; // NULL while loading
    int max_context;             // 0 while loading
    int n_adapters;
    struct adapter_info adapter_list[ADAPTERS_MAX];
    _Atomic bool cancels; // some sample's cancel flag was set

    // the thread's
    struct device *dev;
    struct group *group; // NULL: one rank
    struct executor *executor;
    struct engine_stats live;
    bool draining; // the trainer waits for what is in flight to end
    int64_t last_heartbeat_ns, last_check_ns;
};

#define ENGINE_IDLE_MS 100 // longest sleep: heartbeat, dead writers

void *engine_thread(void *engine); // for pthread_create()

// The thread's. A failed engine ends everything in it and stays (engine_thread.c).
void engine_publish(struct engine *e); // the live statistics to other threads
// Collects what is on its way; a device that fails there is engine_fail()'s.
void engine_settle(struct engine *e);
void engine_set_state(struct engine *e, enum engine_state state, const char *detail);
void engine_fail(struct engine *e, const char *message);

// weight_updates.c: lets the trainer write if it asked, and looks after one that is gone.
void engine_serve_writer(struct engine *e);
void engine_reload_weights(struct engine *e, const struct command *c);

// What other threads know of an adapter; NULL where it is none, or gone. Under the lock.
struct adapter_info *engine_adapter(struct engine *e, const struct adapter_ref *ref);
void engine_wake(struct engine *e); // from whatever its thread sleeps on. Under the lock.
// Whether it can be asked for anything. Under the lock.
enum status engine_check_state(const struct engine *e);
// commands.c
void engine_run_commands(struct engine *e); // those that are queued, and a pause
void engine_free_retired(struct engine *e); // unloaded adapters that no sample needs any more
void engine_take_version(struct engine *e, bool recompute); // of weights that changed

// engine_start.c. Fills in the defaults; ST_INVALID names the option. Any thread.
enum status engine_check_options(struct engine_options *options);
enum status engine_open_device(struct engine *e); // the thread's, as all that follows
enum status engine_load(struct engine *e);
void engine_on_event(void *engine, const struct engine_event *event); // the executor's

#endif
