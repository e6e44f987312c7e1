# Commonweight. `make help` lists the targets; variables are at the top of each part.
#
#   make CUDA=0                       CPU only (found by itself: CUDA=1 where nvcc is on the PATH)
#   make SANITIZE=address,undefined test
#   make CUDA_ARCHS="80 90"           GPU architectures to build for
#   make ARCH=x86-64-v3               CPU instruction set (default: this machine's)

SHELL      := /bin/bash
CC         ?= gcc
NVCC       ?= nvcc
CUDA       ?= $(if $(shell command -v $(NVCC) 2>/dev/null),1,0)
CUDA_ARCHS ?= 80 90
ARCH       ?= native
SANITIZE   ?=
DEVICE     ?= auto
PREFIX     ?= /usr/local
BUILD      ?= build$(if $(SANITIZE),-sanitize)

.DEFAULT_GOAL := all
DEPS_OK := $(shell tools/install-deps >&2 && echo yes)
ifneq ($(DEPS_OK),yes)
$(error missing packages could not be installed; see the lines above)
endif

PKGS     := libuv jansson libmicrohttpd libcurl libcrypto libpcre2-8 libutf8proc libsystemd
BLAS     := $(shell pkg-config --libs openblas 2>/dev/null || echo -lopenblas)
CFLAGS   ?= -O2 -g
CFLAGS_  := -std=gnu11 -march=$(ARCH) -fno-math-errno -fopenmp -pthread -Wall -Wextra -Wshadow -Wstrict-prototypes \
            -Wmissing-prototypes -Wpointer-arith -Wvla -Wundef -Werror $(CFLAGS) \
            $(if $(SANITIZE),-fsanitize=$(SANITIZE) -fno-omit-frame-pointer -fno-sanitize-recover=all)
CPPFLAGS_ := -I. -D_GNU_SOURCE -DCW_CUDA=$(CUDA) $(shell pkg-config --cflags $(PKGS) openblas)
LDLIBS_  := $(shell pkg-config --libs $(PKGS)) $(BLAS) -lm -ldl -lrt
LDFLAGS_ := -fopenmp -pthread $(if $(SANITIZE),-fsanitize=$(SANITIZE))

# ---- sources: a file in its folder is in the build ----------------------------------------------
LIB_SRC     := $(wildcard common/*/*.c kernels/*.c kernels/cpu/*.c bridge/*.c)
SERVER_SRC  := $(wildcard infer-server/*/*.c)
TRAINER_SRC := $(filter-out trainer/main.c,$(wildcard trainer/*.c $(addsuffix /*.c,trainer/run trainer/rollout trainer/learn)))
CUDA_SRC    := $(if $(filter 1,$(CUDA)),$(wildcard kernels/cuda/*.cu))
REPORT_SRC  := $(filter-out tools/report/main.c,$(wildcard tools/report/*.c))
BENCH_SRC   := $(wildcard tools/bench/*.c)
WORDS_SRC   := $(wildcard tools/word-problems/*.c)
TOOLS       := $(patsubst tools/%.c,$(BUILD)/cw-%,$(wildcard tools/*.c)) \
               $(patsubst tools/%/main.c,$(BUILD)/cw-%,$(wildcard tools/*/main.c))
