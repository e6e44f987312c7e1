# Commonweight. `make help` lists the targets; variables are at the top of each part.
#
#   make CUDA=0                       CPU only (found by itself where there is no nvcc or no GPU)
#   make SANITIZE=address,undefined test   (thread: see `make tsan`)
#   make CUDA=1                       with CUDA, for another machine where this one has no GPU
#   make CUDA_ARCHS="80 90"           GPU architectures to build for (default: this machine's own;
#                                     80 and 90 where it has none); 80 also runs on all newer ones
#   make MPI=0                        one rank on the CPU, without Open MPI
#   make ARCH=x86-64-v3               CPU instruction set (default: native, this machine's; it is
#                                     printed, and programs refuse an older machine)
#   make SHARED=1                     one library that the programs share (make wheel)
#   make WERROR=1                     warnings are errors, as in .ci/run
#   make NO_INSTALL=1                 missing packages are named, not installed

SHELL      := /bin/bash
CC         ?= gcc
NVCC       ?= nvcc
HAS_NVCC   := $(shell command -v $(NVCC) 2>/dev/null)
# what a machine with an NVIDIA GPU has; `make GPU=` builds as on one without
GPU        ?= $(wildcard /dev/nvidiactl /proc/driver/nvidia/version)
OWN_CUDA   := $(if $(and $(HAS_NVCC),$(GPU)),1,0)
CUDA       ?= $(OWN_CUDA)
MPI        ?= 1
ARCH       ?= native
SANITIZE   ?=
OPENMP     ?= 1
DEVICE     ?= auto
NO_INSTALL ?=
SHARED     ?=
WERROR     ?=
PREFIX     ?= /usr/local
LIBDIR     ?= $(PREFIX)/lib
# build/ is this machine's own kind; another kind and sanitizers have folders of their own
KIND       := $(if $(filter $(OWN_CUDA),$(CUDA)),,$(if $(filter 1,$(CUDA)),-cuda,-cpu))$(if $(SANITIZE),-sanitize)
BUILD      ?= build$(KIND)
VERSION    := $(shell sed -n 's/^.define COMMONWEIGHT_VERSION "\(.*\)"/\1/p' common/base/options.h)

.DEFAULT_GOAL := all
# As many jobs as there are processors, unless -jN says how many; `make clean all` is one after the other.
ifeq ($(MAKELEVEL)$(filter clean,$(MAKECMDGOALS)),0)
MAKEFLAGS += -j$(shell nproc)
endif
# Some goals need no packages; installing the program installs none.
GOALS := $(or $(MAKECMDGOALS),all)
BUILDS := $(filter-out help clean format uninstall wheel,$(GOALS))
ifneq ($(BUILDS),)
DEPS_OK := $(shell CC=$(CC) MPI=$(MPI) tools/install-deps $(if $(NO_INSTALL)$(filter install,$(GOALS)),--check) >&2 && echo yes)
ifneq ($(DEPS_OK),yes)
$(error packages are missing; see the lines above)
endif
endif

# a GPU that this nvcc does not know is left to what 80 and 90 are carried as
ifeq ($(if $(filter 1,$(CUDA)),$(origin CUDA_ARCHS)),undefined)
known      := $(shell $(NVCC) --list-gpu-arch 2>/dev/null)
found      := $(if $(GPU),$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | tr -d .))
CUDA_ARCHS := $(or $(patsubst compute_%,%,$(filter $(addprefix compute_,$(found)),$(known))),80 90)
endif
$(if $(and $(BUILDS),$(HAS_NVCC),$(filter file0,$(origin CUDA)$(CUDA)),$(filter 0,$(MAKELEVEL))),\
    $(info no NVIDIA GPU in this machine, so no CUDA in the build: "make CUDA=1" builds for another one))

