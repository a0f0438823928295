package apiserver

import (
	"bytes"
	"encoding/json"
	"encoding/pem"
	"io"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/yaml"

	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/internal/memory/memtest"
)

// F3: what kubectl sends for a YAML file is JSON that equals it. F4: it does so with the kubeconfig and context it is given.
func TestKubectlSendsJSON(t *testing.T) {
	all := stockKubectls()
	if len(all) == 0 {
		t.Skip("no stock kubectl on this machine")
	}
	manifest := "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: wire\n  namespace: default\ndata:\n  answer: \"42\"\n"
	for name, binary := range all {
		t.Run(name, func(t *testing.T) {
			r := start(t, nil)
			grantEdit(t, r, "alice")
			var mu sync.Mutex
			var media, body string
			wire := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
				if req.Method == "POST" && strings.HasSuffix(req.URL.Path, "/configmaps") {
					data, _ := io.ReadAll(req.Body)
					req.Body = io.NopCloser(bytes.NewReader(data))
					mu.Lock()
					media, body = req.Header.Get("Content-Type"), string(data)
					mu.Unlock()
				}
				r.Handler().ServeHTTP(w, req)
			}))
			defer wire.Close()
			conf := pki.Kubeconfig{
				Cluster: "recorded", Server: wire.URL, User: "alice", Token: "alice-token",
				CAPEM: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: wire.Certificate().Raw}),
			}.Config()
			other := pki.Kubeconfig{Cluster: "direct", Server: "https://" + r.addr, CAPEM: r.trust.CA.PEM(), User: "alice2", Token: "alice-token"}.Config()
			conf.Clusters["direct"], conf.AuthInfos["alice2"], conf.Contexts["direct"] = other.Clusters["direct"], other.AuthInfos["alice2"], other.Contexts["direct"]
			path := filepath.Join(t.TempDir(), "config")
			writeKubeconfig(t, path, conf)
			k := &kubectl{t: t, binary: binary, config: path, home: t.TempDir()}
			if out := k.ok(manifest, "apply", "-f", "-"); out != "configmap/wire created\n" {
				t.Errorf("%q", out)
			}
			mu.Lock()
			defer mu.Unlock()
			if media != "application/json" {
				t.Errorf("Content-Type %q", media)
			}
			var sent, want map[string]any
			if err := json.Unmarshal([]byte(body), &sent); err != nil {
				t.Fatalf("%v: %s", err, body)
			}
			if err := yaml.Unmarshal([]byte(manifest), &want); err != nil {
				t.Fatal(err)
			}
			delete(sent["metadata"].(map[string]any), "annotations") // kubectl's own memory of what was applied
			if !reflect.DeepEqual(sent, want) {
				t.Errorf("sent %v, the file says %v", sent, want)
			}
			k.ok("", "config", "use-context", "direct")
			if out := k.ok("", "get", "configmap", "wire", "-o", "name"); out != "configmap/wire\n" {
				t.Errorf("through the other context: %q", out)
			}
		})
	}
}

// The OpenAPI documents must not stay in memory as text: P1, 80 MiB a replica.
func TestOpenAPIIsSmallInMemory(t *testing.T) {
	r := start(t, nil)
	c := r.adminHTTP()
	before := memtest.LiveHeap()
	text := 0
	for _, path := range []string{"/openapi/v2", "/openapi/v3"} {
		text += len(r.call(c, "GET", path, "").body)
	}
	if grown := memtest.LiveHeap() - before; grown > 4<<20 {
		t.Errorf("%d bytes of OpenAPI cost %d bytes of heap", text, grown)
	}
}

func writeKubeconfig(t *testing.T, path string, c *clientcmdapi.Config) {
	t.Helper()
	if err := clientcmd.WriteToFile(*c, path); err != nil {
		t.Fatal(err)
	}
}
