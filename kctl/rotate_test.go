package kctl

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"

	"keelson.dev/keelson/controlplane/api"
)

// An exchange of the CA that does not come to the step wait leaves the kubeconfig as it is, and the last word says how far it is
// and whom it waits for.
func TestWhyTheKubeconfigIsNotRenewed(t *testing.T) {
	all := api.ClusterKeys{Rotation: &api.ClusterRotation{Kind: clusterCA, Step: "trust"},
		Waiting: []string{"node w3: it is away", "cp2: it does not answer"}}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != api.PathClusterKeys || r.Method != http.MethodGet {
			t.Errorf("it asks %s %s", r.Method, r.URL.Path)
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(all)
	}))
	defer s.Close()
	flags := genericclioptions.NewConfigFlags(false)
	none := filepath.Join(t.TempDir(), "none")
	if err := os.WriteFile(none, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	flags.APIServer, flags.KubeConfig = &s.URL, &none
	var out bytes.Buffer
	// The last question is about to be asked when time is up.
	if err := renewWhenSigned(cmdutil.NewFactory(flags), genericiooptions.IOStreams{Out: &out, ErrOut: &out},
		4*time.Second); err != nil {
		t.Fatal(err)
	}
	want := "The kubeconfig in use is as it was: after 4s the rotation is at step trust and waits for node w3: it is " +
		"away; cp2: it does not answer. " +
		"'kctl cluster rotate --status' shows how it goes on; 'kctl cluster renew' when it is at step wait.\n"
	if out.String() != want {
		t.Errorf("it says %swant %s", out.String(), want)
	}
	for range maxWaitingShown {
		all.Waiting = append(all.Waiting, "node n: it is away")
	}
	if got := describeWaiting(all); !strings.HasSuffix(got, "; and for 2 more") {
		t.Errorf("%s", got)
	}
}
