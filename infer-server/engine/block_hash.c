/* block_hash.c: the chain of hashes over a sequence's KV blocks. No state; any thread.
 *
 * SHA-256 cut to 128 bits, since a hit is trusted without comparing tokens: a request that found
 * another text's blocks would answer from them. To hit the blocks of somebody else's prompt without
 * knowing it takes a second preimage, 2^128 tries. The 2^64 of a collision buy only two prompts of
 * one's own that are taken for each other. */
#include "infer-server/engine/block_hash.h"
#include <openssl/evp.h>
#include <string.h>

bool block_hash_chain(const struct block_hash *before, const int32_t *tokens, int block_size, int n,
                      struct block_hash *ret_hashes)
{
    const EVP_MD *sha256 = EVP_sha256();
    EVP_MD_CTX *context = EVP_MD_CTX_new();
    bool ok = context != NULL;
    for (int i = 0; i < n && ok; i++) {
        unsigned char digest[EVP_MAX_MD_SIZE];
        // The method is looked up once: for blocks of 16 tokens that takes longer than the hash.
        ok = EVP_DigestInit_ex(context, i == 0 ? sha256 : NULL, NULL) &&
             EVP_DigestUpdate(context, before, sizeof *before) &&
             EVP_DigestUpdate(context, tokens, (size_t)block_size * sizeof *tokens) &&
             EVP_DigestFinal_ex(context, digest, NULL);
        if (!ok) break;
        memcpy(&ret_hashes[i], digest, sizeof *ret_hashes);
        before = &ret_hashes[i];
        tokens += block_size;
    }
    EVP_MD_CTX_free(context);
    return ok;
}
