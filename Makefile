# kvstride: make | make demo | make test | make mutation | make check | make fuzz | make bench | make bundle | make install
# SAN=address,undefined or SAN=thread gives an instrumented build of its own; CUDA_ARCHS="80 90a 100 ptx80" chooses GPU code.
VERSION := 0.1.0
PREFIX  ?= /usr/local
DESTDIR ?=
ifeq ($(origin CC),default)
CC := gcc
endif
# In PATH, in CUDA_HOME, in its usual place, or the one that made this build: sudo knows little of whom it serves.
NVCC    ?= $(firstword $(shell command -v nvcc 2>/dev/null) $(wildcard $(CUDA_HOME)/bin/nvcc /usr/local/cuda/bin/nvcc $(shell cat build/nvcc 2>/dev/null)))
CUDA_ARCHS ?= $(if $(FAT),80 90a 100 ptx80,90a)

# Quiet unless V=1.
Q := $(if $(V),,@)
say = @$(if $(V),:,echo '  $(1)  $@')
comma := ,
# FAT=1: code for every card, as it is shipped; takes its time.
BUILD := build/$(if $(MUTANT),mutant$(if $(NVCC),,-cpu),$(if $(SAN),$(subst $(comma),-,$(SAN)),$(if $(FAT),fat,release)))
# Objects of nvcc are the same under every sanitizer.
CU := $(if $(MUTANT)$(FAT),$(BUILD),build/release)
WARN  := -Wall -Wextra -Werror -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wpointer-arith -Wvla -Wundef \
         -Wcast-qual -Wwrite-strings
OPT   ?= -O2
ALL_C := -std=c11 -D_GNU_SOURCE -DKVS_VERSION='"$(VERSION)"' $(WARN) $(OPT) -g -fno-omit-frame-pointer -pthread -I. \
         -fPIC -fvisibility=hidden -MMD -MP $(if $(MUTANT),-DKVS_MUTATION -Wno-missing-field-initializers) $(if $(SAN),-fsanitize=$(SAN) -fno-sanitize-recover=all) $(CFLAGS)
ALL_LD := -pthread -Wl,-z,relro,-z,now $(if $(SAN),-fsanitize=$(SAN)) $(LDFLAGS)
# The CUDA runtime is linked in and looks for the driver when it is first called: one binary for machines with and without.
# One of the environment that is not there is not taken.
CUDA_HOME := $(patsubst %/include/cuda_runtime_api.h,%,$(firstword $(wildcard $(addsuffix /include/cuda_runtime_api.h, \
             $(CUDA_HOME) $(patsubst %/bin/nvcc,%,$(NVCC) $(realpath $(NVCC))) /usr/local/cuda))))
CUDA_C    := $(if $(NVCC),-DKVS_CUDA -isystem $(CUDA_HOME)/include)
CUDA_LIBS := $(if $(NVCC),-L$(CUDA_HOME)/lib64 -lcudart_static -Wl$(comma)--as-needed -lstdc++ -Wl$(comma)--no-as-needed -ldl -lrt -lpthread)
GENCODE   := $(foreach a,$(filter-out ptx%,$(CUDA_ARCHS)),-gencode arch=compute_$(a),code=sm_$(a)) \
             $(foreach a,$(patsubst ptx%,%,$(filter ptx%,$(CUDA_ARCHS))),-gencode arch=compute_$(a),code=compute_$(a))
# Machine code for four cards is large; nvcc from 12.8 on packs it to a seventh.
SMALL      = $(if $(findstring compress-mode,$(shell $(NVCC) --help)),--compress-mode=size)
CUDA_CC    = $(NVCC) -std=c++17 -O3 -I. -DKVS_CUDA $(if $(MUTANT),-DKVS_MUTATION) -Xcompiler -fPIC,-Wall,-Wextra -Werror all-warnings \
             $(GENCODE) $(if $(FAT),$(SMALL)) -MMD -MP -MF $(@:.o=.d) -MT $@ $(NVCC_EXTRA)