PKGS     := libuv jansson libmicrohttpd libcurl libcrypto libpcre2-8 libutf8proc libsystemd
BLAS     := $(shell pkg-config --libs openblas 2>/dev/null || echo -lopenblas)
CFLAGS   ?= -O2 -g
# x86-64-v1 to v4 as the compiler understands ARCH; "" on other processors
LEVEL    := $(shell $(CC) -march=$(ARCH) -dM -E - </dev/null 2>/dev/null | awk \
            '/__x86_64__/{l=1} /__SSE4_2__/{b=1} /__AVX2__/{c=1} /__AVX512VL__/{d=1} \
            END{if(l) print "x86-64-v" (d ? 4 : c ? 3 : b ? 2 : 1)}')
# 3 where the compiler and its C library know it
FORTIFY  := $(shell $(CC) -O2 -D_FORTIFY_SOURCE=3 -Werror -include features.h -fsyntax-only -xc - </dev/null \
            2>/dev/null && echo 3 || echo 2)
# what a sanitizer sees better without, and what needs an optimizing compiler
HARDEN   := $(if $(SANITIZE),,-fstack-protector-strong \
            $(if $(filter -O1 -O2 -O3,$(CFLAGS)),-U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=$(FORTIFY)))
# Objects go into programs and into shared libraries alike; what a library has, nobody overrides.
PIC      := -fPIC -fno-semantic-interposition
# Nothing is contracted: what is to be fused says so (kernels/cpu/vec.h). Clang's pass-failed is no
# more than that a loop stays scalar.
CFLAGS_  := -std=gnu11 -march=$(ARCH) $(PIC) -fno-math-errno $(if $(filter 1,$(OPENMP)),-fopenmp,-Wno-unknown-pragmas) -pthread -Wall -Wextra -Wshadow -Wstrict-prototypes \
            -Wmissing-prototypes -Wpointer-arith -Wvla -Wundef -Wformat-security -Wno-pass-failed \
            $(if $(WERROR),-Werror) $(HARDEN) $(CFLAGS) -ffp-contract=off \
            $(if $(SANITIZE),-fsanitize=$(SANITIZE) -fno-omit-frame-pointer -fno-sanitize-recover=all)
CPPFLAGS_ := -I. -D_GNU_SOURCE -DCW_CUDA=$(CUDA) -DCW_MPI=$(MPI) $(CPPFLAGS) $(shell pkg-config --cflags $(PKGS) openblas)
LDLIBS_  := $(shell pkg-config --libs $(PKGS)) $(BLAS) -lm -ldl -lrt
LDFLAGS_ := -fopenmp -pthread -Wl,-z,relro,-z,now $(LDFLAGS) $(if $(SANITIZE),-fsanitize=$(SANITIZE))

