package oci

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

// The paths of /proc and /sys that expose or change too much. They are hidden or read-only unless
// the request has its own lists.
var (
	maskedPaths = []string{"/proc/asound", "/proc/acpi", "/proc/interrupts", "/proc/kcore", "/proc/keys",
		"/proc/latency_stats", "/proc/timer_list", "/proc/timer_stats", "/proc/sched_debug", "/proc/scsi",
		"/sys/firmware", "/sys/devices/virtual/powercap"}
	readonlyPaths = []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"}
)

// addMounts sets the container's mounts: kernel file systems, the sandbox's files, the image's
// volumes and the requested mounts. Mounts are sorted by depth, so that parents come first.
func (in *specInput) addMounts(b *bundle.Create) error {
	requested := map[string]bool{}
	for _, m := range in.config.GetMounts() {
		requested[filepath.Clean(m.GetContainerPath())] = true
	}
	mounts := in.kernelMounts()
	add := func(m specs.Mount) {
		if !requested[m.Destination] {
			mounts = append(mounts, m)
		}
	}
	for _, f := range etcNames {
		options := []string{"rbind", "rprivate", "rw"}
		if in.security().GetReadonlyRootfs() {
			options[2] = "ro"
		}
		add(specs.Mount{Destination: "/etc/" + f, Type: "bind", Source: filepath.Join(in.etc, f), Options: options})
	}
	shm := filepath.Join(in.sandboxFiles, "shm")
	if in.sandbox.GetLinux().GetSecurityContext().GetNamespaceOptions().GetIpc() == cri.NamespaceMode_NODE {
		shm = "/dev/shm"
	}
	add(specs.Mount{Destination: "/dev/shm", Type: "bind", Source: shm, Options: []string{"rbind", "rprivate", "rw"}})
	// With a writable root, image volumes stay in the container's upper layer.
	if in.security().GetReadonlyRootfs() {
		for i, v := range in.image.Volumes {
			v = filepath.Clean("/" + v)
			if requested[v] || v == "/" {
				continue
			}
			if b.Volumes == nil {
				b.Volumes = map[string]string{}
			}
			host := filepath.Join(in.volumes, strconv.Itoa(i))
			b.Volumes[v] = host
			mounts = append(mounts, specs.Mount{Destination: v, Type: "bind", Source: host, Options: []string{"rbind", "rprivate", "rw"}})
		}
	}
	for _, m := range in.config.GetMounts() {
		sm, err := requestedMount(m)
		if err != nil {
			return err
		}
		mounts = append(mounts, sm)
		switch m.GetPropagation() {
		case cri.MountPropagation_PROPAGATION_BIDIRECTIONAL:
			b.Spec.Linux.RootfsPropagation = "rshared"
		case cri.MountPropagation_PROPAGATION_HOST_TO_CONTAINER:
			if b.Spec.Linux.RootfsPropagation == "" {
				b.Spec.Linux.RootfsPropagation = "rslave"
			}
		}
	}
	slices.SortStableFunc(mounts, func(a, b specs.Mount) int {
		return strings.Count(filepath.Clean(a.Destination), "/") - strings.Count(filepath.Clean(b.Destination), "/")
	})
	b.Spec.Mounts = mounts
	return nil
}

func (in *specInput) kernelMounts() []specs.Mount {
	access := "ro"
	if in.privileged() {
		access = "rw"
	}
	return []specs.Mount{
		{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
		{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "strictatime", "mode=755", "size=65536k"}},
		{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"nosuid", "noexec", "nodev", access}},
		{Destination: "/dev/pts", Type: "devpts", Source: "devpts", Options: []string{"nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5",
			"max=" + strconv.Itoa(in.terminals())}},
		{Destination: "/dev/mqueue", Type: "mqueue", Source: "mqueue", Options: []string{"nosuid", "noexec", "nodev"}},
		{Destination: "/sys/fs/cgroup", Type: "cgroup", Source: "cgroup", Options: []string{"nosuid", "noexec", "nodev", "relatime", access}},
	}
}

// defaultTerminals is the limit of pseudoterminals if the request has no limit.
const defaultTerminals = 256

// terminals returns how many pseudoterminals the container may have open.
func (in *specInput) terminals() int {
	n, err := strconv.Atoi(in.config.GetAnnotations()[agent.AnnotationTerminals])
	if err != nil || n < 1 {
		return defaultTerminals
	}
	return n
}

