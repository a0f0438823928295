package testenv

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"keelson.dev/keelson/deploy/lab"
)

// logNamespace logs the resources, events and pods of a namespace.
func logNamespace(t testing.TB, namespace string) {
	kctl := filepath.Join(current.Lab.Config.BinDir, "kctl")
	for _, args := range [][]string{{"get", "all", "-o", "wide"}, {"get", "events"}, {"describe", "pods"}} {
		out, _ := Try(t, kctl, append(args, "-n", namespace)...)
		t.Logf("kctl %s:\n%s", strings.Join(args, " "), lastLines(out, 120))
	}
}

// Diagnose writes the state of the lab and the last lines of its daemons' logs.
func Diagnose(w io.Writer) {
	kctl := filepath.Join(current.Lab.Config.BinDir, "kctl")
	for _, args := range [][]string{{"lab", "status"}, {"get", "nodes", "-o", "wide"}} {
		cmd := exec.Command(kctl, args...)
		cmd.Env = append(os.Environ(), "KUBECONFIG="+current.Lab.Config.Kubeconfig)
		out, _ := cmd.CombinedOutput()
		fmt.Fprintf(w, "%s\n", out)
	}
	DaemonLogs(w, current.Lab)
}

// DaemonLogs writes the last lines of the logs of a lab's daemons.
func DaemonLogs(w io.Writer, l *lab.Lab) {
	for _, h := range l.Config.Hosts {
		raw, err := os.ReadFile(h.LogFile())
		if err != nil {
			continue
		}
		fmt.Fprintf(w, "--- %s\n%s\n", h.Name, lastLines(string(raw), 40))
	}
}

func lastLines(s string, n int) string {
	lines := strings.Split(strings.TrimRight(s, "\n"), "\n")
	if len(lines) > n {
		lines = lines[len(lines)-n:]
	}
	return strings.Join(lines, "\n")
}
