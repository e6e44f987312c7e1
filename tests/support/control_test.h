/* control_test.h: a control page between real processes, for tests: the test is the owner (the
 * engine), forked children are writers. Failures fail the running test; in a child they end it. One
 * thread. */
// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_SUPPORT_CONTROL_TEST_H
#define TESTS_SUPPORT_CONTROL_TEST_H

#include "bridge/control.h"
#include "tests/support/support.h"

#define CONTROL_TEST_HASH "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
#define CONTROL_TEST_MS   10000 // for what should happen soon
#define CONTROL_TEST_NAME 64

extern char control_test_page[CONTROL_TEST_NAME]; // the name of this test's page

struct control *control_test_owner(void); // a new page, version 2
void control_test_end(struct control *c);
pid_t control_test_fork(void);      // as fork(); a child that outlives the test is killed with it
void control_test_dead(pid_t pid);  // waits until it is dead, and leaves a zombie
int control_test_status(pid_t pid); // waits; 128 + the signal that killed it
struct control *control_test_writer(void); // in a child: the lease taken
// The engine's loop until something happened; what ends an update counts.
enum control_event control_test_event(struct control *c);

#endif