// requestedMount converts one mount of the request. It creates the host path as a directory if it
// does not exist.
func requestedMount(m *cri.Mount) (specs.Mount, error) {
	fail := func(format string, args ...any) (specs.Mount, error) {
		return specs.Mount{}, fmt.Errorf("mount %s: %w", m.GetContainerPath(), fmt.Errorf(format, args...))
	}
	if !filepath.IsAbs(m.GetContainerPath()) {
		return fail("the path in the container is not absolute")
	}
	if m.GetImage().GetImage() != "" {
		return fail("image volumes are not supported by this runtime")
	}
	if len(m.GetUidMappings())+len(m.GetGidMappings()) > 0 {
		return fail("id-mapped mounts are not supported by this runtime")
	}
	if !filepath.IsAbs(m.GetHostPath()) {
		return fail("host path %q is not absolute", m.GetHostPath())
	}
	if _, err := os.Stat(m.GetHostPath()); errors.Is(err, os.ErrNotExist) {
		if err := os.MkdirAll(m.GetHostPath(), 0o755); err != nil {
			return fail("make host path: %w", err)
		}
	} else if err != nil {
		return fail("host path: %w", err)
	}
	source, err := filepath.EvalSymlinks(m.GetHostPath())
	if err != nil {
		return fail("host path: %w", err)
	}
	options := []string{"rbind"}
	switch m.GetPropagation() {
	case cri.MountPropagation_PROPAGATION_BIDIRECTIONAL:
		options = append(options, "rshared")
	case cri.MountPropagation_PROPAGATION_HOST_TO_CONTAINER:
		options = append(options, "rslave")
	default:
		options = append(options, "rprivate")
	}
	switch {
	case m.GetRecursiveReadOnly() && !m.GetReadonly():
		return fail("recursive read-only needs read-only")
	case m.GetRecursiveReadOnly():
		options = append(options, "ro", "rro")
	case m.GetReadonly():
		options = append(options, "ro")
	default:
		options = append(options, "rw")
	}
	has, err := restrictions(source)
	if err != nil {
		return fail("options of the mount at the host path: %w", err)
	}
	options = append(options, has...)
	return specs.Mount{Destination: filepath.Clean(m.GetContainerPath()), Type: "bind", Source: source, Options: options}, nil
}

// restrictions returns the options nosuid, nodev and noexec of the mount at path. The container's
// mount needs them explicitly, because libcontainer replaces the options of a bind mount. A path
// that is not a mount point has none. Those of a tmpfs are ignored, because the node's own tmpfs
// options are not meant for pods.
func restrictions(path string) ([]string, error) {
	var st unix.Statx_t
	err := unix.Statx(unix.AT_FDCWD, path, unix.AT_STATX_DONT_SYNC, 0, &st) // does not contact a file server
	if err != nil || st.Attributes&unix.STATX_ATTR_MOUNT_ROOT == 0 {
		return nil, err
	}
	found, err := mountinfo.GetMounts(mountinfo.SingleEntryFilter(path))
	if err != nil || len(found) == 0 {
		return nil, err
	}
	top := found[len(found)-1]
	var has []string
	for option := range strings.SplitSeq(top.Options, ",") {
		if slices.Contains([]string{"nosuid", "nodev", "noexec"}, option) && top.FSType != "tmpfs" {
			has = append(has, option)
		}
	}
	return has, nil
}

// addDevices adds the requested devices, and all host devices for a privileged container.
func (in *specInput) addDevices(l *specs.Linux) error {
	if in.privileged() {
		devs, err := allDevices()
		if err != nil {
			return fmt.Errorf("list the host's devices: %w", err)
		}
		l.Devices = devs
		l.Resources.Devices = []specs.LinuxDeviceCgroup{{Allow: true, Access: "rwm"}}
	} else {
		l.Resources.Devices = []specs.LinuxDeviceCgroup{{Allow: false, Access: "rwm"}}
	}
	for _, d := range in.config.GetDevices() {
		access := d.GetPermissions()
		if access == "" {
			access = "rwm"
		}
		path, err := filepath.EvalSymlinks(d.GetHostPath())
		if err != nil {
			return fmt.Errorf("device %s: %w", d.GetHostPath(), err)
		}
		devs, rules, err := devicesBelow(path, d.GetContainerPath(), access)
		if err != nil {
			return err
		}
		for _, dev := range devs { // a requested device replaces a host device with the same path
			l.Devices = slices.DeleteFunc(l.Devices, func(o specs.LinuxDevice) bool { return o.Path == dev.Path })
			l.Devices = append(l.Devices, dev)
		}
		if !in.privileged() {
			l.Resources.Devices = append(l.Resources.Devices, rules...)
		}
	}
	return nil
}

// addProfiles sets the masked paths, seccomp and AppArmor.
func (in *specInput) addProfiles(b *bundle.Create) error {
	sc := in.security()
	if !in.privileged() {
		b.Spec.Linux.MaskedPaths, b.Spec.Linux.ReadonlyPaths = sc.GetMaskedPaths(), sc.GetReadonlyPaths()
		if b.Spec.Linux.MaskedPaths == nil {
			b.Spec.Linux.MaskedPaths = maskedPaths
		}
		if b.Spec.Linux.ReadonlyPaths == nil {
			b.Spec.Linux.ReadonlyPaths = readonlyPaths
		}
		if err := in.addSeccomp(b); err != nil {
			return err
		}
	}
	if p := sc.GetApparmor(); p.GetProfileType() == cri.SecurityProfile_Localhost {
		if err := in.host.hasAppArmor(p.GetLocalhostRef()); err != nil {
			return err
		}
		b.Spec.Process.ApparmorProfile = p.GetLocalhostRef()
	}
	return nil
}

// maxProfile bounds the bytes read of a seccomp profile.
const maxProfile = 1 << 20

func (in *specInput) addSeccomp(b *bundle.Create) error {
	p := in.security().GetSeccomp()
	if p == nil {
		return nil
	}
	switch p.GetProfileType() {
	case cri.SecurityProfile_RuntimeDefault:
		b.DefaultSeccomp = true
	case cri.SecurityProfile_Localhost:
		ref := p.GetLocalhostRef()
		// Requests may contain the path relative to the directory, or the full path.
		ref = strings.TrimPrefix(ref, in.seccompDir+"/")
		f, err := safepath.OpenRegularInRoot(in.seccompDir, ref)
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
		b.Spec.Linux.Seccomp = &s
	}
	return nil
}
