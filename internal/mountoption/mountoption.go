// Package mountoption splits mount options into flags of mount(2), which apply to every file
// system, and options of the file system itself.
package mountoption

import (
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// mountFlags maps the mount options that apply to every file system to flags of mount(2). Of two
// contradicting options the later one applies.
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

// fstabOptions are options of /etc/fstab that are meant for user-space programs and not passed to
// the kernel.
var fstabOptions = []string{"defaults", "auto", "noauto", "user", "nouser", "users", "nousers", "owner", "group",
	"_netdev", "nofail"}

// SplitFlags returns the flags of mount(2) for the options, and the options of the file system
// itself, in their order. Options of /etc/fstab are dropped. Each element of options may be a
// comma-separated list.
func SplitFlags(options []string) (bits uintptr, rest []string) {
	for _, list := range options {
		for option := range strings.SplitSeq(list, ",") {
			option = strings.TrimSpace(option)
			f, known := mountFlags[option]
			switch {
			case known:
				bits = bits&^f.clear | f.set
			case !isMountOption(option):
			default:
				rest = append(rest, option)
			}
		}
	}
	return bits, rest
}

// bindAttributes maps mount options to attributes of mount_setattr(2). It contains the options that
// a bind mount can set independently of its file system.
var bindAttributes = map[string]struct{ set, clear uint64 }{
	"ro": {set: unix.MOUNT_ATTR_RDONLY}, "rw": {clear: unix.MOUNT_ATTR_RDONLY},
	"nosuid": {set: unix.MOUNT_ATTR_NOSUID}, "suid": {clear: unix.MOUNT_ATTR_NOSUID},
	"nodev": {set: unix.MOUNT_ATTR_NODEV}, "dev": {clear: unix.MOUNT_ATTR_NODEV},
	"noexec": {set: unix.MOUNT_ATTR_NOEXEC}, "exec": {clear: unix.MOUNT_ATTR_NOEXEC},
	"noatime":     {set: unix.MOUNT_ATTR_NOATIME, clear: unix.MOUNT_ATTR__ATIME},
	"relatime":    {set: unix.MOUNT_ATTR_RELATIME, clear: unix.MOUNT_ATTR__ATIME},
	"atime":       {set: unix.MOUNT_ATTR_RELATIME, clear: unix.MOUNT_ATTR__ATIME},
	"strictatime": {set: unix.MOUNT_ATTR_STRICTATIME, clear: unix.MOUNT_ATTR__ATIME},
	"nodiratime":  {set: unix.MOUNT_ATTR_NODIRATIME}, "diratime": {clear: unix.MOUNT_ATTR_NODIRATIME},
}

// SplitBindAttributes returns the attributes of mount_setattr(2) for the options of a bind mount.
// rest are options of the file system, which a bind mount cannot change. The system call clears
// attributes before it sets others.
func SplitBindAttributes(options []string) (a unix.MountAttr, rest []string) {
	for _, list := range options {
		for option := range strings.SplitSeq(list, ",") {
			option = strings.TrimSpace(option)
			o, known := bindAttributes[option]
			switch {
			case known:
				a.Attr_set = a.Attr_set&^o.clear | o.set
				a.Attr_clr |= o.clear
			case !isMountOption(option):
			default:
				rest = append(rest, option)
			}
		}
	}
	return a, rest
}

// isMountOption reports whether an option must be passed to the kernel. It returns false for
// options of /etc/fstab and comments.
func isMountOption(option string) bool {
	return option != "" && !slices.Contains(fstabOptions, option) && !strings.HasPrefix(option, "x-") &&
		!strings.HasPrefix(option, "comment=")
}
