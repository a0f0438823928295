package recovery

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"keelson.dev/keelson/controlplane/api"
)

// RemoveLeftovers keeps files of users in the work directory, regardless of their names, and the
// backup in use, wherever it is.
func TestRemoveLeftovers(t *testing.T) {
	work := t.TempDir()
	for _, dir := range []string{"keelson-backup-march", "keelson-backup-20260401", api.TrialPrefix,
		api.TrialPrefix + "mine", api.TrialPrefix + "10", api.TrialPrefix + "11"} {
		if err := os.Mkdir(filepath.Join(work, dir), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(work, dir, "today"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, file := range []string{"keelson-backup-today", "keelson-backup-1", api.TrialPrefix + "12",
		api.TrialPrefix + "13", api.TrialPrefix + "14.old"} {
		if err := os.WriteFile(filepath.Join(work, file), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	link := filepath.Join(t.TempDir(), "today")
	if err := os.Symlink(filepath.Join(work, api.TrialPrefix+"12"), link); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ about, goes string }{
		{filepath.Join(work, api.TrialPrefix+"10", "today"),
			api.TrialPrefix + "11 " + api.TrialPrefix + "12 " + api.TrialPrefix + "13"},
		{link, api.TrialPrefix + "10"}, // its file was removed
	} {
		removed, err := RemoveLeftovers(work, c.about)
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, path := range removed {
			names = append(names, filepath.Base(path))
		}
		if got := strings.Join(names, " "); got != c.goes {
			t.Errorf("with backup %s: removed %q, want %q", c.about, got, c.goes)
		}
	}
	if err := os.WriteFile(filepath.Join(work, api.TrialPrefix+"12"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if removed, err := RemoveLeftovers(work, link); err != nil || len(removed) > 0 {
		t.Errorf("with the backup behind a link: removed %v, %v", removed, err)
	}
	for _, stays := range []string{"keelson-backup-march/today", "keelson-backup-20260401/today",
		"keelson-backup-today", "keelson-backup-1", api.TrialPrefix + "mine/today", api.TrialPrefix + "14.old"} {
		if _, err := os.Stat(filepath.Join(work, stays)); err != nil {
			t.Error(err)
		}
	}
}
