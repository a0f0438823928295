package backups

import (
	"bytes"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"keelson.dev/keelson/internal/diskheadroom"
	"keelson.dev/keelson/internal/virtual"
)

const gib = 1 << 30

// fakeDisk returns a disk of 100 GiB with the store, and with the folder if same is set.
func fakeDisk(folder string, same bool, free func() int64) diskheadroom.Target {
	return diskheadroom.Target{Dir: folder, ProtectedPath: "/store",
		Stat: func(path string) (diskheadroom.Usage, error) {
			device := uint64(1)
			if path != "/store" && !same {
				device = 2
			}
			return diskheadroom.Usage{Device: device, Free: free(), Total: 100 * gib}, nil
		}}
}

// A backup never uses the reserved disk space of the store. It is refused before it is written if
// its expected size is too large, and stopped otherwise. No file is left, and the error names a
// remedy.
func TestReservedSpace(t *testing.T) {
	const old = "prod-1a2b_cp1_19991230T000000Z.backup"
	for name, c := range map[string]struct {
		same    bool
		free    []int64 // free bytes at successive checks; the last value is repeated
		old     int64   // size of the existing backup, in bytes
		written bool    // whether writing has started
		good    bool
	}{
		"enough space": {same: true, free: []int64{8 * gib}, old: 2 * gib,
			written: true, good: true},
		"too little for another backup":       {same: true, free: []int64{6 * gib}, old: 2 * gib},
		"less than the reserved space":        {same: true, free: []int64{4 * gib}, old: 1},
		"space runs out while writing":        {same: true, free: []int64{8 * gib, 4 * gib}, old: 1, written: true},
		"another disk with just enough space": {free: []int64{gib}, old: gib / 2, written: true, good: true},
		"another disk without enough space":   {free: []int64{gib}, old: 2 * gib},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			writeFiles(t, dir, map[string][]byte{old: nil})
			if err := os.Truncate(filepath.Join(dir, old), c.old); err != nil { // a sparse file
				t.Fatal(err)
			}
			virtual.Test(t, func(t *testing.T) {
				s := &fakeStore{content: strings.Repeat("state", diskheadroom.CheckInterval/4)}
				k, err := New(Config{Options: Options{Schedule: "@daily", Folder: dir, Keep: 9}, Cluster: "prod",
					ID: "prod-1a2b", Replica: "cp1", Write: s.write, Store: "/store"})
				if err != nil {
					t.Fatal(err)
				}
				f := k.target.(*blockingFolder)
				if f.disk.Dir != dir || f.disk.ProtectedPath != "/store" {
					t.Errorf("the disk is %+v", f.disk)
				}
				f.disk = fakeDisk(dir, c.same, func() int64 {
					free := c.free[0]
					if len(c.free) > 1 && s.countCalls() > 0 {
						c.free = c.free[1:]
						free = c.free[0]
					}
					return free
				})
				k.cfg.Log = slog.New(slog.DiscardHandler)
				err = k.makeBackup(t.Context())
				if (err == nil) != c.good || err != nil &&
					(!strings.Contains(err.Error(), dir) || !strings.Contains(err.Error(), "another disk")) {
					t.Errorf("got %v", err)
				}
				if written := s.countCalls() > 0; written != c.written {
					t.Errorf("writing has started: %v", written)
				}
				if have := fileNames(t, dir); len(have) != map[bool]int{false: 1, true: 2}[c.good] || have[0] != old {
					t.Errorf("got %v", have)
				}
			})
		})
	}
}

// A backup is fetched only if the disk has enough free space for the size that the server reports.
func TestFetchNeedsFreeSpace(t *testing.T) {
	asked := false
	s := startBucket(t, func(http.ResponseWriter, *http.Request) bool {
		asked = true
		return false
	})
	if _, err := s.newBucket(t, "cp1").writeBackup(t.Context(), time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC),
		writerOf("x")); err != nil {
		t.Fatal(err)
	}
	all, err := ListBackups(t.Context(), Options{S3: s.s3})
	if err != nil || len(all) != 1 {
		t.Fatalf("got %v, %v", all, err)
	}
	asked = false
	huge := all[0]
	huge.Size = 1 << 40
	var to bytes.Buffer
	err = Fetch(t.Context(), Options{S3: s.s3}, huge, fakeDisk("/tmp", false, func() int64 { return 100 * gib }), &to)
	if err == nil || !strings.Contains(err.Error(), "1048576 MiB would be written, and 102400 MiB are free") ||
		asked || to.Len() > 0 {
		t.Errorf("error %v, %d bytes received", err, to.Len())
	}
	if err := Fetch(t.Context(), Options{S3: s.s3}, all[0], fakeDisk("/tmp", true, func() int64 { return 100 * gib }),
		&to); err != nil || to.String() != "x" {
		t.Errorf("fetched %q, %v", to.String(), err)
	}
}