# ---- sources: a file in its folder is in the build ----------------------------------------------
LIB_SRC     := $(wildcard common/*/*.c common/text/jinja/*.c kernels/*.c kernels/cpu/*.c bridge/*.c)
SERVER_SRC  := $(wildcard infer-server/*/*.c)
TRAINER_SRC := $(filter-out trainer/main.c trainer/examples/%,$(wildcard trainer/*.c trainer/*/*.c trainer/*/*/*.c))
CUDA_SRC    := $(if $(filter 1,$(CUDA)),$(wildcard kernels/cuda/*.cu kernels/cuda/*/*.cu))
REPORT_SRC  := $(filter-out tools/report/main.c,$(wildcard tools/report/*.c))
# in the order in which they follow each other on the page
REPORT_JS   := $(patsubst %,tools/report/page/%.js,dom number run chart time histogram charts rollouts page)
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

BRIDGE_LIB  := $(BUILD)/libcommonweight-bridge.so

all: $(BINARIES) $(BRIDGE_LIB)
	@echo "built for $(or $(LEVEL),$(shell uname -m)) (ARCH=$(ARCH)), $(if $(filter 1,$(CUDA)),CUDA $(CUDA_ARCHS),no CUDA)"

# The flags of this build; a change of any of them rebuilds.
STAMP := $(BUILD)/flags
ifneq ($(BUILDS),)
$(shell mkdir -p $(BUILD); echo '$(CC) $(CFLAGS_) $(CPPFLAGS_) $(CUDA_ARCHS)' | cmp -s - $(STAMP) || \
        echo '$(CC) $(CFLAGS_) $(CPPFLAGS_) $(CUDA_ARCHS)' > $(STAMP))
endif

# Parsers and wire formats also get -Wconversion, where a silent narrowing is a bug.
$(BUILD)/obj/common/base/%.o $(BUILD)/obj/common/http/%.o $(BUILD)/obj/bridge/%.o: EXTRA := -Wconversion -Wno-sign-conversion

# Runs before anything that this build's instructions could break; so without them.
ifneq ($(LEVEL),)
$(BUILD)/obj/common/base/isa.o: EXTRA += -march=x86-64
$(BUILD)/obj/common/base/isa.o: CPPFLAGS_ += -DCW_ISA='"$(LEVEL)"'
endif

# Types and constants of MPI; its functions are looked up at run time.
ifeq ($(MPI),1)
$(BUILD)/obj/kernels/cpu/comm.o: CPPFLAGS_ += $(shell pkg-config --cflags-only-I ompi-c)
endif

$(BUILD)/obj/%.o: %.c $(STAMP)
	@mkdir -p $(@D)
	$(call say,CC)
	$(Q)$(CC) $(CPPFLAGS_) $(CFLAGS_) $(EXTRA) -MMD -MP -c $< -o $@

# Hopper's own instructions (wgmma) are in sm_90a alone. 80 is carried as PTX too, which drivers
# compile for GPUs that are newer than any of CUDA_ARCHS.
, := ,
gencode = $(foreach a,$(1:90=90a),-gencode arch=compute_$(a),code=$(if $(filter 80,$(a)),[sm_80$(,)compute_80],sm_$(a)))
NVCCFLAGS_ = -std=c++17 -O3 -lineinfo -I. -D_GNU_SOURCE -DCW_CUDA=1 $(call gencode,$(KERNEL_ARCHS)) -Xcompiler -fPIC,-Wall,-Wextra \
             $(if $(WERROR),-Werror all-warnings) -MMD -MP
KERNEL_ARCHS = $(CUDA_ARCHS)
# What has wgmma is launched on Hopper alone: where that is among others, nothing is compiled for these.
HOPPER_SRC := $(addprefix kernels/cuda/,attention/attn_few_tma.cu attention/attn_latent.cu attention/attn_wgmma.cu \
              matmul/matmul_e4m3.cu matmul/matmul_small.cu)
$(call obj,$(HOPPER_SRC)): KERNEL_ARCHS = $(or $(filter 90,$(CUDA_ARCHS)),$(CUDA_ARCHS))
$(BUILD)/obj/%.cu.o: %.cu $(STAMP)
	@mkdir -p $(@D)
	$(call say,NVCC)
	$(Q)$(NVCC) $(NVCCFLAGS_) -c $< -o $@

$(BUILD)/libcommonweight.a: $(call obj,$(LIB_SRC) $(CUDA_SRC))
$(BUILD)/libserver.a: $(call obj,$(SERVER_SRC))
$(BUILD)/libtrainer.a: $(call obj,$(TRAINER_SRC))
$(BUILD)/libreport.a: $(call obj,$(REPORT_SRC)) $(BUILD)/obj/tools/report/page.text.o
$(BUILD)/libtest.a: $(call obj,$(TEST_SUPPORT))
$(BUILD)/%.a:
	$(Q)rm -f $@ && ar rcs $@ $^

ifeq ($(CUDA),1)
CUDA_HOME ?= $(patsubst %/bin/,%,$(dir $(realpath $(shell command -v $(NVCC)))))
# where cuBLASLt is looked for first; a package leaves that to the system (CUDA_RPATH=)
CUDA_RPATH ?= $(CUDA_HOME)/lib64
LDLIBS_ += -L$(CUDA_HOME)/lib64 $(if $(CUDA_RPATH),-Wl$(,)-rpath$(,)$(CUDA_RPATH)) -lcudart_static -lstdc++
endif
LINK = $(Q)echo '  LINK  $@'; $(CC) $(LDFLAGS_) -o $@ $(filter %.o %.a %.so,$^) $(LDLIBS_)
# What a program is linked with: some archives, or where it is shared the library of all of them, so
# that the kernels (60 MB with CUDA) are there once.
ALL_LIBS   := $(addprefix $(BUILD)/lib,report.a server.a trainer.a commonweight.a)
SHARED_LIB := $(BUILD)/libcommonweight.so
libs = $(if $(SHARED),$(SHARED_LIB),$(patsubst %,$(BUILD)/lib%.a,$(1) commonweight))
whole = -Wl,--whole-archive $(1) -Wl,--no-whole-archive
$(SHARED_LIB): $(ALL_LIBS)
	$(Q)echo '  LINK  $@'; $(CC) $(LDFLAGS_) -shared -Wl,-soname,$(@F) -o $@ $(call whole,$^) $(LDLIBS_)

$(BUILD)/cw-infer-server: $(BUILD)/obj/infer-server/main.o $(call libs,server)
	$(LINK)
$(BUILD)/cw-trainer: $(BUILD)/obj/trainer/main.o $(call libs,trainer)
	$(LINK)
$(BUILD)/cw-report: $(BUILD)/obj/tools/report/main.o $(call libs,report)
	$(LINK)
$(BUILD)/cw-bench: $(call obj,$(BENCH_SRC)) $(call libs,server trainer)
	$(LINK)
# As the bridge library, without kernels (those of libcommonweight.a are left there) and without BLAS.
$(BUILD)/cw-ipc-check: LDFLAGS_ += -Wl,--as-needed
$(BUILD)/cw-ipc-check: $(call obj,tools/ipc-check.c bridge/library/bridge_ops.c $(if $(filter 1,$(CUDA)),bridge/library/bridge_ops_cuda.cu)) \
                       $(BUILD)/libcommonweight.a
	$(LINK)
$(BUILD)/cw-word-problems: $(call obj,$(WORDS_SRC)) $(call libs)
	$(LINK)
$(BUILD)/cw-%: $(BUILD)/obj/tools/%.o $(call libs,server trainer)
	$(LINK)
# All tests use one library: linked with everything, each takes 3 MB, with kernels 64. Loaded, it is as
# new as it can be, so tests are not linked anew for it.
TEST_LIB := $(BUILD)/libcommonweight-tests.so
$(TEST_LIB): $(BUILD)/libtest.a $(ALL_LIBS)
	$(Q)echo '  LINK  $@'; $(CC) $(LDFLAGS_) -shared -Wl,-soname,$(@F) -o $@ $(call whole,$^) $(LDLIBS_) -lcmocka
$(BUILD)/tests/%: $(BUILD)/obj/tests/%.o | $(TEST_LIB)
	@mkdir -p $(@D)
	$(LINK) $(TEST_LIB) -Wl,-rpath,'$$ORIGIN/../..' -lcmocka

# The bridge's client side for other languages: without kernels, so without BLAS and cuBLASLt.
BRIDGE_SRC := $(filter-out common/base/unicode.c,$(wildcard common/base/*.c bridge/*.c bridge/library/*.c)) kernels/device.c \
           $(addprefix kernels/cpu/,backend.c shared.c) \
           $(if $(filter 1,$(CUDA)),kernels/cuda/device.cu bridge/library/bridge_ops_cuda.cu)
$(BUILD)/libcommonweight-bridge.so.0: $(call obj,$(BRIDGE_SRC)) bridge/library/exports
	$(Q)echo '  LINK  $@'; $(CC) $(LDFLAGS_) -shared -Wl,-soname,$(@F),--version-script=bridge/library/exports,--no-undefined \
	    -o $@ $(filter %.o,$^) $(shell pkg-config --libs jansson libcrypto) -lm \
	    $(if $(filter 1,$(CUDA)),-L$(CUDA_HOME)/lib64 -lcudart_static -lstdc++) -ldl -lrt
$(BRIDGE_LIB): $(BUILD)/libcommonweight-bridge.so.0
	$(Q)ln -sf $(<F) $@

# What cw-report puts into its page, as strings of C.
text = { echo 'const char $(1)[] ='; cat $(2) | sed 's/[\\"]/\\&/g; s/.*/    "&\\n"/'; echo ';'; }
REPORT_TEXTS := tools/report/page/style.css tools/report/page/body.html $(REPORT_JS)
$(BUILD)/obj/tools/report/page.text.o: $(REPORT_TEXTS) tools/report/report.h Makefile $(STAMP)
	@mkdir -p $(@D)
	$(call say,CC)
	$(Q){ echo '#include "tools/report/report.h"'; $(call text,report_style,tools/report/page/style.css); \
	    $(call text,report_body,tools/report/page/body.html); $(call text,report_script,$(REPORT_JS)); } > $(@:.o=.c)
	$(Q)$(CC) $(CPPFLAGS_) $(CFLAGS_) -c $(@:.o=.c) -o $@

# Rewards as shared objects (trainer/reward/reward_plugin.h); each file is one.
EXAMPLES := $(patsubst trainer/examples/%.c,$(BUILD)/examples/%.so,$(wildcard trainer/examples/*.c))
$(BUILD)/examples/%.so: trainer/examples/%.c $(STAMP)
	@mkdir -p $(@D)
	$(call say,CC)
	$(Q)$(CC) $(CPPFLAGS_) $(CFLAGS_) -shared -fPIC -MMD -MF $(BUILD)/obj/$*.so.d -MP $< -o $@

# ---- tests --------------------------------------------------------------------------------------
# Folders of reference values as models: the weights, which are generated, and copies of the rest.
GOLDEN         := $(BUILD)/golden/made
GOLDEN_FOLDERS := $(patsubst %/golden.json,%,$(wildcard tests/golden*/*/golden.json))
$(GOLDEN): $(BUILD)/tests/golden/make_folders $(TEST_LIB) $(wildcard $(addsuffix /*,$(GOLDEN_FOLDERS)))
	$(Q)rm -rf $(BUILD)/golden $(BUILD)/golden-lora && $< $(BUILD) $(GOLDEN_FOLDERS) && touch $@

# `make test T=unit/test_bytes` builds and runs one of them.
WANTED_TESTS = $(if $(T),$(addprefix $(BUILD)/tests/,$(T)),$(TESTS))
# Fuzz entries are compiled with them, so that what they call does not change unseen.
tests: $(BINARIES) $(WANTED_TESTS) $(EXAMPLES) $(BRIDGE_LIB) $(GOLDEN) $(call obj,$(wildcard tests/fuzz/fuzz_*.c))
test: tests
	BUILD=$(BUILD) tests/run $(WANTED_TESTS) $(if $(T),,./tests/form/test_form)

# Each mode of cw-trainer train and each pair, on one rank and on two (docs/use/combinations.md); and each
# mode while one of its processes is killed.
combinations: $(BINARIES) $(BUILD)/tests/e2e/test_combinations $(BUILD)/tests/e2e/test_kills
	OMP_NUM_THREADS=2 $(BUILD)/tests/e2e/test_combinations all
	OMP_NUM_THREADS=2 $(BUILD)/tests/e2e/test_kills all

# ThreadSanitizer over what has threads. OpenMP's own synchronization is not seen by it: without.
TSAN_TESTS ?= $(addprefix unit/test_,engine engine_requests engine_takeover engine_updates step_ahead pause \
              scheduler rollout_queue rollout_pull reward_command http_client control \
              liveness bytes)
tsan:
	OPENBLAS_NUM_THREADS=1 TSAN_OPTIONS="die_after_fork=0" $(MAKE) BUILD=$(BUILD)-tsan CUDA=0 OPENMP=0 SANITIZE=thread \
	    CFLAGS="-O1 -g" test T="$(or $(T),$(TSAN_TESTS))"

# What the tests run of the sources, by folder (tests/coverage): all of them, or `make coverage T=unit/test_bytes`.
coverage:
	$(MAKE) BUILD=$(BUILD)-coverage CUDA=0 CFLAGS="-O2 -g --coverage -fprofile-update=atomic" LDFLAGS=--coverage test; \
	    failed=$$?; tests/coverage $(BUILD)-coverage && exit $$failed

golden golden-lora: $(BUILD)/tests/golden/test_golden $(GOLDEN)
	$(BUILD)/tests/golden/test_golden --device $(DEVICE) $(or $(GOLDEN_DIR),$(BUILD)/$@)

# What every build with FMA must compute of tests/golden, to the bit.
golden-bits: $(BUILD)/tests/golden/test_bits $(GOLDEN)
	$< --print > tests/golden/bits.txt

# libFuzzer entries need clang; FUZZ_SECONDS each. 0 replays the seeds with any compiler.
FUZZ_SECONDS ?= 30
FUZZ_CC      ?= clang
fuzz:
	tests/fuzz/run "$(FUZZ_CC)" "$(FUZZ_SECONDS)" $(BUILD)

# ---- the rest -----------------------------------------------------------------------------------
demo: $(BINARIES) $(BRIDGE_LIB)
	BUILD=$(BUILD) tools/demo --device $(DEVICE)

# A pretrained model, fetched by pip, on a task with a verifier.
real: $(BINARIES)
	BUILD=$(BUILD) tools/real-run --device $(DEVICE)

bench: $(BINARIES)
	$(BUILD)/cw-bench decode --device $(DEVICE)
	$(BUILD)/cw-bench prefill --device $(DEVICE)
	$(BUILD)/cw-bench train --device $(DEVICE)
	$(BUILD)/cw-bench sync --device $(DEVICE)

# ---- installing: under PREFIX (and DESTDIR before it) --------------------------------------------
UNIT_DIR    ?= $(PREFIX)/lib/systemd/system
SHARE       := $(PREFIX)/share
COMMANDS    := $(notdir $(BINARIES))
PAGES       := $(COMMANDS) $(addprefix cw-trainer-,train serve sft dpo eval merge)
fill = sed 's|@PREFIX@|$(PREFIX)|g; s|@LIBDIR@|$(LIBDIR)|g; s|@VERSION@|$(VERSION)|g'

# A page of the manual is what --help says.
man: $(BINARIES)
	$(Q)packaging/make-man $(BUILD) $(PAGES)

EXAMPLE_FILES = packaging/server.json packaging/train.sbatch packaging/kubernetes.yaml $(wildcard python/*.py)
MODULE_FILES = $(wildcard python/commonweight/*.py)
INSTALLED = $(addprefix $(PREFIX)/bin/,$(COMMANDS)) $(addprefix $(SHARE)/man/man1/,$(addsuffix .1,$(PAGES))) \
            $(addprefix $(SHARE)/bash-completion/completions/,$(COMMANDS)) \
            $(addprefix $(UNIT_DIR)/,cw-infer-server.service cw-infer-server@.service) \
            $(PREFIX)/lib/sysusers.d/commonweight.conf \
            $(addprefix $(SHARE)/doc/commonweight/examples/,$(notdir $(EXAMPLE_FILES)) $(MODULE_FILES:python/%=%)) \
            $(addprefix $(LIBDIR)/libcommonweight-bridge.,so so.0) $(LIBDIR)/pkgconfig/commonweight-bridge.pc \
            $(addprefix $(PREFIX)/include/,commonweight-bridge.h commonweight-reward.h)

install: all
	@command -v help2man >/dev/null && $(MAKE) --no-print-directory man || \
	    echo "no pages of the manual: they want the package help2man"
	install -d $(addprefix $(DESTDIR),$(sort $(dir $(INSTALLED))))
	install -m 755 $(BINARIES) $(DESTDIR)$(PREFIX)/bin
	install -m 644 $(BUILD)/libcommonweight-bridge.so.0 $(DESTDIR)$(LIBDIR)
	ln -sf libcommonweight-bridge.so.0 $(DESTDIR)$(LIBDIR)/libcommonweight-bridge.so
	$(fill) packaging/commonweight-bridge.pc.in > $(DESTDIR)$(LIBDIR)/pkgconfig/commonweight-bridge.pc
	install -m 644 bridge/library/commonweight-bridge.h $(DESTDIR)$(PREFIX)/include
	install -m 644 trainer/reward/reward_plugin.h $(DESTDIR)$(PREFIX)/include/commonweight-reward.h
	for page in $(PAGES); do [ ! -e $(BUILD)/man/$$page.1 ] || \
	    install -m 644 $(BUILD)/man/$$page.1 $(DESTDIR)$(SHARE)/man/man1; done
	install -m 644 packaging/completion.bash $(DESTDIR)$(SHARE)/bash-completion/completions/cw-trainer
	for name in $(filter-out cw-trainer,$(COMMANDS)); do \
	    ln -sf cw-trainer $(DESTDIR)$(SHARE)/bash-completion/completions/$$name; done
	$(fill) infer-server/cw-infer-server.service > $(DESTDIR)$(UNIT_DIR)/cw-infer-server.service
	$(fill) infer-server/cw-infer-server.service | sed -f packaging/instance.sed \
	    > $(DESTDIR)$(UNIT_DIR)/cw-infer-server@.service
	install -m 644 packaging/sysusers.conf $(DESTDIR)$(PREFIX)/lib/sysusers.d/commonweight.conf
	install -m 644 $(EXAMPLE_FILES) $(DESTDIR)$(SHARE)/doc/commonweight/examples
	install -m 644 $(MODULE_FILES) $(DESTDIR)$(SHARE)/doc/commonweight/examples/commonweight

uninstall:
	rm -f $(addprefix $(DESTDIR),$(INSTALLED))

# A Debian package of this tree, as it is in the last commit, in BUILD/deb.
deb:
	packaging/make-deb $(BUILD)/deb $(VERSION)

# What pip installs: programs for other machines, with CUDA where nvcc is, and the module of python/.
# DT_RPATH, which --disable-new-dtags makes, is also for what the bundled libraries need of one another.
WHEEL_CUDA  = $(if $(filter command line,$(origin CUDA)),$(CUDA),$(if $(HAS_NVCC),1,0))
WHEEL_BUILD ?= $(BUILD)/wheel
wheel:
	rm -f $(addprefix $(WHEEL_BUILD)/,cw-* libcommonweight-bridge.so* *.whl) # which another build links otherwise
	$(MAKE) SHARED=1 ARCH=x86-64-v3 CUDA=$(WHEEL_CUDA) CUDA_ARCHS="80 90" CUDA_RPATH= BUILD=$(WHEEL_BUILD) \
	    LDFLAGS='-s -Wl,--disable-new-dtags,-rpath,\$$$$ORIGIN' all
	packaging/make-wheel $(WHEEL_BUILD) $(VERSION)

format:
	$$(command -v clang-format-14 || echo clang-format) -i $$(git ls-files '*.c' '*.h' '*.cu' '*.cuh')

# Mistakes that .clang-tidy names, in the files of some folders.
TIDY ?= common/base bridge trainer/learn
tidy:
	@ls $(addsuffix /*.c,$(TIDY)) | xargs -P $$(nproc) -I{} $$(command -v clang-tidy-14 || echo clang-tidy) --quiet {} -- \
	    $(CPPFLAGS_) -std=gnu11 2>/dev/null && echo "clang-tidy of $(TIDY): nothing"

# tests/fuzz/run builds beside BUILD: BUILD-fuzz, and BUILD-fuzz-replay where FUZZ_SECONDS is 0.
clean:
	rm -rf $(foreach b,$(sort $(foreach k,build build-cpu build-cuda,$(k) $(k)-sanitize) $(BUILD)),$(b) $(addprefix $(b)-,fuzz fuzz-replay tsan))

# what is missing was installed where DEPS_OK is
deps:
	@echo "the packages that a build needs are here"

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -13
	@echo "targets: all test tsan coverage combinations golden golden-lora golden-bits demo real bench fuzz man deps install uninstall deb wheel format clean"

.PHONY: all tests test tsan coverage combinations golden golden-lora golden-bits fuzz demo real bench man deps install uninstall deb wheel format tidy clean help
.SECONDARY:
-include $(shell find $(BUILD)/obj -name '*.d' 2>/dev/null)
