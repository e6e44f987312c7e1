/* hash.c: SHA-256 through OpenSSL. No state; any thread. */
// SPDX-License-Identifier: Apache-2.0
#include "common/base/hash.h"

#include <openssl/evp.h>
#include <stdio.h>
#include <string.h>

void hash_sha256(const void *data, size_t len, unsigned char ret[HASH_SHA256_BYTES])
{
    memset(ret, 0, HASH_SHA256_BYTES);
    EVP_Digest(data, len, ret, NULL, EVP_sha256(), NULL);
}

void hash_sha256_hex(const void *data, size_t len, int n, char *ret)
{
    unsigned char digest[HASH_SHA256_BYTES];
    hash_sha256(data, len, digest);
    for (int i = 0; i < n; i++) snprintf(ret + 2 * i, 3, "%02x", digest[i]);
}
