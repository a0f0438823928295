package shim

import (
	"reflect"
	"testing"
)

func TestParseMaps(t *testing.T) {
	text := `00400000-00498000 r-xp 00000000 fe:00 99              /opt/keelson/bin/keelson-shim
00498000-0055a000 r--p 00098000 fe:00 99              /opt/keelson/bin/keelson-shim
0055a000-00563000 rw-p 0015a000 fe:00 99              /opt/keelson/bin/keelson-shim
00563000-00564000 r--s 0015a000 fe:00 99              /opt/keelson/bin/keelson-shim
00563000-00599000 rw-p 00000000 00:00 0
7f0000000000-7f0000001000 r--p 00000000 fe:00 7       /lib/other
7f0000001000-7f0000002000 r--p 00000000 fe:00 7       /lib/not-keelson-shim
7f0000003000-7f0000001000 r--p 00000000 fe:00 7       /x/keelson-shim
zz-7f0000001000 r--p 00000000 fe:00 7       /x/keelson-shim
-
7f00 r-

7f0000002000-7f0000003000 r--p 00000000 fe:00 99 /opt/kee`
	want := program{{0x400000, 0x498000}, {0x498000, 0x55a000}}
	if got := parseMaps([]byte(text), "keelson-shim"); !reflect.DeepEqual(got, want) {
		t.Errorf("%x, want %x", got, want)
	}
}
