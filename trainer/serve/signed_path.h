/* signed_path.h: signatures that stand for a key in a path: who was given one by this process may
 * fetch what it is of, until the time that it names. A keyed hash, of which nothing is kept. Any
 * thread. */
#ifndef TRAINER_SERVE_SIGNED_PATH_H
#define TRAINER_SERVE_SIGNED_PATH_H

#include "common/base/status.h"
#include <stdbool.h>
#include <stdint.h>

struct signing_key {
    unsigned char bytes[32];
};
enum status signing_key_new(struct signing_key *ret); // of this process alone

#define SIGNATURE_ROOM 96 // bytes of a signature, with its end
// "EXPIRES-DIGITS" of that name. expires_s: seconds since 1970.
void signature_text(const struct signing_key *key, const char *name, int64_t expires_s,
                    char ret[SIGNATURE_ROOM]);
// Whether what a client gave is the one that was wanted, in a time that does not tell where not.
bool signature_is(const char *given, const char *wanted);

#endif
