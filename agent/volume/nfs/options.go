package nfs

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// mountFlags maps each mount option that applies to all file systems to the flags of mount(2) that
// it sets and clears.
var mountFlags = map[string]struct{ set, clear uintptr }{
	"ro": {set: unix.MS_RDONLY}, "rw": {clear: unix.MS_RDONLY},
	"nosuid": {set: unix.MS_NOSUID}, "suid": {clear: unix.MS_NOSUID},
	"nodev": {set: unix.MS_NODEV}, "dev": {clear: unix.MS_NODEV},
	"noexec": {set: unix.MS_NOEXEC}, "exec": {clear: unix.MS_NOEXEC},
	"sync": {set: unix.MS_SYNCHRONOUS}, "async": {clear: unix.MS_SYNCHRONOUS},
	"dirsync": {set: unix.MS_DIRSYNC},
	"noatime": {set: unix.MS_NOATIME}, "atime": {clear: unix.MS_NOATIME},
	"nodiratime": {set: unix.MS_NODIRATIME}, "diratime": {clear: unix.MS_NODIRATIME},
	"relatime": {set: unix.MS_RELATIME}, "norelatime": {clear: unix.MS_RELATIME},
	"strictatime": {set: unix.MS_STRICTATIME}, "nostrictatime": {clear: unix.MS_STRICTATIME},
	"lazytime": {set: unix.MS_LAZYTIME}, "nolazytime": {clear: unix.MS_LAZYTIME},
}

// ignoredOptions are options that have no effect here, because only programs that mount from
// /etc/fstab interpret them. The pod worker retries mounts as long as the pod exists.
var ignoredOptions = []string{"defaults", "auto", "noauto", "user", "nouser", "users", "nousers", "owner", "group",
	"_netdev", "nofail", "fg", "bg"}

// Options are the options of one NFS mount.
type Options struct {
	Flags uintptr
	// Version is the requested version, such as "4.1" or "3"; "" = the newest version of the
	// server.
	Version string
	// Rest are the options of the kernel's NFS client, in their order.
	Rest []string
}

// ParseOptions parses the mount options of an NFS volume. Each element of given may contain several
// options, separated by commas. It returns an error for an unsupported NFS version and for the
// option addr. Unknown options are passed to the kernel.
func ParseOptions(given []string) (Options, error) {
	var o Options
	major, minor := "", ""
	for _, list := range given {
		for one := range strings.SplitSeq(list, ",") {
			one = strings.TrimSpace(one)
			name, value, _ := strings.Cut(one, "=")
			f, flag := mountFlags[one]
			switch {
			case one == "", slices.Contains(ignoredOptions, one), name == "retry", name == "comment",
				strings.HasPrefix(name, "x-"):
			case flag:
				o.Flags = o.Flags&^f.clear | f.set
			case name == "vers", name == "nfsvers":
				major, minor, _ = strings.Cut(value, ".")
			case len(one) > 1 && one[0] == 'v' && strings.Trim(one[1:], "0123456789.") == "":
				major, minor, _ = strings.Cut(one[1:], ".")
			case name == "minorversion":
				minor = value
			case name == "addr":
				return o, fmt.Errorf("mount option %s: the address is that of the volume's server; leave it out", one)
			default:
				o.Rest = append(o.Rest, one)
			}
		}
	}
	if major == "" && minor != "" {
		major = "4"
	}
	switch {
	case major == "", major == "3" && minor == "",
		major == "4" && (minor == "" || minor == "0" || minor == "1" || minor == "2"):
	default:
		return o, fmt.Errorf("NFS version %q is not supported: use 3, 4, 4.0, 4.1 or 4.2",
			strings.TrimSuffix(major+"."+minor, "."))
	}
	o.Version = strings.TrimSuffix(major+"."+minor, ".")
	return o, nil
}

// lastValue returns the value of the last option with this name, or "" if there is no such option.
func (o Options) lastValue(name string) string {
	for _, one := range slices.Backward(o.Rest) {
		if n, v, _ := strings.Cut(one, "="); n == name {
			return v
		}
	}
	return ""
}

// candidateVersions returns the NFS versions to try, in order of preference.
func (o Options) candidateVersions() []string {
	switch o.Version {
	case "":
		return []string{"4.2", "4.1", "4.0", "3"}
	case "4":
		return []string{"4.2", "4.1", "4.0"}
	}
	return []string{o.Version}
}

// hasLocalLocks reports whether the options make file locks local to this node. Server locks of
// version 3 require mount.nfs and rpc.statd on the node.
func (o Options) hasLocalLocks() bool {
	for _, one := range slices.Backward(o.Rest) {
		switch one {
		case "nolock", "local_lock=all":
			return true
		case "lock":
			return false
		}
	}
	return false
}

// kernelData returns the data argument of mount(2) for one NFS version and one server address.
func (o Options) kernelData(version string, addr netip.Addr) string {
	return strings.Join(append(append([]string{}, o.Rest...), "vers="+version, "addr="+addr.String()), ",")
}

// allowsFamily reports whether the requested transport (such as tcp6) permits the address family of
// addr. Without a requested transport, it does.
func (o Options) allowsFamily(addr netip.Addr) bool {
	switch o.lastValue("proto") {
	case "tcp6", "udp6", "rdma6":
		return addr.Is6()
	case "tcp", "udp", "rdma":
		return addr.Is4()
	}
	return true
}

// sourceName returns the source of an NFS mount, SERVER:PATH. An IPv6 address is in brackets.
func sourceName(server, path string) string {
	if a, err := netip.ParseAddr(server); err == nil && a.Is6() {
		server = "[" + server + "]"
	}
	return server + ":" + path
}
