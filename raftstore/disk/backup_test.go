package disk

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"keelson.dev/keelson/internal/durable"
	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/mvcc"
)

// smallBackup returns a backup of a few keys.
func smallBackup(t testing.TB, cluster string, keys *Keyring) []byte {
	m := mvcc.New()
	for i := range 5 {
		p, err := mvcc.Proposal(raftstore.Commit{Ops: []raftstore.Op{raftstore.Put(fmt.Sprintf("/k/%d", i%3),
			[]byte(fmt.Sprint("value ", i)))}})
		if err != nil {
			t.Fatal(err)
		}
		m.Apply(mvcc.Entry{Term: 1,
			Command: &storev1.Command{
				Kind: &storev1.Command_Batch{Batch: &storev1.Batch{Proposals: []*storev1.Proposal{p}}}}})
	}
	v := m.View()
	h := backupHeader{Cluster: cluster, Revision: v.Revision(), Created: time.Now().UnixMilli(), Keys: v.Keys(),
		Bytes: v.Bytes()}
	var out bytes.Buffer
	if err := writeBackup(&out, h, keys.findKey(keys.Current()), v.Snapshot()); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// toOurs are the options of a restore to the cluster "ours".
var toOurs = RestoreOptions{Advertise: "127.0.0.1:1", Cluster: "ours",
	Now: time.Date(2026, 5, 4, 12, 0, 0, 0, time.UTC)}

func restoreConfig(t testing.TB) Config {
	return Config{Name: "r1", Dir: filepath.Join(t.TempDir(), "data"), NoSync: true, JournalBytes: 64 << 10}
}

// TestEveryByteOfABackupCounts: a backup with a changed byte, a truncated one, and one with
// additional data are rejected with an error that describes the damage.
func TestEveryByteOfABackupCounts(t *testing.T) {
	for _, keys := range []*Keyring{nil, newTestKeyring("k1")} {
		good := smallBackup(t, "ours", keys)
		info, err := VerifyBackup(bytes.NewReader(good), keys)
		if err != nil || info.Keys != 3 || info.Revision != 5 || info.Cluster != "ours" ||
			info.Sealed != (keys != nil) {
			t.Fatalf("whole backup: %+v, error %v", info, err)
		}
		refuse := func(what string, b []byte) {
			t.Helper()
			_, err := VerifyBackup(bytes.NewReader(b), keys)
			if !errors.Is(err, ErrCorruptBackup) && !errors.Is(err, ErrBackupFormat) {
				t.Errorf("%s: %v", what, err)
			}
		}
		for at := range good {
			for _, flip := range []byte{1, 0x80, 0xff} {
				bad := bytes.Clone(good)
				bad[at] ^= flip
				refuse(fmt.Sprintf("byte %d of %d flipped by %x", at, len(good), flip), bad)
			}
			refuse(fmt.Sprintf("cut off at %d of %d", at, len(good)), good[:at])
		}
		refuse("a byte more", append(bytes.Clone(good), 0))
	}
}

func TestBackupsThatAreRefused(t *testing.T) {
	sealed := smallBackup(t, "ours", newTestKeyring("k1"))
	newer := smallBackup(t, "ours", nil)
	binary.LittleEndian.PutUint32(newer[8:], containerFormat+1)
	wrong := newTestKeyring("k1")
	wrong.keys[0].secret[0] ^= 1
	for name, c := range map[string]struct {
		backup []byte
		keys   *Keyring
		want   error
	}{
		"another cluster":  {smallBackup(t, "theirs", nil), nil, ErrForeignBackup},
		"no cluster":       {smallBackup(t, "", nil), nil, ErrForeignBackup},
		"a newer format":   {newer, nil, ErrBackupFormat},
		"no backup":        {[]byte("apiVersion: v1\nkind: List\n"), nil, ErrBackupFormat},
		"nothing":          {nil, nil, ErrCorruptBackup},
		"half of one":      {sealed[:len(sealed)/2], newTestKeyring("k1"), ErrCorruptBackup},
		"sealed, no keys":  {sealed, nil, ErrSealed},
		"sealed, others":   {sealed, newTestKeyring("k2", "k3"), ErrSealed},
		"sealed, wrong":    {sealed, wrong, ErrSealed},
		"sealed of theirs": {smallBackup(t, "theirs", newTestKeyring("k1")), newTestKeyring("k1"), ErrForeignBackup},
	} {
		cfg := restoreConfig(t)
		cfg.Keys = c.keys
		_, err := Restore(cfg, bytes.NewReader(c.backup), toOurs)
		if !errors.Is(err, c.want) {
			t.Errorf("%s: %v", name, err)
		}
		if c.want == ErrSealed && !strings.Contains(err.Error(), `"k1"`) {
			t.Errorf("%s: the error does not name the key: %v", name, err)
		}
		if there, _ := durable.Exists(cfg.Dir); there {
			t.Errorf("%s: something was written", name)
		}
	}
	cfg := restoreConfig(t)
	if info, err := Restore(cfg, bytes.NewReader(smallBackup(t, "theirs", nil)),
		RestoreOptions{Advertise: toOurs.Advertise, Cluster: toOurs.Cluster, AnyCluster: true}); err != nil ||
		info.Cluster != "theirs" {
		t.Errorf("any cluster: %+v, error %v", info, err)
	}
	if _, err := Restore(cfg, bytes.NewReader(smallBackup(t, "ours", nil)), toOurs); !errors.Is(err, ErrNotEmpty) {
		t.Errorf("over existing data: %v", err)
	}
}

// TestNoRevisionTwice: a restored store starts above all revisions that any client can have seen,
// whatever was restored before. That includes older and newer backups, the same backup again, a
// wrong clock, and replaced data that was ahead of the backup.
func TestNoRevisionTwice(t *testing.T) {
	noon := time.Date(2026, 5, 4, 12, 0, 0, 0, time.UTC)
	seen := raftstore.Revision(0) // the highest revision that a client has seen
	for _, step := range []struct {
		name    string
		have    raftstore.Revision // revision of the backup
		at      time.Time
		over    bool // the replaced data exists and its revision is passed to Restore
		commits raftstore.Revision
	}{
		{"the younger backup", 990, noon, false, 40_000},
		{"an older one a minute later", 900, noon.Add(time.Minute), false, 5_000_000},
		{"the same one a second later", 900, noon.Add(time.Minute + time.Second), false, 1},
		{"within the second", 900, noon.Add(time.Minute + time.Second), true, 7},
		{"with a clock that starts in 1970", 900, time.Unix(0, 0), true, 1 << 20},
		{"with a clock a year ahead", 900, noon.AddDate(1, 0, 0), false, 3},
		{"and it is set back", 900, noon, true, 3},
		{"a backup of after that", 0, noon.Add(time.Hour), false, 3}, // have is the highest revision that was seen
	} {
		before := raftstore.Revision(0)
		if step.over {
			before = seen
		}
		if step.have == 0 {
			step.have = seen
		}
		base := RestoreBase(max(step.have, before), step.at)
		if base <= seen || base < step.have+RestoreAhead || base >= 1<<62 {
			t.Errorf("%s: begins at %d, handed out were revisions up to %d", step.name, base, seen)
		}
		seen = base + step.commits
	}
}

// requireRestored checks a data directory that Restore has created.
func requireRestored(t *testing.T, cfg Config) {
	t.Helper()
	d, err := openDisk(cfg.withDefaults(), func(err error) { t.Error(err) })
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	list, err := d.Snapshots.List()
	if err != nil || len(list) != 1 {
		t.Fatalf("snapshots %v, error %v", list, err)
	}
	_, content, err := d.Snapshots.Open(list[0].ID)
	if err != nil {
		t.Fatal(err)
	}
	defer content.Close()
	m, meta, err := mvcc.Load(content)
	if err != nil {
		t.Fatal(err)
	}
	if v := m.View(); v.Keys() != 3 || v.Revision() != RestoreBase(5, toOurs.Now) || v.Compacted() != v.Revision() ||
		meta.Cluster != "ours" {
		t.Errorf("%d keys at revision %d, compacted %d, cluster %q", v.Keys(), v.Revision(),
			v.Compacted(), meta.Cluster)
	}
}

// TestRestoreCutShort: a restore that is interrupted at any moment leaves a directory that does not
// start, and a repeated restore completes it. After the last step the directory starts.
func TestRestoreCutShort(t *testing.T) {
	for _, kind := range logKinds {
		for _, keys := range []*Keyring{nil, newTestKeyring("k1")} {
			backup := smallBackup(t, "ours", nil)
			cfg := restoreConfig(t)
			cfg.LogStore, cfg.Keys, cfg.SegmentBytes = kind, keys, 128<<10
			if _, err := Restore(cfg, bytes.NewReader(backup), toOurs); err != nil {
				t.Fatal(err)
			}
			requireRestored(t, cfg)
			list, err := os.ReadDir(cfg.Dir)
			if err != nil {
				t.Fatal(err)
			}
			// The steps are undone one by one: raft.db, which was moved last, and then the others.
			staging := filepath.Join(cfg.Dir, stagingName)
			names := []string{boltName}
			for _, e := range list {
				if e.Name() != boltName {
					names = append(names, e.Name())
				}
			}
			for steps := range names {
				if err := os.MkdirAll(staging, 0o700); err != nil {
					t.Fatal(err)
				}
				for _, name := range names[:steps+1] {
					if err := os.Rename(filepath.Join(cfg.Dir, name), filepath.Join(staging, name)); err != nil {
						t.Fatal(err)
					}
				}
				if _, err := openDisk(cfg.withDefaults(), func(error) {}); !errors.Is(err, ErrHalfRestored) {
					t.Errorf("%s, %d steps back: %v", kind, steps+1, err)
				}
				if _, err := Restore(cfg, bytes.NewReader(backup), toOurs); err != nil {
					t.Fatalf("%s, %d steps back: restoring again: %v", kind, steps+1, err)
				}
				requireRestored(t, cfg)
			}
			// All files are moved, and the empty directory remains.
			if err := os.Mkdir(staging, 0o700); err != nil {
				t.Fatal(err)
			}
			requireRestored(t, cfg)
		}
	}
}

// TestRestoreFromABadMedium: the error of a reader that fails in the middle is returned, and
// nothing is written.
func TestRestoreFromABadMedium(t *testing.T) {
	backup := smallBackup(t, "ours", nil)
	cfg := restoreConfig(t)
	broken := errors.New("medium is broken")
	_, err := Restore(cfg, &failingReader{ReadSeeker: bytes.NewReader(backup), at: int64(len(backup) / 2), err: broken},
		toOurs)
	if !strings.Contains(fmt.Sprint(err), broken.Error()) {
		t.Errorf("error %v", err)
	}
	if there, _ := durable.Exists(cfg.Dir); there {
		t.Error("something was written")
	}
}

type failingReader struct {
	io.ReadSeeker
	at  int64
	err error
}

func (r *failingReader) Read(p []byte) (int, error) {
	if r.at <= 0 {
		return 0, r.err
	}
	n, err := r.ReadSeeker.Read(p[:min(int64(len(p)), r.at)])
	r.at -= int64(n)
	return n, err
}

// fixHeader corrects the checksum of a header, so that the decoder reads the data behind it.
func fixHeader(b []byte) []byte {
	if len(b) < 16 {
		return b
	}
	if n := int(binary.LittleEndian.Uint32(b[12:])); n >= 0 && 16+n+4 <= len(b) {
		binary.LittleEndian.PutUint32(b[16+n:], crc32.Checksum(b[:16+n], castagnoli))
	}
	return b
}
