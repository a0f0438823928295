package kubectl_test

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

	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
	"keelson.dev/keelson/controlplane/pki"
)

// F3: kubectl sends JSON that equals the YAML file. F4: it uses the kubeconfig and context that it
// is given.
func TestKubectlSendsJSON(t *testing.T) {
	all := apiservertest.StockKubectls()
	if len(all) == 0 {
		t.Skip("no stock kubectl on this machine")
	}
	manifest := "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: wire\n  namespace: default\ndata:\n " +
		" answer: \"42\"\n"
	for name, binary := range all {
		t.Run(name, func(t *testing.T) {
			r := apiservertest.StartReplica(t, nil)
			apiservertest.GrantEdit(t, r, "alice")
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
				r.Server.Handler().ServeHTTP(w, req)
			}))
			defer wire.Close()
			conf := pki.Kubeconfig{
				Cluster: "recorded", Server: wire.URL, User: "alice", Token: "alice-token",
				CAPEM: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: wire.Certificate().Raw}),
			}.Config()
			other := pki.Kubeconfig{Cluster: "direct", Server: "https://" + r.Addr, CAPEM: r.Trust.CA.PEM(),
				User: "alice2", Token: "alice-token"}.Config()
			conf.Clusters["direct"], conf.AuthInfos["alice2"], conf.Contexts["direct"] = other.Clusters["direct"],
				other.AuthInfos["alice2"], other.Contexts["direct"]
			path := filepath.Join(t.TempDir(), "config")
			writeKubeconfig(t, path, conf)
			k := &apiservertest.Kubectl{T: t, Binary: binary, Config: path, Home: t.TempDir()}
			if out := k.Ok(manifest, "apply", "-f", "-"); out != "configmap/wire created\n" {
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
			k.Ok("", "config", "use-context", "direct")
			if out := k.Ok("", "get", "configmap", "wire", "-o", "name"); out != "configmap/wire\n" {
				t.Errorf("through the other context: %q", out)
			}
		})
	}
}

func writeKubeconfig(t *testing.T, path string, c *clientcmdapi.Config) {
	t.Helper()
	if err := clientcmd.WriteToFile(*c, path); err != nil {
		t.Fatal(err)
	}
}