# One rounding a operation: the same bits with every compiler that follows IEEE 754.
$(CU)/kernels/merge.cu.o: NVCC_EXTRA := --fmad=false
KERNEL_C := -O3 -ffp-contract=off -fno-math-errno

sources = $(wildcard $(1)/*.c)
objects = $(patsubst %.c,$(BUILD)/%.o,$(1))
PROTO   := $(call objects,$(call sources,proto))
CONFIG  := $(call objects,$(call sources,config))
# The client's kernel travels as bytes: it is loaded by the driver, so that libkvstride links without CUDA.
PACK    := $(if $(NVCC),$(BUILD)/kernels/client_pack_image.o)
KERNELS := $(call objects,$(call sources,kernels)) $(PACK) \
           $(if $(NVCC),$(patsubst %,$(CU)/%.o,$(filter-out kernels/client_pack.cu,$(wildcard kernels/*.cu))))
DAEMON  := $(call objects,$(filter-out daemon/main.c,$(call sources,daemon)))
CLIENT  := $(call objects,$(call sources,proto/client) $(wildcard kernels/client_*.c)) $(PACK)
CTL     := $(call objects,$(filter-out proto/ctl/main.c,$(call sources,proto/ctl)))
SUPPORT := $(call objects,$(call sources,tests/support))
# Archives, so that a test links what it uses and no more.
LIB_DAEMON := $(BUILD)/libdaemon.a $(BUILD)/libkernels.a $(BUILD)/libconfig.a $(BUILD)/libproto.a
LIB_CLIENT := $(BUILD)/libkvstride.a
DAEMON_LIBS := -luv -lcjson -lcrypto -lxxhash -lsystemd -lmicrohttpd -lm $(CUDA_LIBS)
CLIENT_LIBS := -lcrypto -lm
SO := libkvstride.so.0
# The kernels for engines that launch in their own process: without the daemon's device, and without libcrypto.
KERNELS_SO  := libkvstride-kernels.so.0
KERNELS_API := $(filter-out $(patsubst %,$(BUILD)/kernels/%.o,client_% busy_cuda engine_cuda copy cuda_driver cuda_memory cuda_peer cuda_queue cuda_used \
                 device_cpu device_cuda host_memory host_pages mla_oracle),$(KERNELS)) $(BUILD)/proto/format.o $(BUILD)/proto/status.o

PROGRAMS := $(BUILD)/kvstrided $(BUILD)/kvstridectl $(BUILD)/$(SO) $(BUILD)/$(KERNELS_SO) $(BUILD)/libkvstride-kernels.a
tests = $(patsubst %.c,$(BUILD)/%,$(wildcard tests/$(1)/test_*.c))
UNIT  := $(call tests,unit) $(call tests,loop) $(call tests,e2e)
GPU   := $(call tests,gpu)
GPU_SUPPORT := $(BUILD)/tests/gpu/gpu.o $(BUILD)/tests/gpu/gpu_case.o $(BUILD)/tests/gpu/gpu_engine.o $(BUILD)/tests/gpu/gpu_rank.o $(if $(NVCC),$(patsubst %,$(CU)/%.o,$(wildcard tests/gpu/*.cu)))
POISON := $(if $(NVCC),$(BUILD)/tests/fault/poison.so)
KB    := $(call objects,$(wildcard tests/kernels/kb_*.c) tests/kernels/kernels_bench.c tests/support/random.c) \
         $(if $(NVCC),$(CU)/tests/gpu/fill_cuda.cu.o)
KT    := $(call objects,$(wildcard tests/kernels/kt*.c) tests/gpu/gpu_case.c tests/support/random.c tests/support/mla_case.c tests/support/mla_token.c) \
         $(if $(NVCC),$(patsubst %,$(CU)/%.o,$(wildcard tests/kernels/*.cu tests/gpu/oracle_cuda.cu)))
RACE  := $(patsubst %.c,$(BUILD)/%,$(wildcard tests/race/race_*.c))
FUZZ  := $(patsubst %.c,$(BUILD)/%,$(wildcard tests/fuzz/fuzz_*.c))
GPU_BENCH := $(patsubst %.c,$(BUILD)/%,$(wildcard tests/gpu/bench_*.c)) $(BUILD)/kernels-bench
BENCH := $(patsubst %.c,$(BUILD)/%,$(wildcard tests/bench/bench_*.c))

all: deps
	@$(MAKE) --no-print-directory programs
programs: $(PROGRAMS)
	@$(if $(NVCC),:,echo "nvcc not found: cpu-only build")

deps:
	@NVCC='$(NVCC)' .ci/deps

$(BUILD)/libproto.a: $(PROTO)
$(BUILD)/libconfig.a: $(CONFIG)
$(BUILD)/libkernels.a: $(KERNELS)
$(BUILD)/libdaemon.a: $(DAEMON)
$(BUILD)/libsupport.a: $(SUPPORT)
$(BUILD)/libctl.a: $(CTL)
$(BUILD)/lib%.a:
	$(call say,AR)
	$(Q)rm -f $@ && ar rcs $@ $^

# One object whose hidden names are local: a program that links it sees kvs_* and nothing else.
$(BUILD)/libkvstride.a: $(CLIENT) $(PROTO)
	$(call say,AR)
	$(Q)$(LD) -r -o $(BUILD)/kvstride.o $^ && objcopy --localize-hidden $(BUILD)/kvstride.o
	$(Q)rm -f $@ && ar rcs $@ $(BUILD)/kvstride.o

$(BUILD)/kvstrided: $(BUILD)/daemon/main.o $(LIB_DAEMON)
	$(call say,LD)
	$(Q)$(CC) $(ALL_LD) -o $@ $^ $(DAEMON_LIBS)
$(BUILD)/kvstridectl: $(BUILD)/proto/ctl/main.o $(BUILD)/libctl.a $(LIB_CLIENT) $(BUILD)/libkernels.a $(BUILD)/libconfig.a $(BUILD)/libproto.a
	$(call say,LD)
	$(Q)$(CC) $(ALL_LD) -o $@ $^ -lcjson $(CLIENT_LIBS) $(CUDA_LIBS)
$(BUILD)/$(SO): $(CLIENT) $(PROTO)
	$(call say,LD)
	$(Q)$(CC) $(ALL_LD) -shared -Wl,-soname,$(SO) -o $@ $^ $(CLIENT_LIBS)
	$(Q)ln -sf $(SO) $(BUILD)/libkvstride.so

# Of the kernels only kvs_* is to be seen from outside.
$(BUILD)/libkvstride-kernels.a: $(KERNELS_API)
	$(call say,AR)
	$(Q)$(LD) -r -o $(BUILD)/kvstride-kernels.o $^ && objcopy --wildcard --keep-global-symbol='kvs_*' $(BUILD)/kvstride-kernels.o
	$(Q)rm -f $@ && ar rcs $@ $(BUILD)/kvstride-kernels.o
$(BUILD)/$(KERNELS_SO): $(KERNELS_API) kernels/exports.map
	$(call say,LD)
	$(Q)$(CC) $(ALL_LD) -shared -Wl,-soname,$(KERNELS_SO) -Wl,--version-script=kernels/exports.map -o $@ \
	    $(filter %.o,$^) -lm $(CUDA_LIBS)
	$(Q)ln -sf $(KERNELS_SO) $(BUILD)/libkvstride-kernels.so

# For the cards of CUDA_ARCHS, and as PTX for every later one.
$(BUILD)/kernels/client_pack.fatbin: kernels/client_pack.cu kernels/client_pack_params.h $(CU)/nvcc.flags
	$(call say,NVCC)
	@mkdir -p $(@D)
	$(Q)$(NVCC) -std=c++17 -O3 -I. -Werror all-warnings -fatbin $(GENCODE) -gencode arch=compute_80,code=compute_80 -o $@ $<
$(BUILD)/kernels/client_pack_image.c: $(BUILD)/kernels/client_pack.fatbin
	$(Q){ echo 'extern const unsigned char client_pack_image[];'; \
	    echo '_Alignas(16) const unsigned char client_pack_image[] = {'; \
	    od -An -v -tu1 $< | sed 's/  */ /g; s/\([0-9]\)\( \|$$\)/\1,\2/g'; echo '};'; } > $@
