package lab

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

func needRoot() error {
	if os.Geteuid() != 0 {
		return errors.New("lab: root is needed to make namespaces and cgroups: run it with sudo")
	}
	return nil
}

// Preflight returns an error if this machine lacks a requirement of the lab, such as a kernel
// module, a program, or a free port. The error contains the remedy in one line. Preflight may load
// kernel modules; it changes nothing else.
func (l *Lab) Preflight() error {
	if err := needRoot(); err != nil {
		return err
	}
	kernel, err := os.ReadFile("/proc/filesystems")
	if err != nil {
		return fmt.Errorf("lab: reading the kernel's file systems: %w", err)
	}
	if !strings.Contains(string(kernel), "\toverlay\n") {
		if exec.Command("modprobe", "overlay").Run() != nil {
			return fmt.Errorf("lab: the kernel has no overlayfs (images need it): load it with 'modprobe overlay' or " +
				"use a kernel with CONFIG_OVERLAY_FS")
		}
	}
	if _, err := os.Stat("/proc/sys/net/bridge"); err != nil {
		if exec.Command("modprobe", "br_netfilter").Run() != nil {
			return fmt.Errorf("lab: the kernel has no br_netfilter (Services need it): load it with 'modprobe " +
				"br_netfilter' or use a kernel with CONFIG_BRIDGE_NETFILTER")
		}
	}
	if len(cgroupHierarchies()) == 0 {
		return fmt.Errorf("lab: no writable cgroup hierarchy below %s: mount cgroup v2 there ('mount -t cgroup2 none "+
			"%s')", cgroupMount, cgroupMount)
	}
	for _, tool := range []string{"nsenter", "unshare", "mount", "hostname"} {
		if _, err := exec.LookPath(tool); err != nil {
			return fmt.Errorf("lab: %s is missing: install it with 'apt-get install util-linux mount hostname'", tool)
		}
	}
	if _, err := exec.LookPath("nft"); err != nil {
		return fmt.Errorf("lab: nft is missing (Services are nftables rules): install it with 'apt-get " +
			"install nftables'")
	}
	for _, b := range []string{"keelson-controlplane", "keelson-agent", "keelson-shim", "keelson-oci",
		"keelson-pause", "kctl"} {
		if _, err := os.Stat(l.hosts().binPath(b)); err != nil {
			return fmt.Errorf("lab: %s is not in %s: build it with 'make build' or name its folder with --bin-dir", b,
				l.Config.BinDir)
		}
	}
	for _, h := range l.Config.Hosts {
		if h.BinDir == "" {
			continue
		}
		if err := checkPrograms(h.BinDir, h.Role); err != nil {
			return fmt.Errorf("lab: host %s: %w", h.Name, err)
		}
	}
	for _, p := range []string{"bridge", "host-local", "loopback", "portmap"} {
		if _, err := os.Stat(filepath.Join(l.Config.CNIBinDir, p)); err != nil {
			return fmt.Errorf("lab: CNI plugin %s is not in %s: build it with 'make build' or name its folder with "+
				"--cni-bin-dir", p, l.Config.CNIBinDir)
		}
	}
	probe, err := net.Listen("tcp", l.Config.Listen)
	if err != nil {
		return fmt.Errorf("lab: cannot listen on %s (%w): end what holds it ('ss -ltnp') or choose another with "+
			"--listen", l.Config.Listen, err)
	}
	return probe.Close()
}
