package containerspec

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/moby/sys/mountinfo"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/oci/bundle"
	"keelson.dev/keelson/internal/safepath"
)

// The paths of /proc and /sys that expose or change too much of the host. They are hidden or
// read-only, unless the request has its own lists.
var (
	maskedPaths = []string{"/proc/asound", "/proc/acpi", "/proc/interrupts", "/proc/kcore", "/proc/keys",
		"/proc/latency_stats", "/proc/timer_list", "/proc/timer_stats", "/proc/sched_debug", "/proc/scsi",
		"/sys/firmware", "/sys/devices/virtual/powercap"}
	readonlyPaths = []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"}
)

// EtcNames are the files of /etc that a sandbox provides to its containers.
var EtcNames = []string{"resolv.conf", "hostname", "hosts"}

// addMounts sets the container's mounts: kernel file systems, the sandbox's files, the image's
// volumes and the requested mounts. Mounts are sorted by depth, so that parents come first.
func (in *Input) addMounts(request *bundle.Create) error {
	requested := map[string]bool{}
	for _, m := range in.Config.GetMounts() {
		requested[filepath.Clean(m.GetContainerPath())] = true
	}
	mounts := in.kernelMounts()
	add := func(m specs.Mount) {
		if !requested[m.Destination] {
			mounts = append(mounts, m)
		}
	}
	for _, f := range EtcNames {
		options := []string{"rbind", "rprivate", "rw"}
		if in.securityContext().GetReadonlyRootfs() {
			options[2] = "ro"
		}
		add(specs.Mount{Destination: "/etc/" + f, Type: "bind", Source: filepath.Join(in.Dirs.Etc, f),
			Options: options})
	}
	shm := filepath.Join(in.Dirs.Sandbox, "shm")
	if in.Sandbox.GetLinux().GetSecurityContext().GetNamespaceOptions().GetIpc() == cri.NamespaceMode_NODE {
		shm = "/dev/shm"
	}
	add(specs.Mount{Destination: "/dev/shm", Type: "bind", Source: shm, Options: []string{"rbind", "rprivate", "rw"}})
	// With a writable root, image volumes stay in the container's upper layer.
	if in.securityContext().GetReadonlyRootfs() {
		for i, v := range in.Image.Volumes {
			v = filepath.Clean("/" + v)
			if requested[v] || v == "/" {
				continue
			}
			if request.Volumes == nil {
				request.Volumes = map[string]string{}
			}
			host := filepath.Join(in.Dirs.Volumes, strconv.Itoa(i))
			request.Volumes[v] = host
			mounts = append(mounts, specs.Mount{Destination: v, Type: "bind", Source: host,
				Options: []string{"rbind", "rprivate", "rw"}})
		}
	}
	for _, m := range in.Config.GetMounts() {
		sm, err := convertMount(m)
		if err != nil {
			return err
		}
		mounts = append(mounts, sm)
		switch m.GetPropagation() {
		case cri.MountPropagation_PROPAGATION_BIDIRECTIONAL:
			request.Spec.Linux.RootfsPropagation = "rshared"
		case cri.MountPropagation_PROPAGATION_HOST_TO_CONTAINER:
			if request.Spec.Linux.RootfsPropagation == "" {
				request.Spec.Linux.RootfsPropagation = "rslave"
			}
		}
	}
	slices.SortStableFunc(mounts, func(a, b specs.Mount) int {
		return strings.Count(filepath.Clean(a.Destination), "/") - strings.Count(filepath.Clean(b.Destination), "/")
	})
	request.Spec.Mounts = mounts
	return nil
}

func (in *Input) kernelMounts() []specs.Mount {
	access := "ro"
	if in.isPrivileged() {
		access = "rw"
	}
	return []specs.Mount{
		{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
		{Destination: "/dev", Type: "tmpfs", Source: "tmpfs",
			Options: []string{"nosuid", "strictatime", "mode=755", "size=65536k"}},
		{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"nosuid", "noexec", "nodev", access}},
		{Destination: "/dev/pts", Type: "devpts", Source: "devpts",
			Options: []string{"nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5",
				"max=" + strconv.Itoa(in.terminalLimit())}},
		{Destination: "/dev/mqueue", Type: "mqueue", Source: "mqueue", Options: []string{"nosuid", "noexec", "nodev"}},
		{Destination: "/sys/fs/cgroup", Type: "cgroup", Source: "cgroup",
			Options: []string{"nosuid", "noexec", "nodev", "relatime", access}},
	}
}

