// Package mountoption sorts the options of a mount, as people write them, by who reads them: the kernel for every file
// system, as flags of mount(2), or the file system itself.
package mountoption

import (
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// flags are the options that the kernel knows for every file system; the later of two that contradict each other counts.
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

// idle are options that say something to the programs which mount by /etc/fstab, and nothing to the kernel.
var idle = []string{"defaults", "auto", "noauto", "user", "nouser", "users", "nousers", "owner", "group", "_netdev", "nofail"}

// Sort sorts options, each of which may be several with commas between them. What the file system itself reads comes in
// the order in which it was given.
func Sort(given []string) (bits uintptr, rest []string) {
	for _, list := range given {
		for one := range strings.SplitSeq(list, ",") {
			one = strings.TrimSpace(one)
			f, known := flags[one]
			switch {
			case known:
				bits = bits&^f.clear | f.set
			case one == "", slices.Contains(idle, one), strings.HasPrefix(one, "x-"), strings.HasPrefix(one, "comment="):
			default:
				rest = append(rest, one)
			}
		}
	}
	return bits, rest
}