$(BUILD)/kernels/client_pack_image.o: $(BUILD)/kernels/client_pack_image.c $(BUILD)/cc.flags
	$(call say,CC)
	$(Q)$(CC) $(ALL_C) -c -o $@ $<

$(BUILD)/kernels/%.o: ALL_C += $(KERNEL_C) $(CUDA_C) -fvisibility=default
$(BUILD)/tests/gpu/%.o $(BUILD)/tests/kernels/%.o: ALL_C += $(CUDA_C)
# What was compiled otherwise is compiled again: by another compiler, with CUDA or without, for other cards.  But what is there
# is installed as it is.
export AS_BUILT := $(or $(AS_BUILT),$(filter install install-kernels,$(MAKECMDGOALS)))
$(BUILD)/cc.flags: export FLAGS := $(CC) $(ALL_C) $(CUDA_C)
$(CU)/nvcc.flags: export FLAGS := $(subst $(NVCC),nvcc,$(CUDA_CC))
$(BUILD)/cc.flags $(CU)/nvcc.flags: $(if $(AS_BUILT),,FORCE)
	@mkdir -p $(@D) && { printf '%s\n' "$$FLAGS" | cmp -s - $@ || printf '%s\n' "$$FLAGS" >$@; }
	@$(if $(NVCC),echo $(NVCC) >build/nvcc,:)