// defaultTerminals is the limit of pseudoterminals if the request has no limit.
const defaultTerminals = 256

// terminalLimit returns how many pseudoterminals the container may have open.
func (in *Input) terminalLimit() int {
	n, err := strconv.Atoi(in.Config.GetAnnotations()[agent.AnnotationTerminals])
	if err != nil || n < 1 {
		return defaultTerminals
	}
	return n
}

// convertMount converts one mount of the request. It creates the host path as a directory if it
// does not exist.
func convertMount(mount *cri.Mount) (specs.Mount, error) {
	fail := func(format string, args ...any) (specs.Mount, error) {
		return specs.Mount{}, fmt.Errorf("mount %s: %w", mount.GetContainerPath(), fmt.Errorf(format, args...))
	}
	if !filepath.IsAbs(mount.GetContainerPath()) {
		return fail("the path in the container is not absolute")
	}
	if mount.GetImage().GetImage() != "" {
		return fail("image volumes are not supported by this runtime")
	}
	if len(mount.GetUidMappings())+len(mount.GetGidMappings()) > 0 {
		return fail("id-mapped mounts are not supported by this runtime")
	}
	if !filepath.IsAbs(mount.GetHostPath()) {
		return fail("host path %q is not absolute", mount.GetHostPath())
	}
	if _, err := os.Stat(mount.GetHostPath()); errors.Is(err, os.ErrNotExist) {
		if err := os.MkdirAll(mount.GetHostPath(), 0o755); err != nil {
			return fail("create host path: %w", err)
		}
	} else if err != nil {
		return fail("host path: %w", err)
	}
	source, err := filepath.EvalSymlinks(mount.GetHostPath())
	if err != nil {
		return fail("host path: %w", err)
	}
	options := []string{"rbind"}
	switch mount.GetPropagation() {
	case cri.MountPropagation_PROPAGATION_BIDIRECTIONAL:
		options = append(options, "rshared")
	case cri.MountPropagation_PROPAGATION_HOST_TO_CONTAINER:
		options = append(options, "rslave")
	default:
		options = append(options, "rprivate")
	}
	switch {
	case mount.GetRecursiveReadOnly() && !mount.GetReadonly():
		return fail("recursive read-only needs read-only")
	case mount.GetRecursiveReadOnly():
		options = append(options, "ro", "rro")
	case mount.GetReadonly():
		options = append(options, "ro")
	default:
		options = append(options, "rw")
	}
	restrictions, err := mountRestrictions(source)
	if err != nil {
		return fail("options of the mount at the host path: %w", err)
	}
	options = append(options, restrictions...)
	return specs.Mount{Destination: filepath.Clean(mount.GetContainerPath()), Type: "bind", Source: source,
		Options: options}, nil
}

// mountRestrictions returns which of the options nosuid, nodev and noexec the mount at path has.
// The container's mount must repeat them, because libcontainer replaces the options of a bind
// mount. The result is empty for a path that is not a mount point. It is also empty for a tmpfs,
// because the node's tmpfs options are not meant for pods.
func mountRestrictions(path string) ([]string, error) {
	var st unix.Statx_t
	err := unix.Statx(unix.AT_FDCWD, path, unix.AT_STATX_DONT_SYNC, 0, &st) // does not contact a file server
	if err != nil || st.Attributes&unix.STATX_ATTR_MOUNT_ROOT == 0 {
		return nil, err
	}
	mounts, err := mountinfo.GetMounts(mountinfo.SingleEntryFilter(path))
	if err != nil || len(mounts) == 0 {
		return nil, err
	}
	top := mounts[len(mounts)-1]
	var restrictions []string
	for option := range strings.SplitSeq(top.Options, ",") {
		if slices.Contains([]string{"nosuid", "nodev", "noexec"}, option) && top.FSType != "tmpfs" {
			restrictions = append(restrictions, option)
		}
	}
	return restrictions, nil
}

