// Package vm boots Debian machines with systemd and cgroup v2 under qemu, on a network of their own that nothing leaves,
// and installs a cluster on them as its users do: 'make test-vm'. It has tests only.
package vm
