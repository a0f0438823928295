package containerspec

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// Host are the properties of the host that influence a container's spec.
type Host struct {
	BootID       string
	unified      bool     // cgroup v2
	SwapFile     bool     // cgroup v2 can limit swap
	caps         []string // capabilities that this process can grant
	LowerOOM     bool     // oom_score_adj may be lowered
	OOMScoreAdj  int      // oom_score_adj of this process
	maxFiles     uint64   // hard limit of open files
	AppArmor     bool
	profilesFile string // file that lists the loaded AppArmor profiles
}

// checkAppArmorProfile returns an error if a container cannot use the AppArmor profile.
func (h Host) checkAppArmorProfile(profile string) error {
	if !h.AppArmor {
		return fmt.Errorf("AppArmor profile %q: AppArmor is not enabled on this node", profile)
	}
	loaded, err := os.ReadFile(h.profilesFile)
	if err != nil {
		return fmt.Errorf(
			"AppArmor profile %q: the node's list of profiles cannot be read (is securityfs mounted?): %w",
			profile, err)
	}
	// "unconfined" means no profile. The list does not contain profiles of other policy namespaces
	// (":...").
	if profile == "unconfined" || strings.HasPrefix(profile, ":") {
		return nil
	}
	for line := range strings.Lines(string(loaded)) { // NAME (MODE)
		if i := strings.LastIndex(line, " ("); i >= 0 && line[:i] == profile {
			return nil
		}
	}
	return fmt.Errorf("AppArmor profile %q is not loaded on this node: load it there with apparmor_parser", profile)
}

// DetectHost returns the properties of this host. unified is true if the host uses cgroup v2.
func DetectHost(unified bool) (Host, error) {
	h := Host{unified: unified, BootID: BootID(), maxFiles: 1024,
		profilesFile: "/sys/kernel/security/apparmor/profiles"}
	st, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return h, err
	}
	for _, line := range strings.Split(string(st), "\n") {
		if hex, ok := strings.CutPrefix(line, "CapPrm:\t"); ok {
			mask, err := strconv.ParseUint(hex, 16, 64)
			if err != nil {
				return h, fmt.Errorf("read own capabilities: %w", err)
			}
			for i, name := range capabilityNames {
				if mask&(1<<i) != 0 {
					h.caps = append(h.caps, name)
				}
			}
			h.LowerOOM = mask&(1<<unix.CAP_SYS_RESOURCE) != 0
		}
	}
	if b, err := os.ReadFile("/proc/self/oom_score_adj"); err == nil {
		h.OOMScoreAdj, _ = strconv.Atoi(strings.TrimSpace(string(b)))
	}
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &lim); err == nil {
		h.maxFiles = lim.Max
	}
	if b, err := os.ReadFile("/sys/module/apparmor/parameters/enabled"); err == nil {
		h.AppArmor = strings.HasPrefix(string(b), "Y")
	}
	return h, nil
}

// capabilityNames are the names of the capabilities in the order of their numbers.
var capabilityNames = []string{
	"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_DAC_READ_SEARCH", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_SETGID",
	"CAP_SETUID", "CAP_SETPCAP", "CAP_LINUX_IMMUTABLE", "CAP_NET_BIND_SERVICE", "CAP_NET_BROADCAST", "CAP_NET_ADMIN",
	"CAP_NET_RAW", "CAP_IPC_LOCK", "CAP_IPC_OWNER", "CAP_SYS_MODULE", "CAP_SYS_RAWIO", "CAP_SYS_CHROOT",
	"CAP_SYS_PTRACE", "CAP_SYS_PACCT", "CAP_SYS_ADMIN", "CAP_SYS_BOOT", "CAP_SYS_NICE", "CAP_SYS_RESOURCE",
	"CAP_SYS_TIME", "CAP_SYS_TTY_CONFIG", "CAP_MKNOD", "CAP_LEASE", "CAP_AUDIT_WRITE", "CAP_AUDIT_CONTROL",
	"CAP_SETFCAP", "CAP_MAC_OVERRIDE", "CAP_MAC_ADMIN", "CAP_SYSLOG", "CAP_WAKE_ALARM", "CAP_BLOCK_SUSPEND",
	"CAP_AUDIT_READ", "CAP_PERFMON", "CAP_BPF", "CAP_CHECKPOINT_RESTORE",
}

// describeDevice returns the OCI description of the device file at path, and the cgroup rule that
// allows access to it. inside is the device's path in the container.
func describeDevice(path, inside, access string) (specs.LinuxDevice, specs.LinuxDeviceCgroup, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return specs.LinuxDevice{}, specs.LinuxDeviceCgroup{}, fmt.Errorf("device %s: %w", path, err)
	}
	kind := ""
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFCHR:
		kind = "c"
	case unix.S_IFBLK:
		kind = "b"
	default:
		return specs.LinuxDevice{}, specs.LinuxDeviceCgroup{}, fmt.Errorf("%s is not a device", path)
	}
	major, minor := int64(unix.Major(uint64(st.Rdev))), int64(unix.Minor(uint64(st.Rdev)))
	mode := os.FileMode(st.Mode & 0o777)
	return specs.LinuxDevice{Path: inside, Type: kind, Major: major, Minor: minor, FileMode: &mode, UID: &st.Uid,
			GID: &st.Gid},
		specs.LinuxDeviceCgroup{Allow: true, Type: kind, Major: &major, Minor: &minor, Access: access}, nil
}

// describeDevices returns the OCI descriptions and cgroup rules of the device at path, or of all
// devices below path if it is a directory.
func describeDevices(path, inside, access string) (
	devs []specs.LinuxDevice, rules []specs.LinuxDeviceCgroup, err error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, nil, fmt.Errorf("device %s: %w", path, err)
	}
	if !info.IsDir() {
		d, rule, err := describeDevice(path, inside, access)
		return []specs.LinuxDevice{d}, []specs.LinuxDeviceCgroup{rule}, err
	}
	err = filepath.WalkDir(path, func(p string, e os.DirEntry, err error) error {
		if err != nil || e.Type()&os.ModeDevice == 0 {
			return err
		}
		rel, err := filepath.Rel(path, p)
		if err != nil {
			return err
		}
		d, rule, err := describeDevice(p, filepath.Join(inside, rel), access)
		if err == nil {
			devs, rules = append(devs, d), append(rules, rule)
		}
		return err
	})
	return devs, rules, err
}

// hostDevices returns the host's devices for a privileged container, except the standard devices
// that every container has.
func hostDevices() (devs []specs.LinuxDevice, err error) {
	ownNames := map[string]bool{"pts": true, "shm": true, "fd": true, "mqueue": true, "console": true, "ptmx": true}
	entries, err := os.ReadDir("/dev")
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if ownNames[e.Name()] || strings.HasPrefix(e.Name(), ".") || (!e.IsDir() && e.Type()&os.ModeDevice == 0) {
			continue
		}
		path := filepath.Join("/dev", e.Name())
		d, _, err := describeDevices(path, path, "rwm")
		if err != nil {
			return nil, err
		}
		devs = append(devs, d...)
	}
	return devs, nil
}

// BootID returns the ID of the current boot of the machine; "" if unknown.
func BootID() string {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}
