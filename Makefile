# Keelson. The two commands of the README: make up, make test.
SHELL := /bin/bash
PREFIX ?= /usr/local
ifndef VERSION
VERSION := $(shell scripts/version)
endif
GO ?= $(shell scripts/setup go)
export GO
BIN := $(CURDIR)/bin
LDFLAGS := -s -w -X main.version=$(VERSION) -X keelson.dev/keelson/kctl.Version=$(VERSION)
# Without the pages of golang.org/x/net/trace, which nobody serves here: they render templates, which may call any method by
# its name, and so no method of any type could be left out of a program. test/soak sees to it.
TAGS := grpcnotrace

.PHONY: dist releases test-vm test-vm-docs vm-up vm-down bench-net up down test build setup install images unit e2e attack clients upgrade guest fault chaos soak soak-idle bench bench-store bench-sched bench-api bench-node bench-storage bench-scale bench-failover proto fmt vet clean

up: build ## a lab cluster with the example running; says so when it is up already, starts it again when it is down
	@scripts/up $(BIN) $(PREFIX)

down: ## take the lab away
	@scripts/down $(BIN) $(PREFIX)

test: build ## unit, integration and end-to-end tests
	@scripts/test

setup: ## what is missing of the machine's packages
	@scripts/setup

build: setup ## the binaries, the CNI plugins and the images, below bin/
	@scripts/build $(BIN) '$(VERSION)' '$(TAGS)' '$(LDFLAGS)'

install: build ## the binaries to $(PREFIX)/bin
	@scripts/install $(BIN) $(PREFIX)

dist: setup ## what machines are installed from, in bin/dist: tarballs, Debian packages, images, lists of parts, sums; ARCHES=amd64: not arm64
	@scripts/dist '$(VERSION)' '$(TAGS)' '$(LDFLAGS)'

unit: ; @scripts/test unit
e2e: build ; @scripts/test e2e
attack: build ; @scripts/test attack
clients: build ## Helm, an operator and client libraries of other languages against the lab
	@scripts/test clients

upgrade: build ## the release before becomes this one in a lab, and goes back, while it serves
	@scripts/test upgrade

guest: build ## what needs cgroup v2 and every capability, on a kernel of its own under qemu
	@scripts/test guest
test-vm test-vm-docs: releases
test-vm: ## Debian machines with systemd under qemu, installed from what 'make dist' makes: faults, and nothing left; no part of 'make test'; MACHINES="cp1 w1" has fewer than five
	@scripts/test vm
test-vm-docs: ## the command lines of the pages about installation, operation, upgrades, recovery and security, on such machines; no part of 'make test'; KEEP=DIR keeps them
	@scripts/test vmdocs
releases: build
	@rm -rf $(BIN)/dist $(BIN)/next && ARCHES=amd64 $(MAKE) --no-print-directory dist
	@ARCHES=amd64 DIST=$(BIN)/next $(MAKE) --no-print-directory dist VERSION='$(VERSION)-next'
vm-up: build ## Debian machines under qemu, left running for a person, with a cluster on them by 'kctl cluster up'; MACHINES="cp1 w1" says which
	@rm -rf $(BIN)/dist && ARCHES=amd64 $(MAKE) --no-print-directory dist
	@scripts/vm-up
vm-down: ## take them away, with their disks
	@scripts/vm-up down
fault: build ## break it in every way; DURATION=10m: the store for that long, SEED=n: by another plan
	@scripts/test fault
chaos: build ## leaders are killed, frozen, cut off and handed over under applies, watches, rollouts and Service requests; DURATION=5m, SEED=n has a run again
	@scripts/test chaos
soak: setup ## a control plane's memory before and after 10,000 pods came and went, and tests with more repetitions than 'make test' has; ARGS="-soak.profiles=DIR" keeps what held the memory
	@$(GO) test -count=1 -timeout 30m -v ./test/soak -run Churn -soak.pods=10000 $(ARGS)
	@scripts/test repeated

soak-idle: setup ## a control plane's memory in an hour in which nothing changes
	@$(GO) test -count=1 -timeout 70m -v ./test/soak -run Idle -soak.idle=1h $(ARGS)

bench: build ## a short form of every benchmark, as a table
	@scripts/bench
bench-store: setup ## the store beside etcd, in full; ARGS="-help" tells the flags
	@scripts/bench store $(ARGS)
bench-sched: setup ; @scripts/bench -only sched,bound $(ARGS) ## the scheduler alone, and pods created until bound in three replicas on loopback
bench-api: build ; @scripts/bench -only api
bench-node: build ; @scripts/bench -only node
bench-storage: build ; @scripts/bench -only storage $(ARGS) ## a claim created until its pod is Ready beside a pod with an emptyDir, in turns and 100 at once
bench-scale: setup ## a Deployment of 5,000 while leaders change, and a cluster of many nodes at rest, in churn and after its leader's death; ARGS="-nodes 4800 -pods 50000" its size
	@scripts/bench scale $(ARGS)
bench-failover: setup ## the leader is killed under load, 100 times: how long until controllers, scheduler, agents and watches go on; ARGS="-kills 20" fewer
	@scripts/bench scale -only failover $(ARGS)
bench-net: setup ## what Service rules cost, to write and to traffic; ARGS=dns: the agent's DNS beside CoreDNS; ARGS=policies: with 1,000 network policies beside none; ARGS="services -help" tells the flags
	@scripts/bench net $(ARGS)
bench-kubectl: ## how long kubectl takes to list 1,000 pods, to explain all of a pod, to apply 100 objects: medians, by version
	@$(GO) test -count=1 -run '^$$' -bench Kubectl -benchtime 7x ./controlplane/apiserver

fmt: ; gofmt -l -w .
vet: ; $(GO) vet ./...
clean: ; rm -rf $(BIN)

proto: ## regenerate what is below proto/ (needs protoc, protoc-gen-go, protoc-gen-go-grpc)
	protoc --go_out=. --go_opt=module=keelson.dev/keelson --go-grpc_out=. --go-grpc_opt=module=keelson.dev/keelson proto/*/v1/*.proto
