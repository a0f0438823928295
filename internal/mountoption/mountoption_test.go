package mountoption

import (
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// Options come to who reads them, the last word counts, and what is for programs alone goes to nobody.
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
		bits, rest := Sort(strings.Split(given, " "))
		if got := strings.Join(rest, " "); bits != want.bits || got != want.rest || slices.Contains(rest, "") {
			t.Errorf("%q: %#x %q, want %#x %q", given, bits, got, want.bits, want.rest)
		}
	}
}
