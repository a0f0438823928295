package kctl

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/internal/clusterid"
)

// kctl records a later identity of the cluster in the kubeconfig and refuses a replica of an
// earlier one in one sentence. A replica of a release without identities is accepted, and nothing
// is written for a cluster that was never recovered. F53
func TestKubeconfigRecordsTheIdentity(t *testing.T) {
	var shown atomic.Value // string: what the replica sends; "" = nothing
	var sent atomic.Value
	shown.Store("")
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		sent.Store(req.Header.Get(clusterid.Header))
		if id := shown.Load().(string); id != "" {
			w.Header().Set(clusterid.Header, id)
		}
		_ = json.NewEncoder(w).Encode(api.ClusterStatus{Cluster: "c"})
	}))
	defer server.Close()
	path := filepath.Join(t.TempDir(), "kubeconfig")
	config := clientcmdapi.NewConfig()
	config.Clusters["c"] = &clientcmdapi.Cluster{Server: server.URL}
	config.AuthInfos["u"] = &clientcmdapi.AuthInfo{Token: "t"}
	config.Contexts["x"] = &clientcmdapi.Context{Cluster: "c", AuthInfo: "u"}
	config.CurrentContext = "x"
	if err := clientcmd.WriteToFile(*config, path); err != nil {
		t.Fatal(err)
	}
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var warned bytes.Buffer
	status := func() error {
		flags := genericclioptions.NewConfigFlags(true)
		flags.KubeConfig = &path
		compareIdentities(flags, &warned)
		var s api.ClusterStatus
		return callAPIContext(context.Background(), cmdutil.NewFactory(cmdutil.NewMatchVersionFlags(flags)), "GET",
			api.PathClusterStatus, nil, &s)
	}
	for _, c := range []struct{ what, shows, sends, refused string }{
		{"release without identities", "", "/0", ""},
		{"never recovered", "c-1/0", "/0", ""},
		{"recovered", "c-1/1700000000000", "/0", ""},
		{"recovered again", "c-1/1800000000000", "c-1/1700000000000", ""},
		{"abandoned", "c-1/1700000000000", "c-1/1800000000000",
			"before its recovery or restore of 2027-01-15T08:00:00Z"},
		{"abandoned by the first recovery", "c-1/0", "c-1/1800000000000", "rebuild"},
		{"release without identities in a recovered cluster", "", "c-1/1800000000000", ""},
		{"replica that joins", "/0", "c-1/1800000000000", ""},
		{"another cluster", "d-1/0", "c-1/1800000000000", ""},
	} {
		shown.Store(c.shows)
		err := status()
		if c.refused == "" && err != nil || c.refused != "" &&
			(err == nil || !strings.Contains(err.Error(), c.refused)) {
			t.Errorf("%s: error %v, want %q", c.what, err, c.refused)
		}
		if c.refused != "" && strings.Contains(commandErrorText(nil, err), "Get ") {
			t.Errorf("%s: not one sentence: %s", c.what, commandErrorText(nil, err))
		}
		if got := sent.Load(); got != c.sends {
			t.Errorf("%s: sent %v, want %s", c.what, got, c.sends)
		}
		if now, err := os.ReadFile(path); err != nil || c.what == "never recovered" && !bytes.Equal(now, before) {
			t.Errorf("%s: the kubeconfig was changed, error %v:\n%s", c.what, err, now)
		}
	}
	if warned.Len() > 0 {
		t.Errorf("warned: %s", &warned)
	}
}
