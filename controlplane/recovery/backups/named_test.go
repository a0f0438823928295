package backups

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"keelson.dev/keelson/internal/virtual"
	"keelson.dev/keelson/raftstore/disk"
	"keelson.dev/keelson/raftstore/mvcc"
)

// newBackup returns a complete backup of a cluster.
func newBackup(t *testing.T, id string) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := disk.WriteClearBackup(&b, id, time.Unix(0, 0), mvcc.New().View()); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func writeFiles(t *testing.T, dir string, files map[string][]byte) {
	t.Helper()
	for name, raw := range files {
		if err := os.WriteFile(filepath.Join(dir, name), raw, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// A new cluster with the name of a lost cluster does not remove the backups of the lost cluster,
// even if a previous release has named them without an ID. It makes its own backup although the
// lost cluster has a recent one.
func TestClusterOfTheSameName(t *testing.T) {
	dir := t.TempDir()
	_, recipient := keyPair(t)
	var sealed bytes.Buffer
	if err := EncryptWith(Recipients{Keys: []string{recipient}},
		writerOf(string(newBackup(t, "prod-1a2b"))))(t.Context(),
		&sealed); err != nil {
		t.Fatal(err)
	}
	lost := map[string][]byte{
		"prod-9f8e_cp1_19991231T210000Z.backup":         newBackup(t, "prod-9f8e"),
		"prod-9f8e_cp1_19991231T220000Z.backup.partial": nil, // another cluster that is writing it
		"prod_cp1_19991230T000000Z.backup":              newBackup(t, "prod-9f8e"),
		"prod_cp1_19991231T000000Z.backup":              newBackup(t, "prod-9f8e"),
		"prod_cp1_19991231T010000Z.backup.partial":      newBackup(t, "prod-9f8e")[:100],
		"prod_cp1_19991231T020000Z.backup":              []byte("no backup"),
		"prod_cp1_19991231T030000Z.backup":              sealed.Bytes(), // its cluster is unknown
	}
	writeFiles(t, dir, lost)
	virtual.Test(t, func(t *testing.T) {
		startKeeper(t, Options{Schedule: "TZ=UTC 0 0 * * *", Folder: dir, Keep: 1}, &fakeStore{})
		advanceTime(48 * time.Hour)
	})
	checkFiles(t, dir, append([]string{"prod-1a2b_cp1_20000103T000000Z.backup"}, sortedNames(lost)...)...)
}

// A backup that a previous release has named without an ID belongs to this replica if its header
// has the cluster's ID. It counts for the schedule and is pruned. Its incomplete files are removed.
func TestNamesOfThePreviousRelease(t *testing.T) {
	dir := t.TempDir()
	writeFiles(t, dir, map[string][]byte{
		"prod_cp1_19991229T000000Z.backup":         newBackup(t, "prod-1a2b"),
		"prod_cp1_19991230T000000Z.backup.partial": newBackup(t, "prod-1a2b")[:200],
		"prod_cp1_19991231T120000Z.backup":         newBackup(t, "prod-1a2b"),
	})

	virtual.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		startKeeper(t, Options{Schedule: "TZ=UTC 0 12 * * *", Folder: dir, Keep: 2}, s)
		if n := s.countCalls(); n != 0 {
			t.Fatalf("%d backups were made, although yesterday's backup is valid", n)
		}
		checkFiles(t, dir, "prod_cp1_19991229T000000Z.backup", "prod_cp1_19991231T120000Z.backup")
		found, err := ListBackups(t.Context(), Options{Folder: dir})
		if err != nil || len(found) != 2 {
			t.Fatalf("listed %v, %v", found, err)
		}
		advanceTime(12 * time.Hour)
		checkFiles(t, dir, "prod-1a2b_cp1_20000101T120000Z.backup", "prod_cp1_19991231T120000Z.backup")
		if found, err = ListBackups(t.Context(), Options{Folder: dir}); err != nil || len(found) != 2 ||
			filepath.Base(found[0].Name) != "prod-1a2b_cp1_20000101T120000Z.backup" {
			t.Fatalf("listed %v, %v", found, err)
		}
		advanceTime(24 * time.Hour)
		checkFiles(t, dir, "prod-1a2b_cp1_20000101T120000Z.backup", "prod-1a2b_cp1_20000102T120000Z.backup")
	})
}

func sortedNames(files map[string][]byte) (out []string) {
	for name := range files {
		out = append(out, name)
	}
	slices.Sort(out)
	return out
}
