package backupfile

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"keelson.dev/keelson/controlplane/api"
)

// A backup replaces the previous backup only when it is complete.
func TestBackupReplacesPreviousWhenComplete(t *testing.T) {
	path := filepath.Join(t.TempDir(), "backup")
	previous := api.BackupMagic + "previous"
	if err := os.WriteFile(path, []byte(previous), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, commits := range []bool{false, true} {
		f, err := CreateFile(path, false)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := CreateFile(path, false); err == nil || !strings.Contains(err.Error(), "in progress") {
			t.Errorf("a second backup to the file: %v, want an error", err)
		}
		if _, err := f.WriteString(api.BackupMagic + "next"); err != nil {
			t.Fatal(err)
		}
		want, end := previous, f.Discard
		if commits {
			want, end = api.BackupMagic+"next", f.Commit
		}
		if err := end(); err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(path); err != nil || string(got) != want {
			t.Errorf("commit %v: the file has %q, %v, want %q", commits, got, err, want)
		}
		if _, err := os.Stat(path + ".partial"); !os.IsNotExist(err) {
			t.Errorf("commit %v: the partial file: %v", commits, err)
		}
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the mode of the backup: %v, %v", info.Mode(), err)
	}
}

// A file that is not a backup stays.
func TestOtherFilesAreNotReplaced(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	for content, allowed := range map[string]bool{"": true, api.BackupMagic: true, "a letter": false, ageMagic: false} {
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		f, err := CreateFile(path, false)
		if allowed != (err == nil) {
			t.Errorf("a file with %q: %v, allowed is %v", content, err, allowed)
		}
		if err == nil {
			if err := f.Discard(); err != nil {
				t.Error(err)
			}
		}
	}
	if f, err := CreateFile(path+"-age", true); err != nil {
		t.Error(err)
	} else if err := f.Discard(); err != nil {
		t.Error(err)
	}
	if err := os.WriteFile(path, []byte(ageMagic+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if f, err := CreateFile(path, true); err != nil {
		t.Errorf("an encrypted file: %v, want it to count as a backup", err)
	} else if err := f.Discard(); err != nil {
		t.Error(err)
	}
}
