package kctl

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Away from a control plane a restore drill takes keelson-controlplane from $PATH, and its errors name everything that it needs:
// the program, the place for it and the key file of the backup.
func TestRestoreDrillSaysWhatItNeeds(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", dir)
	_, err := findDaemonProgram()
	for _, want := range []string{"keelson-controlplane", filepath.Dir(daemonProgram()), "$PATH", "--encryption-keys"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("without the program: %v, want it to name %s", err, want)
		}
	}
	program := filepath.Join(dir, "keelson-controlplane")
	said := `keelson-controlplane: /b: backup is encrypted under key "k", which is missing (no key file is set): ` +
		`--encryption-keys names the key file`
	if err := os.WriteFile(program, []byte("#!/bin/sh\necho '"+said+"' >&2\nexit 1\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if got, err := findDaemonProgram(); got != program || err != nil {
		t.Errorf("with the program in $PATH: %s, %v", got, err)
	}
	if _, _, err := startBackupServer(t.Context(), nil); err == nil ||
		!strings.Contains(err.Error(), "copy "+defaultDataDir+"/pki/store.keys from a replica") {
		t.Errorf("without the key: %v", err)
	}
}
