package server_test

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
	"keelson.dev/keelson/controlplane/server"
	"keelson.dev/keelson/controlplane/server/servertest"
)

// A replica makes scheduled backups that can be verified, and reports the time of the last one. If
// backups fail, the status of each replica has an alarm with the reason.
func TestScheduledBackups(t *testing.T) {
	good, file := t.TempDir(), filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	p := newPlane(t, 2, func(c *server.Config) {
		folder := map[string]string{"cp1": good, "cp2": filepath.Join(file, "below")}[c.Name]
		c.Backups = backups.Options{Schedule: "@daily", Folder: folder, Keep: 3}
	})
	servertest.Eventually(t, func() error {
		for _, m := range p.ClusterStatus("cp2").Members {
			if m.Name == "cp1" && m.Backups != nil && m.Backups.Last != 0 {
				return nil
			}
		}
		return errors.New("cp2 does not report the backup of cp1")
	})
	made, err := filepath.Glob(filepath.Join(good, "test-*_cp1_*.backup"))
	if err != nil || len(made) != 1 {
		t.Fatalf("got %v, %v", made, err)
	}
	keys := datadir.KeyFile(p.Members["cp1"].Config.DataDir)
	if info, err := recovery.Verify(datadir.StoreOptions{Keys: keys}, made[0]); err != nil ||
		info.Keys == 0 || !info.Sealed {
		t.Errorf("the backup has %+v, %v", info, err)
	}
	servertest.Eventually(t, func() error {
		s := p.ClusterStatus("cp1")
		i := slices.IndexFunc(s.Alarms, func(a api.ClusterAlarm) bool { return a.Kind == "backups" })
		if i < 0 {
			return fmt.Errorf("alarms: %+v", s.Alarms)
		}
		if a := s.Alarms[i]; a.Member != "cp2" || a.Since == 0 || !strings.Contains(a.Message, file) ||
			!strings.Contains(a.Remedy, "--backup-folder") {
			t.Errorf("alarm: %+v", a)
		}
		return nil
	})
	var metrics string
	if err := p.Call("cp2", "GET", "/metrics", nil, &metrics); err != nil ||
		!strings.Contains(metrics, "keelson_backup_failures_total 1") ||
		!strings.Contains(metrics, "keelson_backup_last_success_timestamp_seconds 0") {
		t.Errorf("the metrics of cp2 have no failure, %v", err)
	}
}
