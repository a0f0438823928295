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

// backupOf is a whole backup of a cluster.
func backupOf(t *testing.T, id string) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := disk.WriteClearBackup(&b, id, time.Unix(0, 0), mvcc.New().View()); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func put(t *testing.T, dir string, files map[string][]byte) {
	t.Helper()
	for name, raw := range files {
		if err := os.WriteFile(filepath.Join(dir, name), raw, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// A cluster that was made anew under the name of one that is lost leaves that one's backups alone, also those that the
// release before has named without an ID, and makes its own although there is one of yesterday.
func TestClusterOfTheSameName(t *testing.T) {
	dir := t.TempDir()
	_, recipient := keyPair(t)
	var sealed bytes.Buffer
	if err := Seal(Recipients{Keys: []string{recipient}}, content(string(backupOf(t, "prod-1a2b"))))(t.Context(), &sealed); err != nil {
		t.Fatal(err)
	}
	lost := map[string][]byte{
		"prod-9f8e_cp1_19991231T210000Z.backup":         backupOf(t, "prod-9f8e"),
		"prod-9f8e_cp1_19991231T220000Z.backup.partial": nil, // it lives, and is writing
		"prod_cp1_19991230T000000Z.backup":              backupOf(t, "prod-9f8e"),
		"prod_cp1_19991231T000000Z.backup":              backupOf(t, "prod-9f8e"),
		"prod_cp1_19991231T010000Z.backup.partial":      backupOf(t, "prod-9f8e")[:100],
		"prod_cp1_19991231T020000Z.backup":              []byte("no backup"),
		"prod_cp1_19991231T030000Z.backup":              sealed.Bytes(), // nobody can say whose it is
	}
	put(t, dir, lost)
	virtual.Test(t, func(t *testing.T) {
		begin(t, Options{Schedule: "TZ=UTC 0 0 * * *", Folder: dir, Keep: 1}, &store{})
		pass(48 * time.Hour)
	})
	want(t, dir, append([]string{"prod-1a2b_cp1_20000103T000000Z.backup"}, sortedNames(lost)...)...)
}

// What the release before has named without an ID is this replica's when its head says so: it counts for the schedule, goes
// when it is too old, and goes when it was never whole.
func TestNamesOfTheReleaseBefore(t *testing.T) {
	dir := t.TempDir()
	put(t, dir, map[string][]byte{
		"prod_cp1_19991229T000000Z.backup":         backupOf(t, "prod-1a2b"),
		"prod_cp1_19991230T000000Z.backup.partial": backupOf(t, "prod-1a2b")[:200],
		"prod_cp1_19991231T120000Z.backup":         backupOf(t, "prod-1a2b"),
	})
	virtual.Test(t, func(t *testing.T) {
		s := &store{}
		begin(t, Options{Schedule: "TZ=UTC 0 12 * * *", Folder: dir, Keep: 2}, s)
		if n := s.backups(); n != 0 {
			t.Fatalf("%d backups were made, and that of yesterday was good", n)
		}
		want(t, dir, "prod_cp1_19991229T000000Z.backup", "prod_cp1_19991231T120000Z.backup")
		found, err := Look(t.Context(), Options{Folder: dir})
		if err != nil || len(found) != 2 {
			t.Fatalf("a person sees %v, %v", found, err)
		}
		pass(12 * time.Hour)
		want(t, dir, "prod-1a2b_cp1_20000101T120000Z.backup", "prod_cp1_19991231T120000Z.backup")
		if found, err = Look(t.Context(), Options{Folder: dir}); err != nil || len(found) != 2 || filepath.Base(found[0].Name) != "prod-1a2b_cp1_20000101T120000Z.backup" {
			t.Fatalf("a person sees %v, %v", found, err)
		}
		pass(24 * time.Hour)
		want(t, dir, "prod-1a2b_cp1_20000101T120000Z.backup", "prod-1a2b_cp1_20000102T120000Z.backup")
	})
}

func sortedNames(files map[string][]byte) (out []string) {
	for name := range files {
		out = append(out, name)
	}
	slices.Sort(out)
	return out
}
