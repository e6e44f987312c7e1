/* download.h: files of a checkpoint as the body of a response, read chunk by chunk as the client
 * takes it: one file as it is, or all of a folder as a tar archive (POSIX.1-1988 "ustar"; sizes
 * from 8 GiB on as GNU tar writes them). Loop's thread. */
#ifndef TRAINER_SERVE_DOWNLOAD_H
#define TRAINER_SERVE_DOWNLOAD_H

#include "common/http/http.h"

struct download;
// files: {"name": bytes}, below the folder. file: one of them, or "", all as an archive; else
// ST_NOT_FOUND. ret_bytes: of the whole response.
enum status download_new(const char *folder, const json_t *files, const char *file,
                         struct download **ret, int64_t *ret_bytes);
void download_free(struct download *d); // NULL is fine
// The next chunk. STREAM_FAIL where a file is not there any more, also because the folder was put
// in the place of another since download_new(), or is not as long as it was; the sentence says
// which.
enum stream_state download_next(struct download *d, struct bytes *to);

// Signatures stand for a key in a URL: who was given one by this process may fetch what it is of,
// until the time that it names. A keyed hash, of which nothing is kept. Any thread.
struct signing_key {
    unsigned char bytes[32];
};
enum status signing_key_new(struct signing_key *ret); // of this process alone

#define SIGNATURE_ROOM 96 // bytes of a signature, with its end
// "EXPIRES-DIGITS" of that name. expires_s: seconds since 1970.
void signature_text(const struct signing_key *key, const char *name, int64_t expires_s,
                    char ret[SIGNATURE_ROOM]);
// Compares what a client gave with the one that was wanted, in a time that does not depend on where
// they differ.
bool signature_is(const char *given, const char *wanted);

#endif
