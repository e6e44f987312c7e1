"""Constraints against reference programs: constraint_check.py LIBRARY VOCABULARY WHAT COUNT

LIBRARY is libcommonweight-tests.so, VOCABULARY the folder of a tokenizer with a token for each byte
whose id is the byte; the end is token 300. WHAT is
  samples    of a random model that ends by stop are valid, at least nine of ten that are begun
  documents  that are valid are taken, and the masks at each byte allow what comes next
  xgrammar, llguidance
             masks at each byte of documents against theirs: bytes that only one of both allows are
             followed to an end and shown to jsonschema: what is allowed here must be valid; what is
             valid and allowed by both of them must be taken here, if in another form: members in
             the schema's order, integers without a fraction, other white space
Prints what it counted; exit status 1 and the first of what is wrong.
"""

import collections
import ctypes
import datetime
import importlib.util
import json
import random
import re
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


def is_date(text):
    datetime.date.fromisoformat(text)
    return re.fullmatch(r"\d{4}-\d\d-\d\d", text, re.ASCII) is not None


def is_time(text):
    """As RFC 3339 has it, leap seconds where UTC has them."""
    found = re.fullmatch(r"(\d\d):(\d\d):(\d\d)(\.\d+)?([Zz]|([+-])(\d\d):(\d\d))", text, re.ASCII)
    if not found:
        return False
    hour, minute, second, zone_hour, zone_minute = (int(found[i] or 0) for i in (1, 2, 3, 7, 8))
    offset = (zone_hour * 60 + zone_minute) * (-1 if found[6] == "-" else 1)
    is_leap = second == 60 and (hour * 60 + minute - offset) % 1440 == 1439
    return max(hour, zone_hour) < 24 and max(minute, zone_minute) < 60 and (second < 60 or is_leap)


def is_date_time(text):
    return text[10:11] in ("T", "t") and is_date(text[:10]) and is_time(text[11:])


checker = jsonschema.FormatChecker()
for name, check in (("date", is_date), ("time", is_time), ("date-time", is_date_time)):
    checker.checks(name, ValueError)(lambda value, check=check: not isinstance(value, str)
                                     or check(value))


def is_valid(schema, text):
    try:
        value = json.loads(text)
    except ValueError:
        return False
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


def admits(oracle, schema, text):
    try:
        other = oracle(schema)
    except RuntimeError:
        return False
    return all(other.accept(byte) for byte in text) and END in other.allowed()


class Forms:
    """Whether a value is taken in some form: each member that may come next is tried."""

    def __init__(self, engine, constraint):
        self.engine, self.constraint = engine, constraint

    def feed(self, state, text):
        for byte in text.encode():
            if state < 0:
                break
            state = self.engine.next(self.constraint, state, byte)
        return state

    def scalar(self, value):
        yield json.dumps(value, ensure_ascii=False)
        if isinstance(value, float) and value == int(value):
            yield str(int(value))
        if isinstance(value, str):  # leap seconds are taken at 23:59:60Z alone
            yield json.dumps(re.sub(r":60(?=[.Zz+-])", ":59", value))

    def items(self, state, left, first, end):
        """Behind what is left of a list's items, or an object's, in any order."""
        for i, (name, value) in enumerate(left):
            begin = ("" if first else ",") + ("" if name is None else json.dumps(name) + ":")
            behind = self.value(self.feed(state, begin), value)
            if behind >= 0:
                behind = self.items(behind, left[:i] + left[i + 1:], False, end)
            if behind >= 0 or name is None:
                return behind
        return self.feed(state, end) if not left else -1

    def value(self, state, value):
        if state < 0:
            return state
        if isinstance(value, dict):
            return self.items(self.feed(state, "{"), list(value.items()), True, "}")
        if isinstance(value, list):
            return self.items(self.feed(state, "["), [(None, one) for one in value], True, "]")
        return max(self.feed(state, text) for text in self.scalar(value))

    def takes(self, value):
        state = self.value(0, value)
        return state >= 0 and self.engine.next(self.constraint, state, END) >= 0


def against(engine, count, oracle, oracles):
    """Masks that differ: what only we allow must be valid once it is ended. What only they allow is
    counted as invalid or valid; what is valid, and taken by all of two or more, must be taken."""
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
                if (kind == "valid" and len(oracles) > 1 and
                        all(admits(each, schema, ended) for each in oracles) and
                        not Forms(engine, constraint).takes(json.loads(ended))):
                    sys.exit(f"{json.dumps(schema)}\nrules out {ended}")
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
        oracles = {"xgrammar": XGrammar, "llguidance": LLGuidance}
        against(engine, count, oracles[what],
                [each for name, each in oracles.items() if importlib.util.find_spec(name)])


main()