BINARIES    := $(BUILD)/cw-infer-server $(BUILD)/cw-trainer $(TOOLS)
TEST_SUPPORT := $(wildcard tests/support/*.c) $(if $(filter 1,$(CUDA)),$(wildcard tests/support/*.cu))
TESTS       := $(patsubst tests/%.c,$(BUILD)/tests/%,$(wildcard tests/unit/test_*.c tests/ops/test_*.c \
               tests/golden/test_*.c tests/e2e/test_*.c))

# `make V=1` shows the commands.
Q   := $(if $(V),,@)
say = @echo '  $(1)    $<'
obj = $(patsubst %.c,$(BUILD)/obj/%.o,$(filter %.c,$(1))) $(patsubst %.cu,$(BUILD)/obj/%.cu.o,$(filter %.cu,$(1)))

all: $(BINARIES)

# The flags of this build; a change of any of them rebuilds.
STAMP := $(BUILD)/flags
$(shell mkdir -p $(BUILD); echo '$(CC) $(CFLAGS_) $(CPPFLAGS_) $(CUDA_ARCHS)' | cmp -s - $(STAMP) || \
        echo '$(CC) $(CFLAGS_) $(CPPFLAGS_) $(CUDA_ARCHS)' > $(STAMP))

# Parsers and wire formats also get -Wconversion, where a silent narrowing is a bug.
$(BUILD)/obj/common/base/%.o $(BUILD)/obj/common/http/%.o $(BUILD)/obj/bridge/%.o: EXTRA := -Wconversion -Wno-sign-conversion

# Sampler and trainer must round a log-probability alike, so neither may fuse a product with a sum.
$(BUILD)/obj/kernels/cpu/logprob.o $(BUILD)/obj/kernels/cpu/sample.o: EXTRA := -ffp-contract=off

$(BUILD)/obj/%.o: %.c $(STAMP)
	@mkdir -p $(@D)
	$(call say,CC)
	$(Q)$(CC) $(CPPFLAGS_) $(CFLAGS_) $(EXTRA) -MMD -MP -c $< -o $@

# Hopper's own instructions (wgmma) are in sm_90a alone.
GENCODE := $(foreach a,$(CUDA_ARCHS:90=90a),-gencode arch=compute_$(a),code=sm_$(a))
$(BUILD)/obj/%.cu.o: %.cu $(STAMP)
	@mkdir -p $(@D)
	$(call say,NVCC)
	$(Q)$(NVCC) -std=c++17 -O3 -lineinfo -I. -D_GNU_SOURCE -DCW_CUDA=1 $(GENCODE) -Xcompiler -Wall,-Wextra \
	    -Werror all-warnings -MMD -MP -c $< -o $@

$(BUILD)/libcommonweight.a: $(call obj,$(LIB_SRC) $(CUDA_SRC))
$(BUILD)/libserver.a: $(call obj,$(SERVER_SRC))
$(BUILD)/libtrainer.a: $(call obj,$(TRAINER_SRC))
$(BUILD)/libreport.a: $(call obj,$(REPORT_SRC))
$(BUILD)/libtest.a: $(call obj,$(TEST_SUPPORT))
$(BUILD)/%.a:
	$(Q)rm -f $@ && ar rcs $@ $^

ifeq ($(CUDA),1)
CUDA_HOME ?= $(patsubst %/bin/,%,$(dir $(realpath $(shell command -v $(NVCC)))))
LDLIBS_ += -L$(CUDA_HOME)/lib64 -Wl,-rpath,$(CUDA_HOME)/lib64 -lcublasLt -lcublas -lcudart_static -lstdc++
endif
LINK = $(Q)echo '  LINK  $@'; $(CC) $(LDFLAGS_) -o $@ $(filter %.o %.a,$^) $(LDLIBS_)

$(BUILD)/cw-infer-server: $(BUILD)/obj/infer-server/main.o $(BUILD)/libserver.a $(BUILD)/libcommonweight.a
	$(LINK)
$(BUILD)/cw-trainer: $(BUILD)/obj/trainer/main.o $(BUILD)/libtrainer.a $(BUILD)/libcommonweight.a
	$(LINK)
$(BUILD)/cw-report: $(BUILD)/obj/tools/report/main.o $(BUILD)/libreport.a $(BUILD)/libcommonweight.a
	$(LINK)
$(BUILD)/cw-bench: $(call obj,$(BENCH_SRC)) $(BUILD)/libserver.a $(BUILD)/libtrainer.a $(BUILD)/libcommonweight.a
	$(LINK)
$(BUILD)/cw-word-problems: $(call obj,$(WORDS_SRC)) $(BUILD)/libcommonweight.a
	$(LINK)
$(BUILD)/cw-%: $(BUILD)/obj/tools/%.o $(BUILD)/libserver.a $(BUILD)/libtrainer.a $(BUILD)/libcommonweight.a
	$(LINK)
$(BUILD)/tests/%: $(BUILD)/obj/tests/%.o $(BUILD)/libtest.a $(BUILD)/libreport.a $(BUILD)/libserver.a $(BUILD)/libtrainer.a $(BUILD)/libcommonweight.a
	@mkdir -p $(@D)
	$(LINK) -lcmocka

# Rewards as shared objects (trainer/rollout/reward_plugin.h); each file is one.
EXAMPLES := $(patsubst trainer/examples/%.c,$(BUILD)/examples/%.so,$(wildcard trainer/examples/*.c))
$(BUILD)/examples/%.so: trainer/examples/%.c $(STAMP)
	@mkdir -p $(@D)
	$(call say,CC)
	$(Q)$(CC) $(CPPFLAGS_) $(CFLAGS_) -shared -fPIC -MMD -MF $(BUILD)/obj/$*.so.d -MP $< -o $@

# ---- tests --------------------------------------------------------------------------------------
# `make test T=unit/test_bytes` runs one of them.
tests: $(BINARIES) $(TESTS) $(EXAMPLES)
test: tests
	BUILD=$(BUILD) tests/run $(if $(T),$(BUILD)/tests/$(T),$(TESTS))

GOLDEN_DIR ?= tests/golden
golden: $(BUILD)/tests/golden/test_golden
	$(BUILD)/tests/golden/test_golden --device $(DEVICE) $(GOLDEN_DIR)

# libFuzzer entries need clang; FUZZ_SECONDS each. 0 replays the seeds with any compiler.
FUZZ_SECONDS ?= 30
FUZZ_CC      ?= clang
fuzz:
	tests/fuzz/run "$(FUZZ_CC)" "$(FUZZ_SECONDS)" $(BUILD)

# ---- the rest -----------------------------------------------------------------------------------
demo: $(BINARIES)
	BUILD=$(BUILD) tools/demo --device $(DEVICE)

bench: $(BINARIES)
	$(BUILD)/cw-bench decode --device $(DEVICE)
	$(BUILD)/cw-bench train --device $(DEVICE)
	$(BUILD)/cw-bench sync --device $(DEVICE)

install: $(BINARIES)
	install -d $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/lib/systemd/system
	install -m 755 $(BINARIES) $(DESTDIR)$(PREFIX)/bin
	sed 's|@PREFIX@|$(PREFIX)|g' infer-server/cw-infer-server.service \
	    > $(DESTDIR)$(PREFIX)/lib/systemd/system/cw-infer-server.service

format:
	clang-format -i $$(git ls-files '*.c' '*.h' '*.cu' '*.cuh')

# tests/fuzz/run builds beside BUILD: BUILD-fuzz, and BUILD-fuzz-replay where FUZZ_SECONDS is 0.
clean:
	rm -rf $(foreach b,$(sort build build-sanitize $(BUILD)),$(b) $(b)-fuzz $(b)-fuzz-replay)

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -7
	@echo "targets: all test golden demo bench fuzz install format clean"

.PHONY: all tests test golden fuzz demo bench install format clean help
.SECONDARY:
-include $(shell find $(BUILD)/obj -name '*.d' 2>/dev/null)