$(CU)/%.cu.o: %.cu $(CU)/nvcc.flags
	$(call say,NVCC)
	@mkdir -p $(@D)
	$(Q)$(CUDA_CC) -c -o $@ $<
$(BUILD)/%.o: %.c $(BUILD)/cc.flags
	$(call say,CC)
	@mkdir -p $(@D)
	$(Q)$(CC) $(ALL_C) -c -o $@ $<

TEST_LIBS := $(BUILD)/libsupport.a $(BUILD)/libctl.a $(LIB_CLIENT) $(LIB_DAEMON)
$(BUILD)/tests/unit/%: $(BUILD)/tests/unit/%.o $(TEST_LIBS)
	$(call say,LD)
	$(Q)$(CC) $(ALL_LD) -o $@ $^ -lcriterion $(DAEMON_LIBS)
# A driver of its own for the tests of libkvstride's GPU side; found by path, so that no other program meets it.
$(BUILD)/tests/fake/libcuda.so.1: tests/fake/fake_cuda.c tests/fake/fake_cuda.h kernels/client_pack_params.h
	$(call say,LD)
	@mkdir -p $(@D)
	$(Q)$(CC) $(filter-out -MMD -MP,$(ALL_C)) $(ALL_LD) -shared -Wl,-soname,libcuda.so.1 -o $@ $<
$(BUILD)/tests/unit/test_client_gpu: | $(BUILD)/tests/fake/libcuda.so.1
$(BUILD)/tests/loop/%: $(BUILD)/tests/loop/%.o $(TEST_LIBS)
	$(call say,LD)
	$(Q)$(CC) $(ALL_LD) -o $@ $^ -lcriterion $(DAEMON_LIBS)
$(BUILD)/tests/e2e/%: $(BUILD)/tests/e2e/%.o $(TEST_LIBS)
	$(call say,LD)
	$(Q)$(CC) $(ALL_LD) -o $@ $^ -lcriterion $(DAEMON_LIBS)
