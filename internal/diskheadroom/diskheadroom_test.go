package diskheadroom

import (
	"bytes"
	"path/filepath"
	"strings"
	"testing"
)

const gib = 1 << 30

// A protected disk keeps a reserve; any other disk may be filled completely.
func TestHas(t *testing.T) {
	for name, c := range map[string]struct {
		total, free, need int64
		beside            string
		says              string // part of the error; "" = there is enough space
	}{
		"a twentieth stays": {total: 100 * gib, free: 6 * gib, need: gib, beside: "/data"},
		"one byte less than a twentieth": {total: 100 * gib, free: 6 * gib, need: gib + 1, beside: "/data",
			says: "5120 MiB must stay free"},
		"at least 1 GiB of a medium disk": {total: 12 * gib, free: 2*gib - 1, need: gib, beside: "/data",
			says: "1024 MiB must stay free"},
		"a tenth of a small disk":        {total: gib, free: gib / 2, need: gib / 3, beside: "/data"},
		"at most 10 GiB of a large disk": {total: 4000 * gib, free: 11 * gib, need: gib, beside: "/data"},
		"one byte less than 10 GiB": {total: 4000 * gib, free: 11 * gib, need: gib + 1, beside: "/data",
			says: "10240 MiB must stay free"},
		"another disk": {total: 100 * gib, free: gib, need: gib, beside: "/else"},
		"another disk that is full": {total: 100 * gib, free: gib, need: gib + 1, beside: "/else",
			says: "1025 MiB would be written, and 1024 MiB are free"},
		"a disk without usage":           {need: gib, beside: "/else"},
		"a protected disk without usage": {need: gib, beside: "/data"},
		"no protected path":              {total: 100 * gib, free: gib, need: gib},
	} {
		look := func(path string) (Usage, error) {
			if path == "/else" {
				return Usage{Device: 2}, nil
			}
			return Usage{Device: 1, Free: c.free, Total: c.total}, nil
		}
		err := Target{Dir: "/backups", ProtectedPath: c.beside, Stat: look}.CheckFree(c.need)
		if (err == nil) != (c.says == "") || err != nil &&
			(!strings.Contains(err.Error(), c.says) || !strings.HasPrefix(err.Error(), "/backups: ")) {
			t.Errorf("%s: %v, want %q", name, err, c.says)
		}
	}
}

// A writer checks the free space again while it writes.
func TestWriter(t *testing.T) {
	free := int64(gib)
	var to bytes.Buffer
	w := Target{Dir: "/b", Stat: func(string) (Usage, error) { return Usage{Free: free, Total: gib}, nil }}.Writer(&to)
	part := make([]byte, CheckInterval/2)
	for i := range 3 {
		if _, err := w.Write(part); err != nil {
			t.Fatalf("part %d: %v", i, err)
		}
	}
	free = 0
	if n, err := w.Write(part); err == nil || n != 0 || to.Len() != 3*len(part) {
		t.Errorf("on a full disk it wrote %d more bytes, %v", n, err)
	}
}

// The usage of a directory that does not exist yet is that of its nearest existing parent.
func TestUsage(t *testing.T) {
	dir := t.TempDir()
	there, err := diskUsage(dir)
	if err != nil || there.Total <= 0 || there.Free > there.Total {
		t.Fatalf("it is %+v, %v", there, err)
	}
	if later, err := diskUsage(nearestExisting(filepath.Join(dir, "a", "b"))); err != nil ||
		later.Device != there.Device || later.Total != there.Total {
		t.Errorf("usage %+v, %v, want %+v", later, err, there)
	}
	if _, err := diskUsage("/dev/null/below"); err == nil {
		t.Errorf("usage of an impossible path: %v", err)
	}
	huge := there.Total + 1
	if err := (Target{Dir: filepath.Join(dir, "a"), ProtectedPath: dir}).CheckFree(huge); err == nil ||
		!strings.Contains(err.Error(), dir+" is on the same disk") {
		t.Errorf("with an existing protected path: %v", err)
	}
	if err := (Target{Dir: dir, ProtectedPath: filepath.Join(dir, "none")}).CheckFree(huge); err == nil ||
		strings.Contains(err.Error(), "is on the same disk") {
		t.Errorf("with a missing protected path: %v", err)
	}
}
