package mountoption

import (
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// Flags and options of the file system are separated, the last of contradicting options applies,
// and fstab options are dropped.
func TestSort(t *testing.T) {
	for given, want := range map[string]struct {
		bits uintptr
		rest string
	}{
		"":                                {},
		"defaults,ro noatime":             {unix.MS_RDONLY | unix.MS_NOATIME, ""},
		"ro rw,nosuid":                    {unix.MS_NOSUID, ""},
		"data=journal, nodev commit=3":    {unix.MS_NODEV, "data=journal commit=3"},
		"_netdev,x-systemd.requires=a,,b": {0, "b"},
	} {
		bits, rest := SplitFlags(strings.Split(given, " "))
		if got := strings.Join(rest, " "); bits != want.bits || got != want.rest || slices.Contains(rest, "") {
			t.Errorf("%q: %#x %q, want %#x %q", given, bits, got, want.bits, want.rest)
		}
	}
}

// The last of contradicting attributes applies, and options of the file system are returned.
func TestBind(t *testing.T) {
	for given, want := range map[string]struct {
		set, clear uint64
		rest       string
	}{
		"":                         {},
		"ro,noexec defaults":       {set: unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOEXEC},
		"ro rw":                    {clear: unix.MOUNT_ATTR_RDONLY},
		"rw ro":                    {set: unix.MOUNT_ATTR_RDONLY, clear: unix.MOUNT_ATTR_RDONLY},
		"strictatime,noatime":      {set: unix.MOUNT_ATTR_NOATIME, clear: unix.MOUNT_ATTR__ATIME},
		"noatime relatime":         {clear: unix.MOUNT_ATTR__ATIME},
		"nodev,data=journal,async": {set: unix.MOUNT_ATTR_NODEV, rest: "data=journal async"},
	} {
		a, rest := SplitBindAttributes(strings.Split(given, " "))
		if got := strings.Join(rest, " "); a.Attr_set != want.set || a.Attr_clr != want.clear || got != want.rest {
			t.Errorf("%q: %#x %#x %q, want %#x %#x %q", given, a.Attr_set, a.Attr_clr, got, want.set,
				want.clear, want.rest)
		}
	}
}
