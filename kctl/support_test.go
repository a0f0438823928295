package kctl

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"k8s.io/client-go/rest"

	"keelson.dev/keelson/controlplane/api"
)

const planted = "pL4nted-S3cret"

// aLeakyPlane has a secret in everything that it answers.
type aLeakyPlane struct{ *aPlane }

// ServeHTTP implements http.Handler.
func (p aLeakyPlane) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	reply := func(v string) { w.Header().Set("Content-Type", "application/json"); _, _ = io.WriteString(w, v) }
	leaks := `{"kind":"Pod","metadata":{"name":"web-0","annotations":{"x/y":"` + planted +
		`"}},"spec":{"containers":[{"name":"c","image":"app:7",
"args":["--password=` + planted + `"],"env":[{"name":"A","value":"` + planted + `"}]}]},"status":{"message":"token=` +
		planted + `"}}`
	switch {
	case r.URL.Path == api.PathClusterSupport:
		raw, _ := json.Marshal(api.ClusterSupportPart{Replica: "cp1", Version: "v9",
			Flags: map[string]string{"backup-folder": "/backups", "x": "https://joe:" + planted + "@host"},
			Log:   "level=INFO msg=fine\nlevel=ERROR err=\"Bearer " + planted + "\"\n", Metrics: "up 1\n"})
		reply(string(raw))
	case r.URL.Path == "/api/v1/nodes":
		reply(`{"kind":"NodeList","items":[{"metadata":{"name":"w1"},"status":{"conditions":[{"type":"Ready",` +
			`"status":"True"}]}},{"metadata":{"name":"w2","annotations":{"a":"` + planted +
			`"}}},{"metadata":{"name":"w3"}}]}`)
	case strings.HasSuffix(r.URL.Path, "/nodes/w1/proxy"+api.AgentSettingsPath):
		_, _ = io.WriteString(w, "release: v9\nnode-name: w1\ntoken: "+planted+"\nregistry-mirror: https://joe:"+
			planted+"@host\n")
	case strings.HasSuffix(r.URL.Path, "/nodes/w3/proxy"+api.AgentSettingsPath):
		// as an agent of the release before
		http.Error(w, "404 page not found: this node serves /healthz", http.StatusNotFound)
	case strings.HasSuffix(r.URL.Path, "/agent.log"), strings.Contains(r.URL.Path, "/nodes/w1/proxy/"),
		strings.Contains(r.URL.Path, "/nodes/w3/proxy/"):
		_, _ = io.WriteString(w, "secret: "+planted+"\nan agent's line\n")
	case strings.Contains(r.URL.Path, "/nodes/w2/proxy/"):
		refuse(w, 503, "the agent of w2 is not connected, password="+planted)
	case strings.Contains(r.URL.Path, "secrets") || strings.Contains(r.URL.Path, "configmaps"):
		refuse(w, 500, "a bundle must not ask for "+r.URL.Path)
	case strings.HasPrefix(r.URL.Path, "/api"):
		reply(`{"kind":"List","items":[` + leaks + `,{"kind":"Secret","data":{"k":"` + planted + `"}}]}`)
	case r.URL.Path == "/version", r.URL.Path == api.PathClusterCertificates, r.URL.Path == api.PathClusterKeys:
		reply(`{"note":"password: ` + planted + `"}`)
	default:
		p.aPlane.ServeHTTP(w, r)
	}
}

// unpacked are the files of a bundle, without the folder that they are in.
func unpacked(t *testing.T, file string) map[string]string {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if err == io.EOF {
			return out
		}
		raw, rerr := io.ReadAll(r)
		if err = errors.Join(err, rerr); err != nil {
			t.Fatal(err)
		}
		_, name, _ := strings.Cut(h.Name, "/")
		out[name] = string(raw)
	}
}

