package node

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
)

// runtimeScheme is the prefix of the node's container runtime version; the agent's release follows
// it. 'kctl cluster upgrade' parses the version.
const runtimeScheme = "keelson://"

// systemInfo returns information about the machine. Unavailable fields are empty.
func systemInfo(release string) v1.NodeSystemInfo {
	text := func(path string) string {
		b, err := os.ReadFile(path)
		if err != nil {
			return ""
		}
		return strings.TrimSpace(string(b))
	}
	info := v1.NodeSystemInfo{
		MachineID: text("/etc/machine-id"), SystemUUID: text("/sys/class/dmi/id/product_uuid"),
		BootID:        text("/proc/sys/kernel/random/boot_id"),
		KernelVersion: text("/proc/sys/kernel/osrelease"), OSImage: osImage(),
		ContainerRuntimeVersion: runtimeScheme + strings.TrimPrefix(cmp.Or(release, Version), "v"),
		KubeletVersion:          Version, OperatingSystem: runtime.GOOS, Architecture: runtime.GOARCH,
	}
	if info.SystemUUID == "" {
		info.SystemUUID = info.MachineID
	}
	info.Swap = parseSwap(text("/proc/meminfo"))
	return info
}

// parseSwap returns the size of the machine's swap from text, the content of /proc/meminfo. It
// returns nil if the machine has no swap, as in the status of a kubelet.
func parseSwap(text string) *v1.NodeSwapStatus {
	for line := range strings.Lines(text) {
		c := strings.Fields(line)
		if len(c) < 2 || c[0] != "SwapTotal:" {
			continue
		}
		if n, err := strconv.ParseInt(c[1], 10, 64); err == nil && n > 0 && n <= math.MaxInt64>>10 {
			return &v1.NodeSwapStatus{Capacity: new(n << 10)}
		}
	}
	return nil
}

func osImage() string {
	f, err := os.Open("/etc/os-release")
	if err != nil {
		return ""
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		if v, ok := strings.CutPrefix(s.Text(), "PRETTY_NAME="); ok {
			return strings.Trim(v, `"'`)
		}
	}
	return ""
}

// primaryAddress returns the IPv4 address of the default route's interface. If there is no such
// address, it returns the first global unicast address.
func primaryAddress() (string, error) {
	ifaces, err := net.Interfaces()
	if err != nil {
		return "", fmt.Errorf("listing addresses: %w", err)
	}
	preferred := defaultInterface()
	found := ""
	for _, i := range ifaces {
		if i.Flags&net.FlagUp == 0 || i.Flags&net.FlagLoopback != 0 {
			continue
		}
		addrs, err := i.Addrs()
		if err != nil {
			continue
		}
		for _, a := range addrs {
			n, ok := a.(*net.IPNet)
			if !ok || !n.IP.IsGlobalUnicast() {
				continue
			}
			if i.Name == preferred && n.IP.To4() != nil {
				return n.IP.String(), nil
			}
			if found == "" {
				found = n.IP.String()
			}
		}
	}
	if found == "" {
		return "", errors.New("the machine has no address except loopback")
	}
	return found, nil
}

// defaultInterface returns the interface of the IPv4 default route, or "".
func defaultInterface() string {
	f, err := os.Open("/proc/net/route")
	if err != nil {
		return ""
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		if c := strings.Fields(s.Text()); len(c) > 7 && c[1] == "00000000" && c[7] == "00000000" {
			return c[0]
		}
	}
	return ""
}

// machineMemory returns the total and the available memory of the machine in bytes. available is
// the kernel's estimate of the memory for new programs without swapping (MemAvailable). It includes
// files in the active page cache, which the kubelet counts as used. If it did not include them, a
// node with much file I/O would evict pods because of its page cache.
func machineMemory() (total, available int64, err error) {
	raw, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, 0, err
	}
	return parseMeminfo(string(raw))
}

// parseMeminfo returns the total and the available memory in bytes from text, the content of
// /proc/meminfo.
func parseMeminfo(text string) (total, available int64, err error) {
	lines := map[string]int64{"MemTotal:": -1, "MemAvailable:": -1}
	for line := range strings.Lines(text) {
		c := strings.Fields(line)
		if len(c) < 2 {
			continue
		}
		if _, wanted := lines[c[0]]; !wanted {
			continue
		}
		n, err := strconv.ParseInt(c[1], 10, 64)
		if err != nil {
			return 0, 0, fmt.Errorf("/proc/meminfo: %w", err)
		}
		lines[c[0]] = n << 10
	}
	for name, n := range lines {
		if n < 0 {
			return 0, 0, fmt.Errorf("/proc/meminfo has no %s", strings.TrimSuffix(name, ":"))
		}
	}
	return lines["MemTotal:"], min(lines["MemTotal:"], lines["MemAvailable:"]), nil
}

