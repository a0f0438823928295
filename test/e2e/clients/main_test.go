// Package clients has the programs that people come with work against the lab as they are: Helm, operators, client
// libraries of other languages, servers behind aggregation. scripts/setup clients builds them into bin/clients.
package clients

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"keelson.dev/keelson/deploy/lab"
	"keelson.dev/keelson/test/testenv"
)

func TestMain(m *testing.M) { os.Exit(runOnLab(m)) }

// runOnLab runs the tests on a lab with replicas that read the files by which the tests change
// authentication and authorization.
func runOnLab(m *testing.M) int {
	folder, err := os.MkdirTemp("", lab.AccessFolder)
	if err == nil {
		err = outside.writeFiles(folder)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "files of the control plane:", err)
		return 1
	}
	defer os.RemoveAll(folder)
	return testenv.MainWith(accessFlags, folder, m)
}

const soon = 3 * time.Minute // for a machine that is three times slower and does other work; nothing here measures time

// clientProgram returns the path of a client that scripts/setup clients has built. Without the
// client it skips the test, because not every machine can fetch the sources; CI sets
// KEELSON_CLIENTS, and the test fails instead.
func clientProgram(t *testing.T, name string) string {
	t.Helper()
	path := filepath.Join(projectFolder(t), "bin", "clients", name)
	if _, err := os.Stat(path); err != nil {
		skipOrFail(t, "%s has not been built: scripts/setup clients", name)
	}
	return path
}

// skipOrFail ends a test that cannot run on this machine.
func skipOrFail(t *testing.T, format string, args ...any) {
	t.Helper()
	if os.Getenv("KEELSON_CLIENTS") != "" {
		t.Fatalf(format, args...)
	}
	t.Skipf(format, args...)
}

// projectFolder returns the project's folder.
func projectFolder(t *testing.T) string {
	t.Helper()
	out, err := exec.Command("go", "env", "GOMOD").Output()
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Dir(string(out))
}
