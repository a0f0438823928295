package kctl

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"
)

const pageOfNode = `# TYPE keelson_service_connections_total counter
keelson_service_connections_total{namespace="shop",service="db",port="sql",protocol="tcp",from="cluster"} %d
keelson_service_connections_total{namespace="shop",service="db",port="sql",protocol="tcp",from="outside"} 2
keelson_service_unserved_packets_total{namespace="shop",service="gone",port="",protocol="udp",from="cluster"} 9
coredns_dns_requests_total{server="x"} 12
`

// netVerb runs a verb of 'kctl net' in namespace shop of a cluster whose API answers this. A text is a page of a node's metrics.
func netVerb(
	t *testing.T, verb string, answers map[string]any,
) func(line ...string) (out, complaints string, err error) {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		switch o := answers[r.URL.Path].(type) {
		case nil:
			http.Error(w, "nobody answers", http.StatusBadGateway)
		case string:
			fmt.Fprint(w, o)
		default:
			_ = json.NewEncoder(w).Encode(o)
		}
	}))
	t.Cleanup(s.Close)
	at := filepath.Join(t.TempDir(), "config")
	config := fmt.Sprintf(`{"apiVersion":"v1","kind":"Config","current-context":"c","clusters":[{"name":"c",`+
		`"cluster":{"server":%q}}],"contexts":[{"name":"c","context":{"cluster":"c","namespace":"shop"}}]}`, s.URL)
	if err := os.WriteFile(at, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	return func(line ...string) (string, string, error) {
		flags := genericclioptions.NewConfigFlags(false)
		flags.KubeConfig = &at
		var out, complaints bytes.Buffer
		root := &cobra.Command{Use: "kctl", SilenceErrors: true, SilenceUsage: true}
		root.AddCommand(netCommand(cmdutil.NewFactory(flags),
			genericiooptions.IOStreams{Out: &out, ErrOut: &complaints}))
		root.SetArgs(append([]string{"net", verb}, line...))
		err := root.Execute()
		return out.String(), complaints.String(), err
	}
}

// answering are the API's answers of a cluster of three nodes, of which one does not answer.
func answering() map[string]any {
	no, yes := false, true
	meta := func(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Namespace: "shop", Name: name} }
	slice := discoveryv1.EndpointSlice{ObjectMeta: meta("db-1"), AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints: []discoveryv1.Endpoint{
			{Addresses: []string{"10.244.0.2"}, Conditions: discoveryv1.EndpointConditions{Ready: &yes}},
			{Addresses: []string{"10.244.0.3"}, Conditions: discoveryv1.EndpointConditions{Ready: &no}}}}
	slice.Labels = map[string]string{discoveryv1.LabelServiceName: "db"}
	return map[string]any{
		"/api/v1/namespaces/shop/services": corev1.ServiceList{Items: []corev1.Service{
			{ObjectMeta: meta("gone"), Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeClusterIP,
				ClusterIP: "10.96.0.11"}},
			{ObjectMeta: meta("db"), Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeNodePort,
				ClusterIP: "10.96.0.10"}}}},
		"/apis/discovery.k8s.io/v1/namespaces/shop/endpointslices": discoveryv1.EndpointSliceList{
			Items: []discoveryv1.EndpointSlice{slice}},
		"/api/v1/nodes": corev1.NodeList{
			Items: []corev1.Node{{ObjectMeta: metav1.ObjectMeta{Name: "w1"}},
				{ObjectMeta: metav1.ObjectMeta{Name: "w2"}}, {ObjectMeta: metav1.ObjectMeta{Name: "w3"}}}},
		"/api/v1/nodes/w1/proxy/metrics": fmt.Sprintf(pageOfNode, 40),
		"/api/v1/nodes/w2/proxy/metrics": fmt.Sprintf(pageOfNode, 100),
	}
}

// F109: what all nodes counted is added up, a node that does not answer is named, and the exit code says so.
func TestNetServices(t *testing.T) {
	run := netVerb(t, "services", answering())
	out, complaints, err := run()
	if want := "NAMESPACE   NAME   TYPE        ADDRESS      READY   CONNECTIONS   FROM OUTSIDE   UNSERVED\n" +
		"shop        db     NodePort    10.96.0.10   1/2     140           4              0\n" +
		"shop        gone   ClusterIP   10.96.0.11   0/0     0             0              18\n"; out != want {
		t.Errorf("got\n%s\nwant\n%s", out, want)
	}
	if !errors.Is(err, errFound) || !strings.Contains(complaints, "node w3: ") {
		t.Errorf("a node that does not answer: %v, %q", err, complaints)
	}
	out, _, _ = run("--nodes")
	if want := "shop        db     NodePort    10.96.0.10   1/2     w2     100           2             " +
		" 0\n"; !strings.Contains(out, want) {
		t.Errorf("by node:\n%s\nwant\n%s", out, want)
	}
	if _, _, err := run("-A", "db"); err == nil || !strings.Contains(err.Error(), "leave out the name") {
		t.Errorf("a name in all namespaces: %v", err)
	}
}

// Whatever a node says is read or refused, and nothing of it is taken for another Service's.
func FuzzParseCounts(f *testing.F) {
	f.Add(fmt.Sprintf(pageOfNode, 7))
	f.Add(`keelson_service_connections_total{namespace="a\"} 5`)
	f.Add("keelson_service_connections_total{} 1")
	f.Fuzz(func(t *testing.T, page string) {
		counts, err := parseCounts(strings.NewReader(page), "w1")
		if err != nil {
			return
		}
		for at := range counts {
			if at.node != "w1" {
				t.Fatalf("%v is no use of w1", at)
			}
		}
		if !strings.Contains(page, "keelson_service_") && len(counts) > 0 {
			t.Fatalf("%v out of nothing", counts)
		}
	})
}