$(BUILD)/tests/race/%: $(BUILD)/tests/race/%.o $(TEST_LIBS)
	$(call say,LD)
	$(Q)$(CC) $(ALL_LD) -o $@ $^ $(DAEMON_LIBS)
$(BUILD)/tests/gpu/%: $(BUILD)/tests/gpu/%.o $(GPU_SUPPORT) $(TEST_LIBS)
	$(call say,LD)
	$(Q)$(CC) $(ALL_LD) -o $@ $^ $(DAEMON_LIBS)
$(BUILD)/tests/bench/%: $(BUILD)/tests/bench/%.o $(TEST_LIBS)
	$(call say,LD)
	$(Q)$(CC) $(ALL_LD) -o $@ $^ $(DAEMON_LIBS)
# What the GPU tests preload into the daemon.
$(BUILD)/tests/gpu/test_gpu_service: | $(POISON)
$(BUILD)/tests/fault/%.so: tests/fault/%.cu
	$(call say,NVCC)
	@mkdir -p $(@D)
	$(Q)$(NVCC) -std=c++17 -O2 -shared -Xcompiler -fPIC,-Wall,-Wextra $(GENCODE) -o $@ $<
# Every operation of kernels/ on the cpu and on CUDA; kernels-test-mutant has addresses that can be told to go wrong.
$(BUILD)/kernels-test: $(KT) $(BUILD)/libkernels.a $(BUILD)/libproto.a
	$(call say,LD)
	$(Q)$(CC) $(ALL_LD) -o $@ $^ -lm $(CUDA_LIBS)
$(BUILD)/kernels-bench: $(KB) $(BUILD)/libkernels.a $(BUILD)/libproto.a
	$(call say,LD)
	$(Q)$(CC) $(ALL_LD) -o $@ $^ -lm $(CUDA_LIBS)
$(BUILD)/kernels-test-mutant: FORCE
	@$(MAKE) --no-print-directory MUTANT=1 build/mutant/kernels-test
	@cmp -s build/mutant/kernels-test $@ || cp build/mutant/kernels-test $@
FORCE:
.PRECIOUS: $(BUILD)/%.o
.SECONDARY:

# ---- use ----------------------------------------------------------------------------------------------------
demo: all
	$(BUILD)/kvstridectl demo
run: all
	$(BUILD)/kvstrided $(if $(CONFIG_FILE),--config $(CONFIG_FILE)) --socket $(CURDIR)/build/kvstrided.sock \
	    --admin-socket $(CURDIR)/build/admin.sock --set metrics.path=$(CURDIR)/build/metrics.sock

# ---- proof --------------------------------------------------------------------------------------------------
# Under SAN=thread only the race programs: Criterion's runner does not survive that sanitizer.
TESTS := $(if $(findstring thread,$(SAN)),$(RACE),$(UNIT) $(GPU) $(RACE) $(BUILD)/kernels-test)
test: deps
	@$(MAKE) --no-print-directory test-programs
	@tests/run $(BUILD) $(TESTS) $(if $(findstring thread,$(SAN)),,tests/install tests/kernels/install tests/python/run)
test-programs: programs $(TESTS) $(if $(SAN),,$(BENCH) $(GPU_BENCH))
# Every place that makes an address, every way to get it wrong: some case of that operation must fail.
mutation: deps
	@$(MAKE) --no-print-directory MUTANT=1 NVCC= build/mutant-cpu/kernels-test
	@build/mutant-cpu/kernels-test --mutants
test-race:
	@$(MAKE) --no-print-directory SAN=thread test

# The service under a real systemd: needs root, debootstrap and systemd-nspawn; says what it skips.
test-systemd: all
	@tests/systemd/run $(BUILD)

check:
	@.ci/deps clang-format clang-tidy
	@tests/check
FUZZ_SECONDS ?= 20
fuzz:
	@.ci/deps clang
	@tests/fuzz/run $(FUZZ_SECONDS)
