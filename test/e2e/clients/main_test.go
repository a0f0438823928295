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

func TestMain(m *testing.M) { os.Exit(run(m)) }

// run gives the lab's replicas the files by which the tests change who may come.
func run(m *testing.M) int {
	folder, err := os.MkdirTemp("", lab.AccessFolder)
	if err == nil {
		err = outside.prepare(folder)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "files of the control plane:", err)
		return 1
	}
	defer os.RemoveAll(folder)
	return testenv.MainWith(accessFlags, folder, m)
}

const soon = 3 * time.Minute // for a machine that is three times slower and does other work; nothing here measures time

// program is a client that scripts/setup clients has built. Without it the test is skipped by name, for not every
// machine can fetch what it is built from; the tests of CI set KEELSON_CLIENTS and fail then.
func program(t *testing.T, name string) string {
	t.Helper()
	path := filepath.Join(root(t), "bin", "clients", name)
	if _, err := os.Stat(path); err != nil {
		missing(t, "%s has not been built: scripts/setup clients", name)
	}
	return path
}

// missing ends a test that cannot run here.
func missing(t *testing.T, format string, args ...any) {
	t.Helper()
	if os.Getenv("KEELSON_CLIENTS") != "" {
		t.Fatalf(format, args...)
	}
	t.Skipf(format, args...)
}

// root is the project's folder.
func root(t *testing.T) string {
	t.Helper()
	out, err := exec.Command("go", "env", "GOMOD").Output()
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Dir(string(out))
}
