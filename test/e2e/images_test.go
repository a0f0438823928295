package e2e

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	v1image "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/deploy/lab"
	"keelson.dev/keelson/test/testenv"
)

// registryClient reads and writes images of the lab's registry, from inside its host.
type registryClient struct {
	t *testing.T
	lab.Host
}

func (h registryClient) remoteOptions() []remote.Option {
	return []remote.Option{remote.WithTransport(testenv.HTTP(h.Host).Transport)}
}

func (h registryClient) parseReference(path string) name.Reference {
	h.t.Helper()
	ref, err := name.ParseReference(h.Endpoint(lab.RegistryPort)+"/"+path, name.Insecure)
	if err != nil {
		h.t.Fatal(err)
	}
	return ref
}

func (h registryClient) fetchImage(path string) v1image.Image {
	h.t.Helper()
	img, err := remote.Image(h.parseReference(path), h.remoteOptions()...)
	if err != nil {
		h.t.Fatal(err)
	}
	return img
}

// An archive that 'docker save' writes is loaded into the lab, and a pod runs its image under its own name; so does one
// that another tool has pushed. Both outlive the registry's process. F106
func TestLoadedImages(t *testing.T) {
	w := newNamespace(t)
	h := registryClient{t, testenv.Host(t, "registry")}
	img := h.fetchImage("hello:v1")
	tag, err := name.NewTag("example.com/team/loaded:v1")
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "image.tar")
	if err := tarball.WriteToFile(file, tag, img); err != nil {
		t.Fatal(err)
	}
	if out := testenv.Kctl(t, "lab", "load", file); !strings.Contains(out, "example.com/team/loaded:v1") {
		t.Errorf("lab load: %q", out)
	}
	if err := remote.Write(h.parseReference("team/pushed:v1"), img, h.remoteOptions()...); err != nil {
		t.Fatal(err)
	}
	if testenv.Owned() {
		testenv.Kctl(t, "lab", "restart", "registry")
	}
	for name, image := range map[string]string{"loaded": "example.com/team/loaded:v1",
		"pushed": "ghcr.io/team/pushed:v1"} {
		w.createPod(newPod(name, image))
		w.awaitPod(name, requireReady)
	}
	if out, err := testenv.Try(t, filepath.Join(testenv.Lab().Config.BinDir, "kctl"), "lab", "load",
		"/etc/passwd"); err == nil ||
		!strings.Contains(out, "kctl lab load: reading /etc/passwd") {
		t.Errorf("what is no archive: %v, %q", err, out)
	}
}

// The tools image fetches by a name of the hosts file, within a timeout, and reports errors in the
// usual words.
func TestToolsFetch(t *testing.T) {
	w := newNamespace(t)
	w.createWeb(webDeployment("web", 1))
	target := w.awaitReplicas("web", 1)[0]
	client := sleeperPod("client")
	client.Spec.HostAliases = []v1.HostAlias{{IP: target.Status.PodIP, Hostnames: []string{"web.example"}}}
	w.createPod(client)
	w.awaitPod("client", requireReady)
	for url, want := range map[string]string{
		"http://web.example:8080/":        "hello from " + target.Name,
		"http://web.example:8080/healthz": "",
		"http://web.example:8080/absent":  "wget: server returned error: HTTP/1.1 404 Not Found",
		"http://127.0.0.1:1/":             "wget: can't connect to remote host",
	} {
		testenv.Eventually(t, soon, func() error {
			out, err := testenv.Try(t, filepath.Join(testenv.Lab().Config.BinDir, "kctl"), "-n", w.ns, "exec", "client",
				"--", "wget", "-T", "5", "-qO-", url)
			if !strings.HasPrefix(out, want) || (err != nil) != strings.HasPrefix(want, "wget:") {
				return fmt.Errorf("%s: %v, %q, want %q", url, err, out, want)
			}
			return nil
		})
	}
}

// Events of one second are listed as they happened.
func TestEventsInOrder(t *testing.T) {
	w := newNamespace(t)
	w.createPod(sleeperPod("client"))
	w.awaitPod("client", requireReady)
	w.awaitEvent("client", "Started")
	req := w.cs.CoreV1().RESTClient().Get().AbsPath("/api/v1/namespaces/"+w.ns+"/events").
		Param("fieldSelector", "involvedObject.name=client")
	testenv.Eventually(t, soon, func() error { // the scheduler's event and the agent's come by ways of their own
		var reasons []string
		list := &v1.EventList{}
		if err := req.Do(context.Background()).Into(list); err != nil {
			return err
		}
		for _, e := range list.Items {
			reasons = append(reasons, e.Reason)
		}
		if got := strings.Join(reasons, " "); got != "Scheduled Pulled Created Started" {
			return fmt.Errorf("events: %s", got)
		}
		return nil
	})
}
