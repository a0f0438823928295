package fault

import (
	"bufio"
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/test/testenv"
)

// F52: a backup made while the cluster serves is restored in a restore test on this machine and
// contains everything that the cluster has not changed since. The restore test leaves nothing
// behind, and the next call removes the remains of a killed test.
func TestRestoreDrill(t *testing.T) {
	ns := testenv.Namespace(t)
	cs := testenv.Client(t)
	gone := createConfigMap(t, cs, ns, "gone")
	createConfigMap(t, cs, ns, "kept")
	work, file := t.TempDir(), filepath.Join(t.TempDir(), "backup")
	testenv.Kctl(t, "cluster", "backup", file)
	createConfigMap(t, cs, ns, "later")
	if err := cs.CoreV1().ConfigMaps(ns).Delete(context.Background(), gone.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	with := []string{"--work-dir", work, "--data-dir", dataDirOf(t, "cp1")}
	if out := testenv.Kctl(t, append([]string{"cluster", "backup", "inspect", file},
		with...)...); !strings.Contains(out, "configmaps ") {
		t.Errorf("the output of inspect does not contain ConfigMaps:\n%s", out)
	}

	left := killServedBackup(t, file, with)
	out := testenv.Kctl(t, append([]string{"cluster", "restore-drill", file, "-o", "json"}, with...)...)
	var rows []struct {
		Name                                   string
		Backup, Restored, Cluster, Same, Since int
	}
	if err := json.Unmarshal([]byte(out[strings.Index(out, "["):]), &rows); err != nil {
		t.Fatalf("%v:\n%s", err, out)
	}
	seen := map[string]bool{}
	for _, r := range rows {
		seen[r.Name] = true
		if r.Name == "configmaps" && (r.Backup != r.Restored || r.Since < 2 || r.Same < 1 || r.Cluster == 0) {
			t.Errorf("the difference of ConfigMaps is %+v, although one was created and one deleted since", r)
		}
		if r.Name == "nodes" && (r.Backup != 3 || r.Restored != 3 || r.Cluster != 3) {
			t.Errorf("the difference of Nodes is %+v", r)
		}
	}
	if !seen["configmaps"] || !seen["secrets"] || !seen["nodes"] {
		t.Errorf("it has looked at %v", seen)
	}
	if _, err := os.Stat(left); !os.IsNotExist(err) {
		t.Errorf("%s of the killed one is left: %v", left, err)
	}

	testenv.Kctl(t, append([]string{"cluster", "restore-drill", "--fresh"}, with...)...)
	testenv.Kctl(t, append([]string{"cluster", "restore-drill", file, "--offline"}, with...)...)
	if out, err := runKctl(t, "cluster", "restore-drill", file, "--work-dir", work, "--data-dir",
		"/none"); err == nil ||
		!strings.Contains(out, "--encryption-keys must name the key file") {
		t.Errorf("without the key: %v: %s", err, out)
	}
	if found, err := os.ReadDir(work); err != nil || len(found) > 0 {
		t.Errorf("%v is left in the work folder, error %v", found, err)
	}
}

// killServedBackup serves a backup, kills the process and returns the folder that is left.
func killServedBackup(t *testing.T, file string, with []string) string {
	t.Helper()
	cmd := exec.Command(filepath.Join(testenv.Lab().Config.BinDir, "keelson-controlplane"),
		append([]string{"backup", "serve", file, "-o", "json"}, with...)...)
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(stdout).ReadBytes('\n')
	_ = cmd.Process.Kill()
	_ = cmd.Wait() // killed
	var s struct{ Folder string }
	if err == nil {
		err = json.Unmarshal(line, &s)
	}
	if err != nil {
		t.Fatalf("serving the backup: %v", err)
	}
	if _, err := os.Stat(s.Folder); err != nil {
		t.Fatalf("the killed one has left nothing to sweep: %v", err)
	}
	return s.Folder
}
