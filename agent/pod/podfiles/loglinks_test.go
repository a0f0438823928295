package podfiles

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
)

// A starting agent restores the links of existing containers and removes its dead links. It leaves
// other files and foreign links.
func TestLogLinksAreRestored(t *testing.T) {
	dir := t.TempDir()
	paths := agent.Paths{State: filepath.Join(dir, "state"), Logs: filepath.Join(dir, "pods"),
		LogLinks: filepath.Join(dir, "containers")}
	pod := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "web", UID: "u"}}
	log := filepath.Join(LogDirectory(paths.Logs, pod), ContainerLogPath("c", 3))
	for _, d := range []string{filepath.Dir(log), paths.LogLinks} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, f := range []string{log, filepath.Join(paths.LogLinks, "file.log")} {
		if err := os.WriteFile(f, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for name, target := range map[string]string{"dead.log": filepath.Join(paths.Logs, "x", "0.log"),
		"other.log": filepath.Join(dir, "elsewhere")} {
		if err := os.Symlink(target, filepath.Join(paths.LogLinks, name)); err != nil {
			t.Fatal(err)
		}
	}
	id := strings.Repeat("a", 64)
	labels := map[string]string{agent.LabelPodName: "web", agent.LabelPodNamespace: "ns", agent.LabelPodUID: "u"}
	for range 2 {
		err := RestoreLogLinks(paths, []*cri.Container{
			{Id: id, Labels: labels, Metadata: &cri.ContainerMetadata{Name: "c", Attempt: 3}},
			{Id: "b", Labels: labels, Metadata: &cri.ContainerMetadata{Name: "without-log"}},
		})
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.Join(linkNames(t, paths.LogLinks), " "); got != "file.log other.log web_ns_c-"+id+".log" {
			t.Errorf("links %s", got)
		}
	}
	pod.Name = strings.Repeat("n", 253)
	link := filepath.Base(logLinkPath("/l", pod, "c", id))
	if len(link) != maxFileName || !strings.HasSuffix(link, "-"+id+".log") {
		t.Errorf("the name of a link has %d bytes: %s", len(link), link)
	}
}

// linkNames returns the names of the links in a directory.
func linkNames(t *testing.T, dir string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}
