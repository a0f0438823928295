package diskheadroom

import (
	"bytes"
	"path/filepath"
	"strings"
	"testing"
)

const gib = 1 << 30

// Of a disk on which something lies that is not to be filled, so much stays free; any other may be filled, and no more.
func TestHas(t *testing.T) {
	for name, c := range map[string]struct {
		total, free, need int64
		beside            string
		says              string // "" = there is room
	}{
		"a twentieth stays":            {total: 100 * gib, free: 6 * gib, need: gib, beside: "/data"},
		"and not a byte less":          {total: 100 * gib, free: 6 * gib, need: gib + 1, beside: "/data", says: "5120 MiB stay free"},
		"1 GiB of one that is not big": {total: 12 * gib, free: 2*gib - 1, need: gib, beside: "/data", says: "1024 MiB stay free"},
		"a tenth of a small one":       {total: gib, free: gib / 2, need: gib / 3, beside: "/data"},
		"10 GiB of a large one":        {total: 4000 * gib, free: 11 * gib, need: gib, beside: "/data"},
		"and not a byte less of it":    {total: 4000 * gib, free: 11 * gib, need: gib + 1, beside: "/data", says: "10240 MiB stay free"},
		"another disk":                 {total: 100 * gib, free: gib, need: gib, beside: "/else"},
		"another disk that is full":    {total: 100 * gib, free: gib, need: gib + 1, beside: "/else", says: "1025 MiB more are to be written, and 1024 MiB are free"},
		"one that tells nothing":       {need: gib, beside: "/else"},
		"nor what lies there":          {need: gib, beside: "/data"},
		"nothing beside it":            {total: 100 * gib, free: gib, need: gib},
	} {
		look := func(path string) (Usage, error) {
			if path == "/else" {
				return Usage{Device: 2}, nil
			}
			return Usage{Device: 1, Free: c.free, Total: c.total}, nil
		}
		err := Target{Dir: "/backups", ProtectedPath: c.beside, Stat: look}.CheckFree(c.need)
		if (err == nil) != (c.says == "") || err != nil && (!strings.Contains(err.Error(), c.says) || !strings.HasPrefix(err.Error(), "/backups: ")) {
			t.Errorf("%s: %v, want %q", name, err, c.says)
		}
	}
}

// A writer looks again as it goes.
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
		t.Errorf("where nothing is free it wrote %d bytes more, %v", n, err)
	}
}

// The kernel tells of a folder that is still to be made what it tells of the one in which that will be.
func TestUsage(t *testing.T) {
	dir := t.TempDir()
	there, err := diskUsage(dir)
	if err != nil || there.Total <= 0 || there.Free > there.Total {
		t.Fatalf("it is %+v, %v", there, err)
	}
	if later, err := diskUsage(nearestExisting(filepath.Join(dir, "a", "b"))); err != nil || later.Device != there.Device || later.Total != there.Total {
		t.Errorf("it is %+v, %v, want %+v", later, err, there)
	}
	if _, err := diskUsage("/dev/null/below"); err == nil {
		t.Errorf("of what cannot be it says %v", err)
	}
	huge := there.Total + 1
	if err := (Target{Dir: filepath.Join(dir, "a"), ProtectedPath: dir}).CheckFree(huge); err == nil || !strings.Contains(err.Error(), dir+" lies on that disk") {
		t.Errorf("beside what is there: %v", err)
	}
	if err := (Target{Dir: dir, ProtectedPath: filepath.Join(dir, "none")}).CheckFree(huge); err == nil || strings.Contains(err.Error(), "lies on that disk") {
		t.Errorf("beside what is not there: %v", err)
	}
}
