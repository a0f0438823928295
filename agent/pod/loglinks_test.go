package pod

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/virtual"
)

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

// A running container has a link to its log for log shippers, with pod and container ID. The link
// is removed with the pod. F16
func TestLogsAreLinked(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.cfg.Paths.LogLinks = filepath.Join(t.TempDir(), "containers")
		p := simplePod("a")
		n.cluster.Put(p)
		n.start()
		defer func() { n.stop() }()
		virtual.Wait()
		list, err := n.rt.ListContainers(t.Context(), &cri.ListContainersRequest{})
		if err != nil || len(list.Containers) != 1 {
			t.Fatalf("%d containers, %v", len(list.Containers), err)
		}
		want := p.Name + "_" + p.Namespace + "_" + p.Spec.Containers[0].Name + "-" + list.Containers[0].Id + ".log"
		if got := linkNames(t, n.cfg.Paths.LogLinks); len(got) != 1 || got[0] != want {
			t.Fatalf("links %q, want %s", got, want)
		}
		target, err := os.Readlink(filepath.Join(n.cfg.Paths.LogLinks, want))
		if log := filepath.Join(logDirectory(n.cfg.Paths.Logs, p), logPath(p.Spec.Containers[0].Name, 0)); err != nil || target != log {
			t.Errorf("the link leads to %s, want %s (%v)", target, log, err)
		}
		n.cluster.Delete(p)
		virtual.Wait()
		if got := linkNames(t, n.cfg.Paths.LogLinks); len(got) != 0 {
			t.Errorf("links of a pod that is gone: %q", got)
		}
	})
}

// A starting agent restores the links of existing containers and removes its dead links. It leaves
// other files and foreign links.
func TestLogLinksAreRestored(t *testing.T) {
	dir := t.TempDir()
	s := New(Config{Paths: agent.Paths{State: filepath.Join(dir, "state"), Logs: filepath.Join(dir, "pods"), LogLinks: filepath.Join(dir, "containers")}})
	pod := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "web", UID: "u"}}
	log := filepath.Join(logDirectory(s.cfg.Paths.Logs, pod), logPath("c", 3))
	for _, d := range []string{filepath.Dir(log), s.cfg.Paths.LogLinks} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, f := range []string{log, filepath.Join(s.cfg.Paths.LogLinks, "file.log")} {
		if err := os.WriteFile(f, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for name, target := range map[string]string{"dead.log": filepath.Join(s.cfg.Paths.Logs, "x", "0.log"), "other.log": filepath.Join(dir, "elsewhere")} {
		if err := os.Symlink(target, filepath.Join(s.cfg.Paths.LogLinks, name)); err != nil {
			t.Fatal(err)
		}
	}
	id := strings.Repeat("a", 64)
	labels := map[string]string{agent.LabelPodName: "web", agent.LabelPodNamespace: "ns", agent.LabelPodUID: "u"}
	for range 2 {
		err := s.restoreLogLinks([]*cri.Container{
			{Id: id, Labels: labels, Metadata: &cri.ContainerMetadata{Name: "c", Attempt: 3}},
			{Id: "b", Labels: labels, Metadata: &cri.ContainerMetadata{Name: "without-log"}},
		})
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.Join(linkNames(t, s.cfg.Paths.LogLinks), " "); got != "file.log other.log web_ns_c-"+id+".log" {
			t.Errorf("links %s", got)
		}
	}
	pod.Name = strings.Repeat("n", 253)
	link := filepath.Base(logLink("/l", pod, "c", id))
	if len(link) != maxFileName || !strings.HasSuffix(link, "-"+id+".log") {
		t.Errorf("the name of a link has %d bytes: %s", len(link), link)
	}
}
