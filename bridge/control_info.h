/* control_info.h: what the control page says, as plain values. */
// SPDX-License-Identifier: Apache-2.0
#ifndef BRIDGE_CONTROL_INFO_H
#define BRIDGE_CONTROL_INFO_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#define CONTROL_ROLE_BYTES 64 // the bridge file's names of roles: "policy", "draft", "adapter:NAME"
#define CONTROL_ROLES      65 // that have such an account: the policy, with its draft, and adapters

struct control_info { // a consistent copy for /bridge/info and cw-ipc-check
    uint64_t version, publishes;
    pid_t owner_pid, writer_pid; // writer 0: none
    double owner_heartbeat_age_ms, writer_heartbeat_age_ms;
    bool owner_alive, writer_alive, quiesce_requested, quiesce_granted, torn, ended;
    double last_wait_ms;  // request to grant
    double last_write_ms; // version odd
    double last_pause_ms; // grant to resume seen by the engine: what generation lost
    char layout_hash[65], snapshot[512];
    char loaded[512]; // folder that the owner was started with, or reloaded last
    // What the weights of a role are; "" and 0 while the version is odd. `updates` of writers since
    // they were exactly those of `origin` ("": since the adapter was made), the last run_updates of
    // them by `run` ("": an unnamed writer).
    char origin[512], run[512];
    uint64_t updates, run_updates;
    // Since this version the policy's weights are as they are: later ones changed other roles, or
    // nothing. 0 while the version is odd.
    uint64_t policy_version;
};

#endif
