// Package vm boots Debian machines with systemd and cgroup v2 under qemu, on a network of their own that nothing leaves,
// and makes a cluster of them as its users do, by 'kctl cluster up' over ssh: 'make test-vm'. It has tests only.
package vm
