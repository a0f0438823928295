// Package vm boots Debian machines with systemd and cgroup v2 under qemu, on an isolated network.
// It installs a cluster on them as users do, with "kctl cluster up" over ssh: "make test-vm". "make
// test-vm-docs" runs the command lines of the operators' pages on such machines. The package has
// only tests.
package vm
