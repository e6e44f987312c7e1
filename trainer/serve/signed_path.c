/* signed_path.c: HMAC-SHA256 of the time and the name. No state but the caller's key. */
#include "trainer/serve/signed_path.h"
#include "common/base/hash.h"

#include <inttypes.h>
#include <openssl/crypto.h>
#include <openssl/hmac.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>

enum status signing_key_new(struct signing_key *ret)
{
    if (getrandom(ret->bytes, sizeof ret->bytes, 0) == sizeof ret->bytes) return ST_OK;
    return status_fail(ST_IO, "the system has no random numbers to sign URLs by");
}

void signature_text(const struct signing_key *key, const char *name, int64_t expires_s,
                    char ret[SIGNATURE_ROOM])
{
    unsigned char name_hash[HASH_SHA256_BYTES], text[sizeof expires_s + sizeof name_hash],
        digest[EVP_MAX_MD_SIZE] = {0};
    hash_sha256(name, strlen(name), name_hash);
    memcpy(text, &expires_s, sizeof expires_s);
    memcpy(text + sizeof expires_s, name_hash, sizeof name_hash);
    HMAC(EVP_sha256(), key->bytes, sizeof key->bytes, text, sizeof text, digest, NULL);
    int n = snprintf(ret, SIGNATURE_ROOM, "%" PRId64 "-", expires_s);
    for (int i = 0; i < HASH_SHA256_BYTES; i++, n += 2) snprintf(ret + n, 3, "%02x", digest[i]);
}

bool signature_is(const char *given, const char *wanted)
{
    const size_t n = strlen(wanted);
    return strlen(given) == n && CRYPTO_memcmp(given, wanted, n) == 0;
}
