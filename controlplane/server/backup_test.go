package server

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/recovery"
	"keelson.dev/keelson/controlplane/recovery/backups"
)

// A replica that is told to makes backups by itself, which can be restored from, and says how old they are; where it
// cannot, each replica's status has an alarm that says why.
func TestBackupsByThemselves(t *testing.T) {
	good, file := t.TempDir(), filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	p := newPlane(t, 2, func(c *Config) {
		folder := map[string]string{"cp1": good, "cp2": filepath.Join(file, "below")}[c.Name]
		c.Backups = backups.Options{Schedule: "@daily", Folder: folder, Keep: 3}
	})
	eventually(t, func() error {
		for _, m := range p.status("cp2").Members {
			if m.Name == "cp1" && m.Backups != nil && m.Backups.Last != 0 {
				return nil
			}
		}
		return errors.New("cp2 does not say how old cp1's backup is")
	})
	made, err := filepath.Glob(filepath.Join(good, "test-*_cp1_*.backup"))
	if err != nil || len(made) != 1 {
		t.Fatalf("there are %v, %v", made, err)
	}
	keys := datadir.KeyFile(p.members["cp1"].cfg.DataDir)
	if info, err := recovery.Verify(datadir.StoreOptions{Keys: keys}, made[0]); err != nil || info.Keys == 0 || !info.Sealed {
		t.Errorf("it holds %+v, %v", info, err)
	}
	eventually(t, func() error {
		s := p.status("cp1")
		i := slices.IndexFunc(s.Alarms, func(a api.ClusterAlarm) bool { return a.Kind == "backups" })
		if i < 0 {
			return fmt.Errorf("the alarms are %+v", s.Alarms)
		}
		if a := s.Alarms[i]; a.Member != "cp2" || a.Since == 0 || !strings.Contains(a.Message, file) || !strings.Contains(a.Remedy, "--backup-folder") {
			t.Errorf("the alarm is %+v", a)
		}
		return nil
	})
	var metrics string
	if err := p.call("cp2", "GET", "/metrics", nil, &metrics); err != nil || !strings.Contains(metrics, "keelson_backup_failures_total 1") ||
		!strings.Contains(metrics, "keelson_backup_last_success_timestamp_seconds 0") {
		t.Errorf("the metrics of cp2 tell nothing of it, %v", err)
	}
}
