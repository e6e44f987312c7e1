"""Constraints against reference programs: constraint_check.py LIBRARY VOCABULARY WHAT COUNT

LIBRARY is libcommonweight-tests.so, VOCABULARY the folder of a tokenizer with a token for each byte
whose id is the byte; the end is token 300. WHAT is
  samples    of a random model that ends by stop are valid, at least nine of ten that are begun
  documents  that are valid are taken, and the masks at each byte allow what comes next
  xgrammar, llguidance
             masks at each byte of documents against theirs: bytes that only one of both allows are
             followed to an end and shown to jsonschema: what is allowed here must be valid
Prints what it counted; exit status 1 and the first of what is wrong.
"""

import collections
import ctypes
import json
import random
import sys

import jsonschema

from constraint_schemas import document, schemas

END, VOCAB, LONGEST = 300, 320, 2000


class Engine:
    def __init__(self, library, folder):
        self.lib = ctypes.CDLL(library)
        self.lib.status_message.restype = ctypes.c_char_p
        self.jansson = ctypes.CDLL("libjansson.so.4")
        self.jansson.json_loads.restype = ctypes.c_void_p
        self.jansson.json_loads.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p]
        tokenizer, self.all = ctypes.c_void_p(), ctypes.c_void_p()
        self.check(self.lib.tokenizer_load(folder.encode(), ctypes.byref(tokenizer)))
        ends = (ctypes.c_int * 1)(END)
        self.check(self.lib.constraints_new(tokenizer, VOCAB, ends, 1, ctypes.byref(self.all)))

    def check(self, status):
        if status:
            sys.exit(self.lib.status_message().decode())

    def constraint(self, schema):
        spec = json.dumps({"json_schema": schema}).encode()
        ret = ctypes.c_void_p()
        parsed = ctypes.c_void_p(self.jansson.json_loads(spec, 0, None))
        self.check(self.lib.constraints_get(self.all, parsed, ctypes.byref(ret)))
        return ret

    def release(self, constraint):
        self.lib.constraint_release(constraint)

    def mask(self, constraint, state):
        ret = (ctypes.c_uint32 * (VOCAB // 32))()
        self.check(self.lib.constraint_mask(constraint, state, ret))
        bits = int.from_bytes(bytes(ret), "little")
        return [token for token in range(VOCAB) if bits >> token & 1]

    def next(self, constraint, state, token):
        ret = ctypes.c_int()
        self.check(self.lib.constraint_next(constraint, state, token, ctypes.byref(ret)))
        return ret.value


def is_valid(schema, text):
    try:
        value = json.loads(text)
    except ValueError:
        return False
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    return jsonschema.Draft202012Validator(schema, format_checker=checker).is_valid(value)


def sample(engine, constraint, r, state=0):
    """Bytes up to an end, each token as likely as any other; None: no end within LONGEST tokens."""
    text = bytearray()
    for _ in range(LONGEST):
        allowed = engine.mask(constraint, state)
        token = r.choice(allowed)
        if token == END:
            return bytes(text)
        text.append(token)
        state = engine.next(constraint, state, token)
    return None


def samples(engine, count):
    r = random.Random(1)
    all_schemas, ended = schemas(), 0
    for i in range(count):
        schema = all_schemas[i % len(all_schemas)]
        constraint = engine.constraint(schema)
        text = sample(engine, constraint, r)
        engine.release(constraint)
        if text is None:
            continue
        ended += 1
        if not is_valid(schema, text):
            sys.exit(f"{json.dumps(schema)}\ntakes {text}")
    print(f"{ended} of {count} samples ended by stop, all valid")
    if ended < 0.9 * count:
        sys.exit("fewer than nine of ten")


def documents(engine, count):
    r = random.Random(2)
    all_schemas = schemas()
    for i in range(count):
        schema = all_schemas[i % len(all_schemas)]
        text = document(r, schema)
        assert is_valid(schema, text), (schema, text)
        constraint, state = engine.constraint(schema), 0
        for at, token in enumerate(list(text.encode()) + [END]):
            if token not in engine.mask(constraint, state):
                sys.exit(f"{json.dumps(schema)}\nrules out byte {at} of {text}")
            state = engine.next(constraint, state, token)
        engine.release(constraint)
    print(f"{count} valid documents, none ruled out at any byte")


class XGrammar:
    def __init__(self, schema):
        import torch  # xgrammar's masks are tensors
        import xgrammar
        vocabulary = [bytes([byte]) for byte in range(256)] + [b"</s>"]
        info = xgrammar.TokenizerInfo(vocabulary, vocab_type=xgrammar.VocabType.RAW,
                                      vocab_size=257, stop_token_ids=[256])
        compiled = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(schema))
        self.matcher = xgrammar.GrammarMatcher(compiled)
        self.bits = xgrammar.allocate_token_bitmask(1, 257)

    def allowed(self):
        self.matcher.fill_next_token_bitmask(self.bits)
        words = [word & 0xffffffff for word in self.bits[0].tolist()]
        return {END if t == 256 else t for t in range(257) if words[t // 32] >> t % 32 & 1}

    def accept(self, byte):
        return self.matcher.accept_token(byte)

    def fork(self):
        return self.matcher.fork()


class LLGuidance:
    def __init__(self, schema):
        import llguidance
        import llguidance.numpy
        self.module = llguidance
        self.tokenizer = llguidance.LLTokenizer("byte")
        grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
        self.matcher = llguidance.LLMatcher(self.tokenizer, grammar)
        if self.matcher.get_error():
            raise RuntimeError(self.matcher.get_error())
        self.bits = llguidance.numpy.allocate_token_bitmask(1, self.tokenizer.vocab_size)

    def allowed(self):
        self.module.numpy.fill_next_token_bitmask(self.matcher, self.bits, 0)
        words = [word & 0xffffffff for word in self.bits[0].tolist()]
        n, end = self.tokenizer.vocab_size, self.tokenizer.eos_token
        some = {t for t in range(n) if words[t // 32] >> t % 32 & 1}
        return {t for t in some if t < 256} | ({END} if end in some else set())

    def accept(self, byte):
        return self.matcher.consume_token(byte)


def follow_theirs(oracle, schema, prefix, r):
    """A text of the oracle's that begins so, or None."""
    other = oracle(schema)
    text = bytearray()
    for byte in prefix:
        if not other.accept(byte):
            return None
        text.append(byte)
    for _ in range(400):
        allowed = other.allowed()
        if END in allowed or not allowed:
            return bytes(text) if allowed else None
        quick = [byte for byte in b'"}],:0' if byte in allowed] or sorted(allowed)
        byte = r.choice(quick)
        if not other.accept(byte):
            return None
        text.append(byte)
    return None


def follow_ours(engine, constraint, state, prefix, r):
    text = bytearray(prefix)
    for _ in range(400):
        allowed = engine.mask(constraint, state)
        if END in allowed:
            return bytes(text)
        quick = [byte for byte in b'"}],:0' if byte in allowed] or allowed
        byte = r.choice(quick)
        text.append(byte)
        state = engine.next(constraint, state, byte)
    return None


def against(engine, count, oracle):
    """Masks that differ: what only we allow must be valid once it is ended. What only they allow is
    counted: as invalid, or as valid, which are forms that constraint.h's languages leave out."""
    r = random.Random(3)
    counts = collections.Counter()
    all_schemas, shown = schemas(), set()
    for i in range(count):
        schema = all_schemas[i % len(all_schemas)]
        text = document(r, schema).encode()
        try:
            other = oracle(schema)
        except RuntimeError as error:
            counts["schemas that they refuse"] += 1
            print(f"refused: {str(error)[:100]}")
            continue
        constraint, state = engine.constraint(schema), 0
        for at, token in enumerate(list(text) + [END]):
            ours, theirs = set(engine.mask(constraint, state)), other.allowed()
            counts["equal masks" if ours == theirs else "other masks"] += 1
            for byte in sorted(ours - theirs)[:2]:
                ended = text[:at] if byte == END else follow_ours(
                    engine, constraint, engine.next(constraint, state, byte),
                    text[:at] + bytes([byte]), r)
                if ended is None:
                    continue
                if not is_valid(schema, ended):
                    sys.exit(f"{json.dumps(schema)}\ntakes {ended}")
                counts["ours alone, valid"] += 1
            for byte in sorted(theirs - ours)[:1]:
                ended = text[:at] if byte == END else follow_theirs(
                    oracle, schema, text[:at] + bytes([byte]), r)
                if ended is None:
                    counts["theirs alone, without an end"] += 1
                    continue
                kind = "valid" if is_valid(schema, ended) else "invalid"
                counts[f"theirs alone, {kind}"] += 1
                if (kind, chr(byte % 256)) not in shown and len(shown) < 12:
                    shown.add((kind, chr(byte % 256)))
                    print(f"theirs alone, {kind}: {ended[:at]} then {ended[at:at + 20]}")
            if token == END or not other.accept(token):
                counts["documents that they rule out"] += token != END
                break
            state = engine.next(constraint, state, token)
        engine.release(constraint)
    print(", ".join(f"{name}: {n}" for name, n in sorted(counts.items())))


def main():
    library, folder, what, count = sys.argv[1:]
    engine, count = Engine(library, folder), int(count)
    if what == "samples":
        samples(engine, count)
    elif what == "documents":
        documents(engine, count)
    else:
        against(engine, count, {"xgrammar": XGrammar, "llguidance": LLGuidance}[what])


main()
