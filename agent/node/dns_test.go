package node

import (
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/agent/fake"
)

// Pods with dnsPolicy ClusterFirst use the cluster's DNS server if there is one. The command line
// takes precedence.
func TestClusterDNS(t *testing.T) {
	objects := fake.NewCluster()
	servers := clusterDNS(nil, objects)
	if got := servers(); got != nil {
		t.Errorf("without a DNS: %q", got)
	}
	dns := &v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "kube-dns"},
		Spec: v1.ServiceSpec{ClusterIP: v1.ClusterIPNone}}
	objects.Put(dns)
	if got := servers(); got != nil {
		t.Errorf("with a headless one: %q", got)
	}
	dns = dns.DeepCopy()
	dns.Spec.ClusterIP = "10.96.0.10"
	objects.Put(dns)
	if got := servers(); !slices.Equal(got, []string{"10.96.0.10"}) {
		t.Errorf("with a DNS: %q", got)
	}
	if got := clusterDNS([]string{"192.0.2.53"}, objects)(); !slices.Equal(got, []string{"192.0.2.53"}) {
		t.Errorf("with another on the command line: %q", got)
	}
}