// Whatever the cluster answers, no secret that is in it gets into a bundle; what helps does, and the bundle says what it has
// and what is missing.
func TestSupportBundle(t *testing.T) {
	p := newPlane()
	p.status.Alarms = []api.ClusterAlarm{{Kind: "backups", Message: "secret=" + planted}}
	p.status.Members[2].Ready = "no: token=" + planted
	out := transcript(t, p, "status") // it is there before
	if !strings.Contains(out, planted) {
		t.Fatal("the status does not say what is planted: this test finds nothing")
	}
	srv := httptest.NewServer(aLeakyPlane{p})
	defer srv.Close()
	file := filepath.Join(t.TempDir(), "b.tar.gz")
	k := startKctl(t, srv.URL, "cluster", "support-bundle", file)
	if err := k.Wait(); err != nil {
		t.Fatalf("%v: %s", err, k.stderr.String())
	}
	info, err := os.Stat(file)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the bundle has mode %v, %v", info.Mode(), err)
	}
	files := unpacked(t, file)
	for name, text := range files {
		if strings.Contains(text, planted) {
			t.Errorf("%s has the secret:\n%s", name, text)
		}
	}
	for name, want := range map[string]string{
		"CONTENTS.txt": "  nodes/w2/agent.log\tthe", "status.txt": "cp1", "status.json": `"leader": "cp1"`,
		"replicas/cp1/daemon.log": "msg=fine", "replicas/cp4/metrics.txt": "up 1",
		"replicas/cp1/settings.txt": "backup-folder: /backups", "nodes/w1/agent.log": "an agent's line",
		"nodes/w1/settings.txt": "node-name: w1", "nodes/w3/agent.log": "an agent's line",
		"objects/pods.json": `"image": "app:7"`, "objects/nodes.json": `"name": "w2"`,
		"objects/events.json": "web-0", "version.json": "note", "kctl.txt": "kctl ",
	} {
		if !strings.Contains(files[name], want) {
			t.Errorf("%s does not say %q:\n%s", name, want, files[name])
		}
	}
	if _, missing, _ := strings.Cut(files["CONTENTS.txt"], "Missing:"); !strings.Contains(missing,
		"nodes/w3/settings.txt\treading the settings of the agent on node w3: the agent is of an earlier release") {
		t.Errorf("of an agent of the release before it says:%s", missing)
	}
	for _, p := range supportKinds {
		if _, ok := files["objects/"+path.Base(p)+".json"]; !ok {
			t.Errorf("%s are not in it", path.Base(p))
		}
	}
	again := startKctl(t, srv.URL, "cluster", "support-bundle", file)
	if code, said := again.ended(t); code != 1 || !strings.Contains(said, "exists") {
		t.Errorf("over a file that is there: %d, %s", code, said)
	}
}

// What hangs and what never ends is missing in a bundle, which is made all the same.
func TestSupportBundleIsBounded(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	p := newPlane()
	hung := atomic.Int64{}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body) // without it the server does not see that its client has gone
		switch {
		case r.URL.Path == api.PathClusterStatus:
			p.ServeHTTP(w, r)
		case r.URL.Path == "/version":
			for r.Context().Err() == nil {
				if _, err := w.Write(make([]byte, 1<<20)); err != nil {
					return
				}
			}
		default:
			if hung.Add(1) == 3 {
				cancel()
			}
			<-r.Context().Done()
		}
	}))
	defer func() { srv.CloseClientConnections(); srv.Close() }()
	rc, err := newRESTClient(&rest.Config{Host: srv.URL}, nil)
	if err != nil {
		t.Fatal(err)
	}
	b := &supportBundle{rest: rc, files: map[string][]byte{}, missing: map[string]string{}, left: maxSupportBytes}
	b.collectAll(ctx, []string{"w1"})
	if b.files["status.txt"] == nil || b.missing["objects/pods.json"] == "" || b.missing["nodes/w1/agent.log"] == "" ||
		b.missing["version.json"] == "" {
		t.Errorf("in it are %v, missing %v", sortedKeys(b.files), b.missing)
	}
	b.addFile("long", make([]byte, maxSupportFileBytes+100))
	if n := len(b.files["long"]); n > maxSupportFileBytes+60 ||
		!strings.HasPrefix(string(b.files["long"]), "(the first 100 bytes are left out)") {
		t.Errorf("of a file that is too long there are %d bytes", n)
	}
	b.left = 10
	if b.addFile("more", make([]byte, 11)); b.files["more"] != nil || b.missing["more"] == "" {
		t.Error("a bundle grows beyond its bound")
	}
}