// addDevices adds the requested devices, and all host devices for a privileged container.
func (in *Input) addDevices(linux *specs.Linux) error {
	if in.isPrivileged() {
		devs, err := hostDevices()
		if err != nil {
			return fmt.Errorf("list the host's devices: %w", err)
		}
		linux.Devices = devs
		linux.Resources.Devices = []specs.LinuxDeviceCgroup{{Allow: true, Access: "rwm"}}
	} else {
		linux.Resources.Devices = []specs.LinuxDeviceCgroup{{Allow: false, Access: "rwm"}}
	}
	for _, d := range in.Config.GetDevices() {
		access := d.GetPermissions()
		if access == "" {
			access = "rwm"
		}
		path, err := filepath.EvalSymlinks(d.GetHostPath())
		if err != nil {
			return fmt.Errorf("device %s: %w", d.GetHostPath(), err)
		}
		devs, rules, err := describeDevices(path, d.GetContainerPath(), access)
		if err != nil {
			return err
		}
		for _, dev := range devs { // a requested device replaces a host device with the same path
			linux.Devices = slices.DeleteFunc(linux.Devices, func(o specs.LinuxDevice) bool {
				return o.Path == dev.Path
			})
			linux.Devices = append(linux.Devices, dev)
		}
		if !in.isPrivileged() {
			linux.Resources.Devices = append(linux.Resources.Devices, rules...)
		}
	}
	return nil
}

// addProfiles sets the masked and read-only paths, and the seccomp and AppArmor profiles.
func (in *Input) addProfiles(request *bundle.Create) error {
	sc := in.securityContext()
	if !in.isPrivileged() {
		request.Spec.Linux.MaskedPaths, request.Spec.Linux.ReadonlyPaths = sc.GetMaskedPaths(), sc.GetReadonlyPaths()
		if request.Spec.Linux.MaskedPaths == nil {
			request.Spec.Linux.MaskedPaths = maskedPaths
		}
		if request.Spec.Linux.ReadonlyPaths == nil {
			request.Spec.Linux.ReadonlyPaths = readonlyPaths
		}
		if err := in.addSeccomp(request); err != nil {
			return err
		}
	}
	if p := sc.GetApparmor(); p.GetProfileType() == cri.SecurityProfile_Localhost {
		if err := in.Host.checkAppArmorProfile(p.GetLocalhostRef()); err != nil {
			return err
		}
		request.Spec.Process.ApparmorProfile = p.GetLocalhostRef()
	}
	return nil
}

// maxProfile is the maximum number of bytes of a seccomp profile file.
const maxProfile = 1 << 20

func (in *Input) addSeccomp(request *bundle.Create) error {
	p := in.securityContext().GetSeccomp()
	if p == nil {
		return nil
	}
	switch p.GetProfileType() {
	case cri.SecurityProfile_RuntimeDefault:
		request.DefaultSeccomp = true
	case cri.SecurityProfile_Localhost:
		ref := p.GetLocalhostRef()
		// Requests may contain the path relative to the directory, or the full path.
		ref = strings.TrimPrefix(ref, in.Dirs.Seccomp+"/")
		f, err := safepath.OpenRegularInRoot(in.Dirs.Seccomp, ref)
		if err != nil {
			return fmt.Errorf("seccomp profile %q: %w", ref, err)
		}
		defer f.Close()
		data, err := io.ReadAll(io.LimitReader(f, maxProfile))
		if err != nil {
			return fmt.Errorf("seccomp profile %q: %w", ref, err)
		}
		var s specs.LinuxSeccomp
		if err := json.Unmarshal(data, &s); err != nil {
			return fmt.Errorf("seccomp profile %q: %w", ref, err)
		}
		request.Spec.Linux.Seccomp = &s
	}
	return nil
}