bench: all
	@$(MAKE) --no-print-directory $(BENCH)
	@tests/bench/run $(BUILD)

# ---- ship ---------------------------------------------------------------------------------------------------
# Programs, GPU tests and benches with every shared library they need: runs on any x86-64 Linux with glibc >= 2.36.  100 MB;
# CUDA_ARCHS=90a, for one card, takes half of that.
BUNDLED := $(GPU) $(POISON) $(BENCH) $(GPU_BENCH) $(BUILD)/kernels-test $(BUILD)/kernels-test-mutant
bundle: deps
	@$(MAKE) --no-print-directory FAT=1 bundle-fat
bundle-fat: programs
	@$(MAKE) --no-print-directory $(BUNDLED)
	@tests/bundle $(BUILD) build/bundle $(filter-out %.a,$(PROGRAMS)) $(BUNDLED)
	@cp tests/gpu/sanitize build/bundle/

$(if $(filter-out /%,$(PREFIX)),$(error PREFIX: $(PREFIX) is not absolute; a path begins with /))
BIN := $(DESTDIR)$(PREFIX)/bin
LIB := $(DESTDIR)$(PREFIX)/lib
INC := $(DESTDIR)$(PREFIX)/include/kvstride
ETC := $(DESTDIR)/etc/kvstrided
UNITS := $(LIB)/systemd/system
DOC := $(DESTDIR)$(PREFIX)/share/doc/kvstride
DROPIN := $(UNITS)/kvstrided.service.d
UNIT_FILES := kvstrided.service kvstrided.socket kvstrided-admin.socket kvstrided-tenant@.socket
# From 254 on systemd can keep the stored pool over a stop; an older one would complain of the setting.
PRESERVE ?= $(shell [ "$$(systemctl --version 2>/dev/null | awk 'NR == 1 { print int($$2) }')" -ge 254 ] 2>/dev/null && echo yes)
# /etc is root's, whatever PREFIX is: a user's own installation has the rest.
put_config = [ -e $(ETC)/kvstrided.json ] || { install -d $(ETC) && install -m 644 config/kvstrided.json $(ETC); } || \
	    { [ -z "$(DESTDIR)" ] && [ "$$(id -u)" != 0 ] && \
	      echo "note: without $(ETC)/kvstrided.json the daemon has its built-in defaults; --config FILE takes another"; }
# What is left to do as root; systemd does not look into every PREFIX by itself.
ENABLE := kvstrided.socket kvstrided-admin.socket kvstrided
say_next = if [ -n "$(DESTDIR)" ]; then :; elif [ "$$(id -u)" != 0 ]; then \
	      echo "next: $(BIN)/kvstrided --help; the service and its units take an installation by root"; \
	    elif [ -n "$(filter /usr /usr/local,$(PREFIX))" ]; then \
	      echo "next: systemd-sysusers && systemd-tmpfiles --create && systemctl daemon-reload && systemctl enable --now $(ENABLE)"; \
	    else \
	      echo "next: systemd-sysusers $(LIB)/sysusers.d/kvstrided.conf && systemd-tmpfiles --create $(LIB)/tmpfiles.d/kvstrided.conf &&" \
	           "systemctl link $(addprefix $(UNITS)/,$(UNIT_FILES)) && systemctl enable --now $(ENABLE)"; fi
# What a program needs that launches kernels itself: kvstride/kernels.h, a library, a pkg-config file.
KERNELS_H = $(filter kernels/%,$(filter-out kernels/kernels.h,$(shell $(CC) -I. -MM kernels/kernels.h)))
install-kernels: $(BUILD)/$(KERNELS_SO) $(BUILD)/libkvstride-kernels.a
	install -d $(LIB)/pkgconfig $(INC)/kernels $(INC)/proto
	install -m 755 $(BUILD)/$(KERNELS_SO) $(LIB)
	ln -sf $(KERNELS_SO) $(LIB)/libkvstride-kernels.so
	install -m 644 $(BUILD)/libkvstride-kernels.a $(LIB)
	install -m 644 kernels/kernels.h $(INC)
	install -m 644 $(KERNELS_H) $(INC)/kernels
	install -m 644 proto/status.h proto/layout.h $(INC)/proto
	sed 's|@PREFIX@|$(PREFIX)|; s|@VERSION@|$(VERSION)|; s|@CUDA_LIBS@|$(CUDA_LIBS)|' kernels/kvstride-kernels.pc.in \
	    > $(LIB)/pkgconfig/kvstride-kernels.pc
