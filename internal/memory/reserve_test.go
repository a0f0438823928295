package memory

import (
	"os"
	"reflect"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

func TestMappingsOfTheProgram(t *testing.T) {
	const maps = `00400000-02261000 r-xp 00000000 fe:00 131  /usr/bin/keelson controlplane
02261000-0442d000 r--p 01e61000 fe:00 131                /usr/bin/keelson controlplane
0442d000-044f6000 rw-p 0402d000 fe:00 131                /usr/bin/keelson controlplane
044f6000-044f7000 r--s 0402d000 fe:00 131                /usr/bin/keelson controlplane
044f6000-06547000 rw-p 00000000 00:00 0
3758d400000-37590400000 rw-p 00000000 00:00 0
7f387bbe0000-7f387c000000 r--p 00000000 fe:00 99         /var/lib/keelson/controlplane/store.db
7fffa0000000-7fffa0002000 r-xp 00000000 00:00 0          [vdso]
`
	want := []mapping{{0x400000, 0x2261000}, {0x2261000, 0x442d000}}
	if got := programMappings([]byte(maps), "/usr/bin/keelson controlplane"); !reflect.DeepEqual(got, want) {
		t.Errorf("got %x, want %x", got, want)
	}
}

// populateRead maps all pages of a range as if they were read (Linux 5.14).
const populateRead = 22

// After UnmapProgram less memory is mapped, and the program still runs.
func TestUnmap(t *testing.T) {
	program, err := os.Readlink("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range programMappings(maps, program) {
		if _, _, errno := syscall.Syscall(syscall.SYS_MADVISE, m.start, m.end-m.start, populateRead); errno != 0 {
			t.Fatalf("mapping the whole program: %v", errno)
		}
	}
	before := fileBackedBytes(t)
	if before < 1<<20 {
		t.Fatalf("%d bytes of files are mapped", before)
	}
	if err := UnmapProgram(); err != nil {
		t.Fatal(err)
	}
	after := fileBackedBytes(t)
	t.Logf("%d KiB of files are mapped, %d before", after>>10, before>>10)
	// This program is small. The pages that it uses, and their neighbors, are mapped again at once.
	if after > before*3/4 {
		t.Errorf("%d bytes of files are mapped, %d before", after, before)
	}
	ReleaseUnused(true)
	ReleaseUnused(false)
}

// fileBackedBytes returns how much file-backed memory this process has.
func fileBackedBytes(t *testing.T) int {
	t.Helper()
	raw, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(raw)) {
		if rest, ok := strings.CutPrefix(line, "RssFile:"); ok {
			kib, err := strconv.Atoi(strings.Fields(rest)[0])
			if err != nil {
				t.Fatal(err)
			}
			return kib << 10
		}
	}
	t.Fatal("no RssFile in /proc/self/status")
	return 0
}
