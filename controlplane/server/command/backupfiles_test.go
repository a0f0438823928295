package command

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/raftstore/disk"
	"keelson.dev/keelson/raftstore/mvcc"
)

// The newest backup is the newest of this machine's cluster without a time in the future. A flag
// selects another cluster, and the error names the flag.
func TestFetchNewestBackup(t *testing.T) {
	dataDir, folder, to := initDataDir(t), t.TempDir(), t.TempDir()
	id := datadir.ClusterID(dataDir)
	if id == "" {
		t.Fatal("the data directory has no cluster ID")
	}
	name := func(id string, at time.Time) string {
		return id + "_cp1_" + at.UTC().Format("20060102T150405Z") + ".backup"
	}
	now := time.Now()
	ours, ahead, other := name(id, now.AddDate(0, 0, -1)), name(id, now.AddDate(1, 0, 0)),
		name("other-1", now.Add(-time.Hour))
	for file, of := range map[string]string{ours: id, ahead: id, other: "other-1"} {
		var raw bytes.Buffer
		if err := disk.WriteClearBackup(&raw, of, now, mvcc.New().View()); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(folder, file), raw.Bytes(), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for i, c := range []struct{ args, takes, says string }{
		{"--data-dir=" + dataDir, ours, ""},
		{"--data-dir=" + dataDir + " --backup-cluster=other-1", other, ""},
		{"--data-dir=" + dataDir + " --backup=" + ahead, ahead, ""},
		{"--data-dir=/none", "", "of several clusters"},
		{"--data-dir=/none --backup-cluster=" + id, ours, ""},
		{"--data-dir=/none --backup-cluster=third", "", "of cluster third"},
	} {
		out, err := runCommandLine(append(strings.Fields(c.args), "backup", "fetch",
			filepath.Join(to, string(rune('a'+i))),
			"--config=", "--backup-folder="+folder)...)
		if (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) ||
			!strings.Contains(out, c.takes) {
			t.Errorf("%s: %q, %v, want %s%s", c.args, out, err, c.takes, c.says)
		}
	}
	out, err := runCommandLine("backup", "inspect", "--config=", "--data-dir="+dataDir, "--backup-folder="+folder)
	if err != nil || !strings.Contains(out, ours) {
		t.Errorf("inspected\n%s%v, want %s", out, err, ours)
	}
}
