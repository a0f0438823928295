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

// diskOf is a disk of 100 GiB on which the store lies, and the folder of backups as well if it is the same one.
func diskOf(folder string, same bool, free func() int64) diskheadroom.Target {
	return diskheadroom.Target{Dir: folder, ProtectedPath: "/store", Stat: func(path string) (diskheadroom.Usage, error) {
		device := uint64(1)
		if path != "/store" && !same {
			device = 2
		}
		return diskheadroom.Usage{Device: device, Free: free(), Total: 100 * gib}, nil
	}}
}

// A backup never takes the room without which the store cannot go on: it is refused before anything of it is written where
// that is to be foreseen, and ends on the way otherwise. Nothing of it stays, and the state says what is to be done.
func TestRoomForTheStore(t *testing.T) {
	const old = "prod-1a2b_cp1_19991230T000000Z.backup"
	for name, c := range map[string]struct {
		same    bool
		free    []int64 // each time that somebody asks; the last counts on
		old     int64   // bytes of the backup that is there
		written bool    // any of it
		good    bool
	}{
		"room enough":                         {same: true, free: []int64{8 * gib}, old: 2 * gib, written: true, good: true},
		"less than another one would leave":   {same: true, free: []int64{6 * gib}, old: 2 * gib},
		"less than is to stay free":           {same: true, free: []int64{4 * gib}, old: 1},
		"what is there goes on the way":       {same: true, free: []int64{8 * gib, 4 * gib}, old: 1, written: true},
		"another disk, filled to the last":    {free: []int64{gib}, old: gib / 2, written: true, good: true},
		"another disk, too small for another": {free: []int64{gib}, old: 2 * gib},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			put(t, dir, map[string][]byte{old: nil})
			if err := os.Truncate(filepath.Join(dir, old), c.old); err != nil { // takes no room
				t.Fatal(err)
			}
			virtual.Test(t, func(t *testing.T) {
				s := &store{content: strings.Repeat("state", diskheadroom.CheckInterval/4)}
				k, err := New(Config{Options: Options{Schedule: "@daily", Folder: dir, Keep: 9}, Cluster: "prod", ID: "prod-1a2b", Replica: "cp1", Write: s.write, Store: "/store"})
				if err != nil {
					t.Fatal(err)
				}
				f := k.target.(*apart)
				if f.disk.Dir != dir || f.disk.ProtectedPath != "/store" {
					t.Errorf("the disk is %+v", f.disk)
				}
				f.disk = diskOf(dir, c.same, func() int64 {
					free := c.free[0]
					if len(c.free) > 1 && s.backups() > 0 {
						c.free = c.free[1:]
						free = c.free[0]
					}
					return free
				})
				k.cfg.Log = slog.New(slog.DiscardHandler)
				err = k.once(t.Context())
				if (err == nil) != c.good || err != nil && (!strings.Contains(err.Error(), dir) || !strings.Contains(err.Error(), "another disk")) {
					t.Errorf("it says %v", err)
				}
				if written := s.backups() > 0; written != c.written {
					t.Errorf("anything was written: %v", written)
				}
				if have := names(t, dir); len(have) != map[bool]int{false: 1, true: 2}[c.good] || have[0] != old {
					t.Errorf("there are %v", have)
				}
			})
		})
	}
}

// What a server calls a backup is brought here only where there is room for it.
func TestFetchOfATerabyte(t *testing.T) {
	asked := false
	s := open(t, func(http.ResponseWriter, *http.Request) bool {
		asked = true
		return false
	})
	if _, err := s.bucket(t, "cp1").write(t.Context(), time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC), content("x")); err != nil {
		t.Fatal(err)
	}
	all, err := Look(t.Context(), Options{S3: s.s3})
	if err != nil || len(all) != 1 {
		t.Fatalf("there are %v, %v", all, err)
	}
	asked = false
	huge := all[0]
	huge.Size = 1 << 40
	var to bytes.Buffer
	err = Fetch(t.Context(), Options{S3: s.s3}, huge, diskOf("/tmp", false, func() int64 { return 100 * gib }), &to)
	if err == nil || !strings.Contains(err.Error(), "1048576 MiB would be written, and 102400 MiB are free") || asked || to.Len() > 0 {
		t.Errorf("it says %v, %d bytes came", err, to.Len())
	}
	if err := Fetch(t.Context(), Options{S3: s.s3}, all[0], diskOf("/tmp", true, func() int64 { return 100 * gib }), &to); err != nil || to.String() != "x" {
		t.Errorf("of one that fits came %q, %v", to.String(), err)
	}
}
