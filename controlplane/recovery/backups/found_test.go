package backups

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"keelson.dev/keelson/internal/virtual"
)

// The newest backup is the newest of the cluster that is meant, and one of a time that is still to come is none: the clock
// was wrong when it was made.
func TestNewest(t *testing.T) {
	const yesterday, before, other, nextYear, soon = "prod-1a2b_cp1_19991231T000000Z.backup", "prod_cp1_19991230T000000Z.backup",
		"prod-9f8e_cp1_19991231T230000Z.backup", "prod-1a2b_cp1_20010101T000000Z.backup", "prod-1a2b_cp2_20000101T000030Z.backup"
	for name, c := range map[string]struct {
		files   map[string]string // name → the ID in its head
		cluster string
		want    string // or what the error says
	}{
		"the one of yesterday":                  {map[string]string{yesterday: "prod-1a2b", before: "prod-1a2b", other: "prod-9f8e", nextYear: "prod-1a2b"}, "prod-1a2b", yesterday},
		"a clock that is half a minute ahead":   {map[string]string{yesterday: "prod-1a2b", soon: "prod-1a2b"}, "prod-1a2b", soon},
		"none but one of times to come":         {map[string]string{nextYear: "prod-1a2b", other: "prod-9f8e"}, "prod-1a2b", nextYear},
		"a name of the release before":          {map[string]string{before: "prod-1a2b", other: "prod-9f8e"}, "prod-1a2b", before},
		"that name in another cluster":          {map[string]string{before: "prod-9f8e"}, "prod-1a2b", "--backup-cluster"},
		"no other than those of others":         {map[string]string{other: "prod-9f8e"}, "prod-1a2b", "prod-9f8e"},
		"nobody knows whose, and it is clear":   {map[string]string{yesterday: "prod-1a2b", before: "prod-1a2b", nextYear: "prod-1a2b"}, "", yesterday},
		"nobody knows whose, and there are two": {map[string]string{yesterday: "prod-1a2b", other: "prod-9f8e"}, "", "of prod-1a2b, prod-9f8e: --backup-cluster"},
		"nothing":                               {nil, "prod-1a2b", ErrNone.Error()},
	} {
		t.Run(name, func(t *testing.T) {
			dir, files := t.TempDir(), map[string][]byte{}
			for file, id := range c.files {
				files[file] = backupOf(t, id)
			}
			put(t, dir, files)
			virtual.Test(t, func(t *testing.T) {
				all, err := Look(t.Context(), Options{Folder: dir})
				if err != nil || len(all) != len(c.files) {
					t.Fatalf("there are %v, %v", all, err)
				}
				for _, f := range all {
					if ahead := filepath.Base(f.Name) == nextYear; f.Ahead != ahead {
						t.Errorf("%s is of a time to come: %v", f.Name, f.Ahead)
					}
				}
				got, err := Newest(all, c.cluster)
				if err != nil && !strings.Contains(err.Error(), c.want) || err == nil && filepath.Base(got.Name) != c.want {
					t.Errorf("it is %s, %v, want %s", got.Name, err, c.want)
				}
			})
		})
	}
}

// A bucket tells whose backups there are by their names.
func TestNewestInBucket(t *testing.T) {
	s := open(t, nil)
	s.put(t, "of/ours/prod-1a2b_cp_1_20260101T000000Z.backup", "of/ours/prod-9f8e_cp1_20260102T000000Z.backup",
		"of/ours/prod-1a2b_cp1_"+time.Now().AddDate(1, 0, 0).UTC().Format(stamp)+".backup")
	all, err := Look(t.Context(), Options{S3: s.s3})
	if err != nil || len(all) != 3 {
		t.Fatalf("there are %v, %v", all, err)
	}
	if got, err := Newest(all, "prod-1a2b"); err != nil || got.Name != "of/ours/prod-1a2b_cp_1_20260101T000000Z.backup" {
		t.Errorf("the newest is %+v, %v", got, err)
	}
	if _, err := Newest(all, ""); err == nil || !strings.Contains(err.Error(), "prod-1a2b, prod-9f8e") {
		t.Errorf("of two clusters it says %v", err)
	}
}
