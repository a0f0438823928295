package backups

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"keelson.dev/keelson/internal/virtual"
)

// Newest returns the newest backup of the selected cluster. A backup with a time in the future
// counts as older than all others, because a clock was wrong.
func TestNewest(t *testing.T) {
	const yesterday, before, other, nextYear, soon = "prod-1a2b_cp1_19991231T000000Z.backup",
		"prod_cp1_19991230T000000Z.backup",
		"prod-9f8e_cp1_19991231T230000Z.backup", "prod-1a2b_cp1_20010101T000000Z.backup",
		"prod-1a2b_cp2_20000101T000030Z.backup"
	for name, c := range map[string]struct {
		files   map[string]string // name → cluster ID in its header
		cluster string
		want    string // a name, or part of the error
	}{
		"yesterday's backup": {map[string]string{yesterday: "prod-1a2b", before: "prod-1a2b",
			other: "prod-9f8e", nextYear: "prod-1a2b"}, "prod-1a2b", yesterday},
		"time half a minute ahead": {map[string]string{yesterday: "prod-1a2b", soon: "prod-1a2b"},
			"prod-1a2b", soon},
		"only a backup with a future time": {map[string]string{nextYear: "prod-1a2b", other: "prod-9f8e"},
			"prod-1a2b", nextYear},
		"name of the previous release": {map[string]string{before: "prod-1a2b", other: "prod-9f8e"},
			"prod-1a2b", before},
		"previous name in another cluster": {map[string]string{before: "prod-9f8e"}, "prod-1a2b",
			"--backup-cluster"},
		"only backups of other clusters": {map[string]string{other: "prod-9f8e"}, "prod-1a2b", "prod-9f8e"},
		"no cluster selected, one exists": {map[string]string{yesterday: "prod-1a2b", before: "prod-1a2b",
			nextYear: "prod-1a2b"}, "", yesterday},
		"no cluster selected, two exist": {map[string]string{yesterday: "prod-1a2b", other: "prod-9f8e"}, "",
			"(prod-1a2b, prod-9f8e): --backup-cluster"},
		"nothing": {nil, "prod-1a2b", ErrNone.Error()},
	} {
		t.Run(name, func(t *testing.T) {
			dir, files := t.TempDir(), map[string][]byte{}
			for file, id := range c.files {
				files[file] = newBackup(t, id)
			}
			writeFiles(t, dir, files)
			virtual.Test(t, func(t *testing.T) {
				all, err := ListBackups(t.Context(), Options{Folder: dir})
				if err != nil || len(all) != len(c.files) {
					t.Fatalf("got %v, %v", all, err)
				}
				for _, f := range all {
					if ahead := filepath.Base(f.Name) == nextYear; f.InFuture != ahead {
						t.Errorf("the time of %s is in the future: %v", f.Name, f.InFuture)
					}
				}
				got, err := Newest(all, c.cluster)
				if err != nil && !strings.Contains(err.Error(), c.want) ||
					err == nil && filepath.Base(got.Name) != c.want {
					t.Errorf("got %s, %v, want %s", got.Name, err, c.want)
				}
			})
		})
	}
}

// In a bucket, the names identify the clusters of the backups.
func TestNewestInBucket(t *testing.T) {
	s := startBucket(t, nil)
	s.putObjects(t, "of/ours/prod-1a2b_cp_1_20260101T000000Z.backup", "of/ours/prod-9f8e_cp1_20260102T000000Z.backup",
		"of/ours/prod-1a2b_cp1_"+time.Now().AddDate(1, 0, 0).UTC().Format(timeFormat)+".backup")
	all, err := ListBackups(t.Context(), Options{S3: s.s3})
	if err != nil || len(all) != 3 {
		t.Fatalf("got %v, %v", all, err)
	}
	if got, err := Newest(all, "prod-1a2b"); err != nil ||
		got.Name != "of/ours/prod-1a2b_cp_1_20260101T000000Z.backup" {
		t.Errorf("the newest is %+v, %v", got, err)
	}
	if _, err := Newest(all, ""); err == nil || !strings.Contains(err.Error(), "prod-1a2b, prod-9f8e") {
		t.Errorf("error for two clusters: %v", err)
	}
}
