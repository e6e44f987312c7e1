/* sampling.h: samples from the server, by /v1/rollouts on its Unix socket: a thread of its own that
 * sends what was asked for and hands over what came back, thousands at once over few connections.
 *
 * Samples that are sampled alike (temperature, length, stops) and wait at the same time go as one
 * request of many groups. What is refused as a whole is sent again one by one, so that one bad
 * request fails no other. */
#ifndef TRAINER_SERVE_SAMPLING_H
#define TRAINER_SERVE_SAMPLING_H

#include "trainer/serve/sample_request.h"

struct sampling;
// socket: the server's; timeout_s: of a request. inbox: where all requests end.
enum status sampling_new(const char *socket, double timeout_s, struct inbox *inbox,
                         struct sampling **ret);
// Ends the thread; what is under way comes back cancelled. NULL is fine.
void sampling_free(struct sampling *s);
void sampling_send(struct sampling *s, struct sample_request *r); // any thread

#endif
