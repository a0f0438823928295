package lab

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// leftoverHosts returns a Host, in which only the name is set, for each namespace that a lab has
// pinned on this machine. Down uses it when the configuration of the lab is lost.
func leftoverHosts() []Host {
	var out []Host
	seen := map[string]bool{}
	add := func(name string) {
		if name != "" && !seen[name] {
			seen[name] = true
			out = append(out, Host{Name: name})
		}
	}
	pins, _ := filepath.Glob("/run/netns/" + root + "-*")
	for _, p := range pins {
		add(hostOfNetNS(root, filepath.Base(p), labExists))
	}
	pins, _ = filepath.Glob(filepath.Join(runRoot, "ns", "*.mnt"))
	for _, p := range pins {
		add(strings.TrimSuffix(filepath.Base(p), ".mnt"))
	}
	return out
}

// hostOfNetNS returns the name of the host to which a network namespace belongs. root is the prefix
// of the lab's names; see Root. It returns "" if the namespace belongs to another lab. The function
// exists reports whether there is a lab with a given root. For example, keelson-lab@a-b-w1 belongs
// to host w1 if a lab "a-b" exists, and otherwise to host b-w1 of lab "a".
func hostOfNetNS(root, namespace string, exists func(root string) bool) string {
	host, ok := strings.CutPrefix(namespace, root+"-")
	if !ok {
		return ""
	}
	for i, c := range host {
		if c == '-' && exists(root+"-"+host[:i]) {
			return ""
		}
	}
	return host
}

// labExists reports whether a lab with this root (see Root) has a state folder on this machine, or
// a folder with pinned namespaces.
func labExists(root string) bool {
	for _, dir := range []string{"/var/lib", "/run"} {
		if _, err := os.Stat(filepath.Join(dir, root)); err == nil {
			return true
		}
	}
	return false
}

// unmountBelow unmounts all mounts at or below dir in this mount namespace, the deepest first.
func unmountBelow(dir string) error {
	raw, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	var points []string
	for line := range strings.Lines(string(raw)) {
		f := strings.Fields(line)
		if len(f) > 4 && isAtOrBelow(f[4], dir) {
			points = append(points, f[4])
		}
	}
	slices.Reverse(points)
	var errs []error
	for _, p := range points {
		if err := unix.Unmount(p, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) &&
			!errors.Is(err, unix.ENOENT) {
			errs = append(errs, fmt.Errorf("unmounting %s: %w", p, err))
		}
	}
	return errors.Join(errs...)
}

// isAtOrBelow reports whether the path is dir, or is in dir or one of its subfolders.
func isAtOrBelow(path, dir string) bool { return path == dir || strings.HasPrefix(path, dir+"/") }

// ListLeftovers returns descriptions of the namespaces, cgroups, processes, mounts, and folders of
// a lab on this machine. The result is empty after Down.
func ListLeftovers() []string {
	var out []string
	for _, h := range leftoverHosts() {
		out = append(out, "namespace of host "+h.Name)
	}
	for _, dir := range cgroupDirs(CgroupRoot()) {
		out = append(out, "cgroup "+dir)
	}
	for _, pid := range cgroupPIDs(CgroupRoot()) {
		out = append(out, fmt.Sprintf("process %d", pid))
	}
	if raw, err := os.ReadFile("/proc/self/mountinfo"); err == nil {
		for line := range strings.Lines(string(raw)) {
			if f := strings.Fields(line); len(f) > 4 && (isAtOrBelow(f[4], runRoot) || isAtOrBelow(f[4], stateRoot)) {
				out = append(out, "mount "+f[4])
			}
		}
	}
	for _, dir := range []string{runRoot, stateRoot} {
		if _, err := os.Stat(dir); err == nil {
			out = append(out, "folder "+dir)
		}
	}
	return out
}

// lastLines returns the last n lines of a file, or the text of the error if the file cannot be
// read.
func lastLines(file string, n int) string {
	raw, err := os.ReadFile(file)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimRight(string(raw), "\n"), "\n")
	if len(lines) > n {
		lines = lines[len(lines)-n:]
	}
	return strings.Join(lines, "\n")
}
