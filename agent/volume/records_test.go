package volume

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// F110: records of volumes are read as written, also by a release that knows fewer fields. An
// unreadable record is an error with its path, never treated as missing.
func TestRecords(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "iscsi")
	read := func() (map[string]iscsiRecord, error) { return recordsIn[iscsiRecord](dir, "an iSCSI volume") }
	if recs, err := read(); err != nil || len(recs) > 0 {
		t.Errorf("of no folder: %v, %v", recs, err)
	}
	one, two := filepath.Join(dir, "one.json"), filepath.Join(dir, "two.json")
	want := iscsiRecord{Version: 1, Target: targetName, Interface: "default", LUN: 3, Attach: true}
	requireNoError(t, writeRecord(one, want))
	requireNoError(t, os.WriteFile(two, []byte(`{"version":1,"lun":4,"later":{}}`), 0o600))
	requireNoError(t, os.Mkdir(filepath.Join(dir, "one"), 0o700)) // the mount point beside the record
	if recs, err := read(); err != nil || len(recs) != 2 || recs[one] != want ||
		recs[two] != (iscsiRecord{Version: 1, LUN: 4}) {
		t.Errorf("%+v, %v", recs, err)
	}
	requireNoError(t, os.WriteFile(two, []byte(`{"version":1,"lu`), 0o600))
	if recs, err := read(); err == nil || recs != nil ||
		!strings.HasPrefix(err.Error(), "record of an iSCSI volume "+two+": ") {
		t.Errorf("damaged: %+v, %v", recs, err)
	}
	requireNoError(t, os.Remove(two))
	// like a record that is removed while the folder is read
	requireNoError(t, os.Symlink(filepath.Join(dir, "gone"), two))
	if recs, err := read(); err != nil || len(recs) != 1 {
		t.Errorf("gone meanwhile: %+v, %v", recs, err)
	}
}
