// Package vm boots Debian machines with systemd and cgroup v2 under qemu, on a network of their own that nothing leaves,
// and makes a cluster of them as its users do, by 'kctl cluster up' over ssh: 'make test-vm'. 'make test-vm-docs' does there
// what the pages for operators say, by their own command lines. It has tests only.
package vm
