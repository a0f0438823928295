package nfs

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// flags are the options of a mount that the kernel knows for every file system.
var flags = map[string]struct{ set, clear uintptr }{
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

// idle are options that say something to the programs that mount by /etc/fstab, and nothing to the kernel. Mounting is
// tried again by the pod, in the foreground and for as long as the pod is there.
var idle = []string{"defaults", "auto", "noauto", "user", "nouser", "users", "nousers", "owner", "group", "_netdev", "nofail", "fg", "bg"}

// Options are those of one NFS mount, sorted by who reads them.
type Options struct {
	Flags uintptr
	// Version is what was asked for, as "4.1" or "3"; "" is whichever the server has.
	Version string
	// Rest is for the NFS client of the kernel, in the order in which it was given.
	Rest []string
}

// ParseOptions sorts the options of a mount, each of which may be several with commas between them.
func ParseOptions(given []string) (Options, error) {
	var o Options
	major, minor := "", ""
	for _, list := range given {
		for one := range strings.SplitSeq(list, ",") {
			one = strings.TrimSpace(one)
			name, value, _ := strings.Cut(one, "=")
			f, flag := flags[one]
			switch {
			case one == "", slices.Contains(idle, one), name == "retry", name == "comment", strings.HasPrefix(name, "x-"):
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
	case major == "", major == "3" && minor == "", major == "4" && (minor == "" || minor == "0" || minor == "1" || minor == "2"):
	default:
		return o, fmt.Errorf("NFS version %q is none that nodes mount: it is 3, 4, 4.0, 4.1 or 4.2", strings.TrimSuffix(major+"."+minor, "."))
	}
	o.Version = strings.TrimSuffix(major+"."+minor, ".")
	return o, nil
}

// value is what an option is set to last.
func (o Options) value(name string) string {
	for _, one := range slices.Backward(o.Rest) {
		if n, v, _ := strings.Cut(one, "="); n == name {
			return v
		}
	}
	return ""
}

// versions are those that are tried, one after the other.
func (o Options) versions() []string {
	switch o.Version {
	case "":
		return []string{"4.2", "4.1", "4.0", "3"}
	case "4":
		return []string{"4.2", "4.1", "4.0"}
	}
	return []string{o.Version}
}

// ownLocks says that no locks are asked of the server: those of version 3 need programs on the node.
func (o Options) ownLocks() bool {
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

// data is what the kernel reads, for one version and one address of the server.
func (o Options) data(version string, addr netip.Addr) string {
	return strings.Join(append(append([]string{}, o.Rest...), "vers="+version, "addr="+addr.String()), ",")
}

// reaches says whether the transport that is asked for, if any, is of an address's family.
func (o Options) reaches(addr netip.Addr) bool {
	switch o.value("proto") {
	case "tcp6", "udp6", "rdma6":
		return addr.Is6()
	case "tcp", "udp", "rdma":
		return addr.Is4()
	}
	return true
}

// source is how the kernel is told of a folder of a server: an IPv6 address stands in brackets.
func source(server, path string) string {
	if a, err := netip.ParseAddr(server); err == nil && a.Is6() {
		server = "[" + server + "]"
	}
	return server + ":" + path
}