install: all install-kernels
	install -d $(BIN) $(LIB)/pkgconfig $(INC)/proto $(UNITS) $(LIB)/sysusers.d $(LIB)/tmpfiles.d $(DOC)/examples
	install -m 755 $(BUILD)/kvstrided $(BUILD)/kvstridectl $(BIN)
	install -m 755 $(BUILD)/$(SO) $(LIB)
	ln -sf $(SO) $(LIB)/libkvstride.so
	install -m 644 $(BUILD)/libkvstride.a $(LIB)
	install -m 644 proto/client/kvstride.h proto/client/kvstride_pack.h $(INC)
	install -m 644 proto/status.h proto/layout.h proto/backend.h $(INC)/proto
	install -m 644 proto/PROTOCOL.md $(DOC)
	sed 's|/usr/local/|$(PREFIX)/|g; s|PREFIX=/usr/local|PREFIX=$(PREFIX)|; s|the \[README\](../README.md)|the README of the source tree|' \
	    systemd/README.md > $(DOC)/operating.md && chmod 644 $(DOC)/operating.md
	install -m 644 systemd/examples/* config/kvstrided.schema.json $(DOC)/examples
	sed 's|@PREFIX@|$(PREFIX)|; s|@VERSION@|$(VERSION)|' proto/client/kvstride.pc.in > $(LIB)/pkgconfig/kvstride.pc
	@$(put_config)
	for u in $(UNIT_FILES); do sed 's|/usr/local/|$(PREFIX)/|g' systemd/$$u > $(UNITS)/$$u && chmod 644 $(UNITS)/$$u || exit 1; done
	$(if $(filter yes,$(PRESERVE)),install -d $(DROPIN) && install -m 644 systemd/examples/preserve.conf $(DROPIN))
	install -m 644 systemd/sysusers.d/kvstrided.conf $(LIB)/sysusers.d/kvstrided.conf
	install -m 644 systemd/tmpfiles.d/kvstrided.conf $(LIB)/tmpfiles.d/kvstrided.conf
	@[ -n "$(DESTDIR)" ] || ldconfig 2>/dev/null || true
	@$(say_next)
uninstall:
	rm -f $(BIN)/kvstrided $(BIN)/kvstridectl $(LIB)/$(SO) $(LIB)/libkvstride.so $(LIB)/libkvstride.a
	rm -f $(LIB)/$(KERNELS_SO) $(LIB)/libkvstride-kernels.so $(LIB)/libkvstride-kernels.a $(LIB)/pkgconfig/kvstride-kernels.pc
	rm -f $(LIB)/pkgconfig/kvstride.pc $(addprefix $(UNITS)/,$(UNIT_FILES)) $(LIB)/sysusers.d/kvstrided.conf
	rm -f $(LIB)/tmpfiles.d/kvstrided.conf $(DROPIN)/preserve.conf
	[ ! -d $(DROPIN) ] || rmdir --ignore-fail-on-non-empty $(DROPIN)
	rm -rf $(INC) $(DOC)
	@[ ! -e $(ETC) ] || echo "kept: $(ETC)"
clean:
	rm -rf build

-include $(shell find build -path build/systemd -prune -o -name '*.d' -type f -print 2>/dev/null)
.PHONY: all programs bundle-fat deps demo run test test-programs mutation FORCE test-race test-systemd check fuzz bench bundle install install-kernels uninstall clean
