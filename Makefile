# Builds, tests and measures Keelson. `make help` lists the targets; scripts/ has what they run.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PREFIX ?= /usr/local
ifndef VERSION
VERSION := $(shell scripts/version)
endif
GO ?= $(shell scripts/setup go)
export GO
BIN := $(CURDIR)/bin
LDFLAGS := -s -w -X main.version=$(VERSION) -X keelson.dev/keelson/kctl.Version=$(VERSION)
# Leaves out the debug pages of golang.org/x/net/trace. They render templates, which may call any method by its name, and
# therefore keep the linker from removing unused methods. test/soak checks this.
TAGS := grpcnotrace

.PHONY: help up down build setup install dist releases clean proto fmt vet lint test unit e2e attack clients upgrade guest fault chaos soak soak-idle test-vm test-vm-docs vm-up vm-down bench bench-store bench-sched bench-api bench-node bench-storage bench-scale bench-failover bench-net bench-kubectl

# A line "##@ TEXT" is a heading of the help. The text after ## of a target is its help.
help: ## List the targets
	@awk -f scripts/help.awk $(firstword $(MAKEFILE_LIST))

##@ Run a cluster on this machine
up: build ## Start a lab cluster with an example, or restart a stopped one
	@scripts/up $(BIN) $(PREFIX)
down: ## Remove the lab cluster and the installed programs
	@scripts/down $(BIN) $(PREFIX)

##@ Build
build: setup ## Build the programs, the CNI plugins and the images in bin/
	@scripts/build $(BIN) '$(VERSION)' '$(TAGS)' '$(LDFLAGS)'
setup: ## Install the packages that the build needs, or list the missing ones
	@scripts/setup
install: build ## Copy the programs to PREFIX/bin; PREFIX is /usr/local by default
	@scripts/install $(BIN) $(PREFIX)
dist: setup ## Build a release in bin/dist, for ARCHES="amd64 arm64"
	@scripts/dist '$(VERSION)' '$(TAGS)' '$(LDFLAGS)'
releases: build ## Build the two releases that test-vm and test-vm-docs install
	@rm -rf $(BIN)/dist $(BIN)/next && ARCHES=amd64 $(MAKE) --no-print-directory dist
	@ARCHES=amd64 DIST=$(BIN)/next $(MAKE) --no-print-directory dist VERSION='$(VERSION)-next'
proto: ## Generate the Go code in proto/; needs protoc and its two Go plugins
	protoc --go_out=. --go_opt=module=keelson.dev/keelson --go-grpc_out=. --go-grpc_opt=module=keelson.dev/keelson proto/*/v1/*.proto
clean: ## Remove bin/
	rm -rf $(BIN)

##@ Check the code
fmt: ## Format all Go files
	gofmt -l -w .
vet: ## Run go vet on all packages
	$(GO) vet ./...
lint: ## Run golangci-lint; PKG='agent/volume/... internal/wait' checks some packages
	@PKG='$(value PKG)' scripts/lint

##@ Test
test: build ## Run the unit, integration and end-to-end tests
	@scripts/test
unit: ## Run the unit tests; PKG=internal/wait RUN=TestFor RACE=1 ARGS=-v runs some
	@PKG='$(value PKG)' RUN='$(value RUN)' RACE='$(RACE)' ARGS='$(value ARGS)' scripts/test unit
e2e: build ## Run the end-to-end tests in a lab cluster
	@scripts/test e2e
attack: build ## Run the tests with hostile clients, nodes and containers
	@scripts/test attack
clients: build ## Run Helm, an operator and client libraries against a lab cluster
	@scripts/test clients
upgrade: build ## Upgrade and downgrade a lab cluster between the previous release and this one
	@scripts/test upgrade
guest: build ## Run the tests for cgroup v2 and all capabilities, in a virtual machine
	@scripts/test guest
fault: build ## Run the fault tests; DURATION=10m SEED=n sets those of the store
	@scripts/test fault
chaos: build ## Kill, freeze and cut off leaders under load; DURATION=5m SEED=n
	@scripts/test chaos
soak: setup ## Measure a control plane's memory across 10,000 pods, and repeat tests
	@$(GO) test -count=1 -timeout 30m -v ./test/soak -run Churn -soak.pods=10000 $(ARGS)
	@scripts/test repeated
soak-idle: setup ## Measure a control plane's memory during one idle hour
	@$(GO) test -count=1 -timeout 70m -v ./test/soak -run Idle -soak.idle=1h $(ARGS)

##@ Test on virtual machines
test-vm: releases ## Test installation and faults on Debian machines; MACHINES="cp1 w1"
	@scripts/test vm
test-vm-docs: releases ## Run the command lines of the operators' pages on machines; KEEP=DIR
	@scripts/test vmdocs
vm-up: build ## Start Debian machines with a cluster and leave them running; MACHINES="cp1 w1"
	@rm -rf $(BIN)/dist && ARCHES=amd64 $(MAKE) --no-print-directory dist
	@scripts/vm-up
vm-down: ## Remove the machines of vm-up with their disks
	@scripts/vm-up down

##@ Measure
bench: build ## Run a short form of every benchmark and print a table
	@scripts/bench
bench-store: setup ## Compare the store with etcd; ARGS=-help lists the flags
	@scripts/bench store $(ARGS)
bench-sched: setup ## Measure the scheduler alone, and pods from created to bound
	@scripts/bench -only sched,bound $(ARGS)
bench-api: build ## Measure the API server
	@scripts/bench -only api
bench-node: build ## Measure pod starts on a node
	@scripts/bench -only node
bench-storage: build ## Measure the time from a created claim to a ready pod
	@scripts/bench -only storage $(ARGS)
bench-scale: setup ## Measure thousands of nodes and pods; ARGS="-nodes 4800 -pods 50000"
	@scripts/bench scale $(ARGS)
bench-failover: setup ## Kill the leader under load, and measure the outage; ARGS="-kills 20"
	@scripts/bench scale -only failover $(ARGS)
bench-net: setup ## Measure Services; ARGS=dns: names; ARGS=policies: network policies
	@scripts/bench net $(ARGS)
bench-kubectl: ## Measure kubectl list, explain and apply
	@$(GO) test -count=1 -run '^$$' -bench Kubectl -benchtime 7x ./test/kubectl