// cgroupMemory returns the memory usage of a cgroup in bytes, without page cache and reclaimable
// slab memory. cgroup is its path from the root of the hierarchy.
func cgroupMemory(cgroup string) (int64, error) {
	for _, c := range []struct {
		dir, usage string
		spare      []string
	}{
		{filepath.Join("/sys/fs/cgroup", cgroup), "memory.current",
			[]string{"inactive_file", "active_file", "slab_reclaimable"}},
		{filepath.Join("/sys/fs/cgroup/memory", cgroup), "memory.usage_in_bytes",
			[]string{"total_inactive_file", "total_active_file"}},
	} {
		b, err := os.ReadFile(filepath.Join(c.dir, c.usage))
		if err != nil {
			continue
		}
		used, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
		if err != nil {
			return 0, err
		}
		stat, err := os.ReadFile(filepath.Join(c.dir, "memory.stat"))
		if err != nil {
			return 0, err
		}
		return subtractSpare(used, string(stat), c.spare), nil
	}
	return 0, fmt.Errorf("no memory cgroup %s", cgroup)
}

// subtractSpare returns used minus the values of the keys reclaimable in stat, the content of a
// cgroup's memory.stat. These keys count the page cache, including its active part, and reclaimable
// slab memory. MemAvailable of the machine includes the same.
func subtractSpare(used int64, stat string, reclaimable []string) int64 {
	for line := range strings.Lines(stat) {
		c := strings.Fields(line)
		if len(c) != 2 || !slices.Contains(reclaimable, c[0]) {
			continue
		}
		if n, err := strconv.ParseInt(c[1], 10, 64); err == nil {
			used -= n
		}
	}
	return max(0, used)
}

// existingPath returns path if it exists, and otherwise its nearest existing parent directory.
func existingPath(path string) string {
	for path != "/" && path != "." && path != "" {
		if _, err := os.Stat(path); err == nil {
			return path
		}
		path = filepath.Dir(path)
	}
	return "/"
}

// diskSpace returns the total and the free bytes of the file system that contains path.
func diskSpace(path string) (total, free int64, err error) {
	var st unix.Statfs_t
	if err := unix.Statfs(existingPath(path), &st); err != nil {
		return 0, 0, err
	}
	return int64(st.Blocks) * st.Bsize, int64(st.Bavail) * st.Bsize, nil
}

// diskInodes returns the total and the free inodes of the file system that contains path. Both are
// 0 for a file system that does not report inodes.
func diskInodes(path string) (total, free int64, err error) {
	var st unix.Statfs_t
	if err := unix.Statfs(existingPath(path), &st); err != nil {
		return 0, 0, err
	}
	return int64(st.Files), int64(st.Ffree), nil
}

// allPIDs returns the limit of processes and threads for all pods together. It is nine tenths of
// the kernel's limit, so that the machine can always start its own processes. 0 means unknown.
func allPIDs() int64 {
	least := int64(0)
	for _, f := range []string{"/proc/sys/kernel/pid_max", "/proc/sys/kernel/threads-max"} {
		raw, err := os.ReadFile(f)
		if err != nil {
			continue
		}
		if n, err := strconv.ParseInt(strings.TrimSpace(string(raw)), 10, 64); err == nil && (least == 0 || n < least) {
			least = n
		}
	}
	return least / 10 * 9
}

// pidsAvailable returns the percentage of the machine's process IDs that are free.
func pidsAvailable() (int64, error) {
	limit, err := os.ReadFile("/proc/sys/kernel/pid_max")
	if err != nil {
		return 0, err
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(limit)), 10, 64)
	if err != nil || n == 0 {
		return 0, fmt.Errorf("pid_max: %w", err)
	}
	load, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return 0, err
	}
	f := strings.Fields(string(load))
	if len(f) < 4 {
		return 0, errors.New("/proc/loadavg has too few fields")
	}
	_, threads, _ := strings.Cut(f[3], "/")
	used, err := strconv.ParseInt(threads, 10, 64)
	if err != nil {
		return 0, err
	}
	return 100 - min(100, used*100/n), nil
}
